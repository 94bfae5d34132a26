"""Recipe: model x techniques x batch x hardware, the one input of every command.

Frozen and strict. Its id is a hash of what differs from the defaults: equal recipes have equal ids.
"""

import importlib
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from trainfit.spec import DEFAULT_GPU
from trainfit.spec.data import Data
from trainfit.spec.objective import Objective, Pretrain
from trainfit.spec.outside import Extensible
from trainfit.spec.quantize import Quantize, Quantized
from trainfit.spec.recompute import BudgetGib, Recompute
from trainfit.spec.value import FromPercent, PositiveInt, Value, disagreement, short_hash

Precision = Literal[
    "fp32", "bf16", "bf16-master", "amp-bf16", "amp-fp16", "fp8", "mixed-bf16", "fp16-master", "fp16-pure",
]  # fmt: skip
AttentionKernel = Literal["sdpa", "flash", "cudnn", "efficient", "math", "eager", "triton"]
Attention = Literal[AttentionKernel, "best"]
"""``best``: the fastest kernel that is correct for the model, by the catalog's measurements on this GPU."""
Loss = Literal["standard", "chunked", "fused"]
BlockKernels = Literal["standard", "triton", "swiglu", "swiglu-rope", "fp8"]
OptimizerName = Literal[
    "adamw", "adamw8bit", "adamw4bit", "bnb-adamw8bit", "paged-adamw8bit", "paged-adamw", "torchao-adamw8bit",
    "torchao-adamw4bit", "adafactor", "sgd", "muon",
]  # fmt: skip
"""``bnb-``, ``paged-`` and ``torchao-``: bitsandbytes' and torchao's own classes."""
Strategy = Literal["auto", "fsdp", "ddp", "naive", "flat", "overlapped", "bucketed", "zero1"]
"""auto: fsdp. ddp: torch's. naive, flat, overlapped, bucketed: those of ``trainfit.parallel.DataParallel``.
zero1: torch's DDP with a sharded optimizer."""

Schedule = Literal["1f1b", "interleaved", "gpipe"]
"""Order of a pipeline's forwards and backwards (``spec.pipeline``)."""

NoDecay = Literal["norms", "biases", "embeddings"]
NO_DECAY: tuple[NoDecay, ...] = get_args(NoDecay)

MAX_MICRO_BATCH_TOKENS = 2**26
"""Far over any device. A prediction too draws the ids of a batch on the host: 0.5 GB of these."""


def names() -> Any:
    """Return ``trainfit.catalog.names``, imported on use: the catalog is built of this room's values."""
    return importlib.import_module("trainfit.catalog.names")


def hub() -> Any:
    """Return ``trainfit.catalog.hub``, imported on use as ``names`` is."""
    return importlib.import_module("trainfit.catalog.hub")


RANDOM = "random"
"""``model.weights`` of a model that is initialised."""


class ModelSpec(Value):
    """The model: a catalog name (or a synonym) or the mapping of a config.json, and its implementation.

    Attributes:
        weights: a folder of safetensors in the Hugging Face layout, or a repository on the Hub
            (``owner/name``, ``owner/name@revision``); ``random``: the model's own initialisation.
    """

    config: str | dict[str, JsonValue]
    implementation: Literal["hf", "native"] = "hf"
    name: str | None = None
    weights: Annotated[str, Field(min_length=1)] = RANDOM

    @field_validator("config")
    @classmethod
    def _name_of_the_catalog(cls, config: str | dict[str, JsonValue]) -> str | dict[str, JsonValue]:
        return (names().find_model(config) or config) if isinstance(config, str) else config

    @property
    def display_name(self) -> str:
        """The given name, else the catalog's, else the config's own."""
        if self.name or isinstance(self.config, str):
            return self.name or str(self.config)
        return str(self.config.get("_name_or_path") or self.config.get("model_type") or "inline")


class Batch(Value):
    """A data-parallel rank's batch: ``accumulate`` micro-batches of ``micro`` sequences of ``seq`` tokens."""

    micro: PositiveInt = 1
    seq: PositiveInt = 1024
    accumulate: PositiveInt = 1

    @model_validator(mode="after")
    def _countable(self) -> "Batch":
        if self.micro * self.seq > MAX_MICRO_BATCH_TOKENS:
            problem = f"a micro-batch of {self.micro} x {self.seq} tokens is over {MAX_MICRO_BATCH_TOKENS:,}"
            raise disagreement(problem, "write a smaller batch.micro or batch.seq", field="batch.micro")
        if self.seq == 1:
            problem = "a sequence of one token has no next token to learn"
            raise disagreement(problem, "write 2 or more", field="batch.seq")
        return self

    @property
    def tokens(self) -> int:
        """Tokens of a step's examples on one data-parallel rank, of one sequence each."""
        return self.micro * self.seq * self.accumulate


class LossTerms(Value):
    """Terms of the training loss; evaluation reports the cross-entropy alone."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1), FromPercent] = 0.0
    """s: the target is 1 - s of the token and s of all tokens alike."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0  # z: adds z times the mean square of log-sum-exp of logits


class Offload(Value):
    """Tensors kept in pinned host memory until they are needed, copied while the GPU computes."""

    activations: bool = False  # Tensors that the forward saves for the backward
    weights: bool = False
    """Blocks' weights and optimizer state, a few blocks at a time on the GPU, for models larger than it."""
    optimizer: bool = False
    """The optimizer's state of all weights, a part at a time on the GPU while it is updated there."""


class Loader(Value):
    """Data loading."""

    workers: Annotated[int, Field(ge=0, le=1024)] = 0  # Processes
    prefetch: PositiveInt = 2  # Batches of each process
    pin_memory: bool = True


class Optimizer(Value):
    """The optimizer and how its update is run.

    Attributes:
        implementation: by default fused, or forloop for Adafactor without stochastic rounding (torch's own
            default). Filled in here, so that a recipe's id does not depend on writing it; so is Muon's
            momentum of 0.95. ``triton``: AdamW by trainfit's kernel.
        momentum: SGD's and Muon's momentum, or Adafactor's beta1; 0 keeps no first moment.
        in_backward: update each weight as soon as its gradient is complete (True), or each block's together.
        stochastic_rounding: round bf16 weights up or down at random, in proportion to the part cut off.
        scale_parameter: Adafactor multiplies the rate by a weight's root mean square; False: absolute steps.
        clip_norm: the largest norm of all gradients together.
        no_decay: kinds of weights without weight decay, in a group of their own. ``[norms, biases]`` is the
            rule of the Hugging Face Trainer.
    """

    name: Annotated[OptimizerName, Extensible("optimizer.name")] = "adamw"
    implementation: Literal["foreach", "fused", "forloop", "triton"] = "fused"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    in_backward: Literal[False, True, "block"] = False
    stochastic_rounding: bool = False
    scale_parameter: bool = True
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    no_decay: tuple[NoDecay, ...] = ()

    @field_validator("no_decay", mode="before")
    @classmethod
    def _in_one_order(cls, kinds: Any) -> Any:
        if isinstance(kinds, str):
            kinds = [kinds]
        if isinstance(kinds, list | tuple) and set(map(str, kinds)) <= set(NO_DECAY):
            return tuple(kind for kind in NO_DECAY if kind in kinds)
        return tuple(kinds) if isinstance(kinds, list) else kinds

    @model_validator(mode="before")
    @classmethod
    def _best_for_this_one(cls, data: Any) -> Any:
        if isinstance(data, dict) and "implementation" not in data and data.get("name") == "adafactor":
            rounded = data.get("stochastic_rounding") is True  # which torch's own has not
            return {**data, "implementation": "fused" if rounded else "forloop"}
        if isinstance(data, dict) and "momentum" not in data and data.get("name") == "muon":
            return {**data, "momentum": 0.95}
        return data

    @model_validator(mode="after")
    def _has_a_kernel(self) -> "Optimizer":
        if self.implementation == "triton" and self.name != "adamw":
            problem = f"trainfit's kernel of this name is AdamW's, and this is {self.name}"
            raise disagreement(problem, "use fused", field="optimizer.implementation")
        return self

    @model_validator(mode="after")
    def _scales_by_weights(self) -> "Optimizer":
        if not self.scale_parameter and self.name != "adafactor":
            problem = f"only Adafactor scales its steps by the weights, and this is {self.name}"
            raise disagreement(problem, "leave it out", field="optimizer.scale_parameter")
        return self


def _form(targets: Any) -> str:
    return "names" if isinstance(targets, list | tuple) else "pattern"


Targets = Annotated[
    Annotated[str, Tag("pattern")] | Annotated[tuple[str, ...], Tag("names")], Discriminator(_form)
]


OWN_ENCODERS = {"p-tuning": "mlp"}
"""Kind of adapter -> its reparametrization by default; of others none."""


class Adapter(Value):
    """Parameter-efficient fine-tuning: the base is frozen, only the adapter trains.

    Attributes:
        targets: modules that LoRA adapts: linear layers, and embeddings by name.
        dora: LoRA's direction and a trained magnitude of each output (DoRA).
        rslora: products are scaled by alpha / sqrt(rank) instead of alpha / rank.
        modules_to_save: names of modules of which a copy trains whole, next to LoRA.
        tokens: virtual tokens of prompt tuning, prefix tuning and p-tuning.
        reparametrization: layers that produce the virtual tokens while they train: ``mlp`` or ``lstm``, of
            p-tuning by default ``mlp``; ``none``: they train themselves. None: the kind's own.
        encoder_hidden_size: width of these layers; None: the model's, as PEFT has it.
    """

    kind: Annotated[Literal["lora", "prompt", "prefix", "p-tuning"], Extensible("adapter.kind")]
    rank: Annotated[int, Field(ge=1, le=2**14)] = 16
    alpha: PositiveInt | None = None
    targets: Targets = "all-linear"
    dtype: Literal["fp32", "base"] = "fp32"
    dropout: Annotated[float, Field(ge=0, lt=1), FromPercent] = 0.0
    dora: bool = False
    rslora: bool = False
    modules_to_save: tuple[str, ...] = ()
    tokens: PositiveInt = 20
    reparametrization: Literal["none", "mlp", "lstm"] | None = None
    encoder_hidden_size: PositiveInt | None = None

    @field_validator("reparametrization")
    @classmethod
    def _is_none_if_the_kinds_own(cls, value: Any, info: ValidationInfo) -> Any:
        # So that an id does not depend on writing it.
        return None if value == OWN_ENCODERS.get(info.data.get("kind", ""), "none") else value

    @property
    def encoder(self) -> str:
        """The layers that produce the virtual tokens: ``mlp``, ``lstm`` or ``none``."""
        return self.reparametrization or OWN_ENCODERS.get(self.kind, "none")


class Parallel(Value):
    """Ranks of each kind of parallelism, and how data parallelism is done.

    The product of replicate, shard, tensor, context and pipeline is the GPU count. Left at 1, replicate
    (strategies that keep whole weights) or shard (FSDP2) is what the others leave of the GPUs.

    Attributes:
        expert: ranks over which a layer's experts are spread; they are taken from the shards.
        bucket_mb: size of a bucket of gradients in MiB; None: one bucket.
        sync_each_batch: reduce gradients after every micro-batch; False: after the last one of a step,
            which keeps whole gradients until then. None: True for FSDP2 without a pipeline, else False.
        prefetch: blocks that FSDP2 gathers ahead of the one that computes; None: in the forward none, in the
            backward one.
        copy_engines: FSDP2 sends by the GPUs' copy engines, within one host, instead of by NCCL.
        virtual_stages: stages that each GPU of an interleaved pipeline holds; None: two.
    """

    replicate: PositiveInt = 1
    shard: PositiveInt = 1
    tensor: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    pipeline: PositiveInt = 1
    strategy: Strategy = "auto"
    reshard_after_forward: bool = True
    bucket_mb: Annotated[float, Field(gt=0)] | None = 25.0
    sync_each_batch: bool | None = None
    prefetch: PositiveInt | None = None
    copy_engines: bool = False
    schedule: Schedule = "1f1b"
    virtual_stages: PositiveInt | None = None

    @model_validator(mode="after")
    def _stages_agree(self) -> "Parallel":
        if self.pipeline == 1 and (self.schedule != "1f1b" or self.virtual_stages is not None):
            name = "schedule" if self.schedule != "1f1b" else "virtual_stages"
            problem, remedy = "there is no pipeline", f"set parallel.pipeline, or leave {name} out"
            raise disagreement(problem, remedy, field=f"parallel.{name}")
        if self.virtual_stages is not None and (self.virtual_stages > 1) != (self.schedule == "interleaved"):
            problem = f"{self.schedule} with {self.virtual_stages} stages on a GPU"
            remedy = "use schedule: interleaved with two or more, another schedule with one"
            raise disagreement(problem, remedy, field="parallel.virtual_stages")
        return self

    @property
    def stages_per_rank(self) -> int:
        """Stages of the pipeline that each GPU holds."""
        return self.virtual_stages or (2 if self.schedule == "interleaved" else 1)

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.tensor * self.context * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks, that read different data."""
        return self.replicate * self.shard

    @property
    def shards_weights(self) -> bool:
        """True for FSDP2."""
        return self.strategy in ("auto", "fsdp")

    @property
    def syncs_each_batch(self) -> bool:
        """Whether gradients are reduced after every micro-batch."""
        default = self.shards_weights and self.pipeline == 1
        return default if self.sync_each_batch is None else self.sync_each_batch

    @property
    def dimensions(self) -> dict[str, int]:
        """The mesh's dimensions, the last one's ranks neighbours; those of size 1 but shard left out."""
        sizes = {name: getattr(self, name) for name in MESH_DIMENSIONS}
        return {name: size for name, size in sizes.items() if size > 1 or name in ("replicate", "shard")}

    def over(self, count: int) -> "Parallel":
        """Return the mesh over ``count`` GPUs: what is left of them replicates or shards."""
        left, rest = divmod(count, self.world_size)
        if rest or self.data_ranks > 1:
            return self
        return self.model_copy(update={"shard" if self.shards_weights else "replicate": left})


MESH_DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
"""Order of a mesh's dimensions: those that communicate most are between neighbours."""


class Hardware(Value):
    """GPU (a name of the catalog) and count; a price of one's own overrides the catalog's."""

    gpu: str = DEFAULT_GPU
    count: PositiveInt = 1
    nodes: PositiveInt | None = None  # Hosts, with equally many GPUs each; None: the catalog's GPUs a host
    price_per_hour: Annotated[float, Field(ge=0)] | None = None  # US dollars for one GPU and one hour

    @field_validator("gpu")
    @classmethod
    def _name_of_the_catalog(cls, gpu: str) -> str:
        return names().gpu_name(gpu)

    @model_validator(mode="after")
    def _equal_hosts(self) -> "Hardware":
        if self.nodes is not None and self.count % self.nodes:
            problem = f"{self.count} GPUs cannot be shared equally by {self.nodes} hosts"
            raise disagreement(problem, "write a divisor of hardware.count", field="hardware.nodes")
        return self


class Recipe(Value):
    """One training step, described whole. See docs/reference/recipe.md for every field."""

    model: ModelSpec
    batch: Batch = Batch()
    precision: Annotated[Precision, Extensible("precision")] = "bf16"
    attention: Annotated[Attention, Extensible("attention")] = "sdpa"
    block_kernels: Annotated[BlockKernels, Extensible("block_kernels")] = "standard"
    """Whose norms, gates and rotations the blocks run: the model's own code, or our kernels."""
    fp8_scaling: Annotated[Literal["dynamic", "delayed"], Extensible("fp8_scaling")] = "dynamic"
    """Whether SwiGLU in fp8 is rounded by a tensor's own largest magnitude, or by the step before's."""
    fp8_weights: Annotated[
        Literal["each-use", "scales", "codes", "both-layouts"], Extensible("fp8_weights")
    ] = "each-use"
    """What of a weight's rounding to fp8 is computed once a step, and kept; ``each-use``: nothing."""
    accumulation: Annotated[Literal["standard", "fused"], Extensible("accumulation")] = "standard"
    """Whether the gradients of micro-batches are added by kernels of their own, or by the products."""
    loss: Annotated[Loss, Extensible("loss")] = "standard"
    loss_terms: LossTerms = LossTerms()
    objective: Objective = Pretrain()
    recompute: Recompute = "none"
    compile: Annotated[Literal[False, "block", "model"], Extensible("compile")] = False
    optimizer: Optimizer = Optimizer()
    adapter: Adapter | None = None
    quantize: Quantize | None = None
    offload: Offload = Offload()
    loader: Loader = Loader()
    data: Data = Data()
    empty_cache_every: PositiveInt | None = None
    """Give the allocator's unused memory back to the driver after every so many steps."""
    parallel: Parallel = Parallel()
    hardware: Hardware = Hardware()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _counts_agree(self) -> "Recipe":
        world_size, count = self.mesh.world_size, self.hardware.count
        if world_size != count:
            kinds = " x ".join(MESH_DIMENSIONS)
            problem = f"parallel ({kinds}) is {world_size}, hardware.count is {count}"
            raise disagreement(problem, "make the two equal", field="hardware.count")
        if self.quantize and self.adapter is None:
            problem = "a quantised base is frozen, so nothing would train"
            raise disagreement(problem, "add an adapter, such as adapter: {kind: lora}", field="quantize")
        return self

    @property
    def mesh(self) -> Parallel:
        """``parallel`` over all GPUs: with their count alone FSDP2."""
        return self.parallel.over(self.hardware.count)

    @property
    def has_pairs(self) -> bool:
        """Whether its examples are pairs of answers, of one sequence each."""
        return self.objective.sequences > 1

    @property
    def micro_sequences(self) -> int:
        """Sequences of a micro-batch: two for each pair of answers, one for any other example."""
        return self.batch.micro * self.objective.sequences

    @property
    def rank_tokens(self) -> int:
        """Tokens of one optimizer step on one data-parallel rank."""
        return self.batch.tokens * self.objective.sequences

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step on all ranks."""
        return self.rank_tokens * self.mesh.data_ranks

    @property
    def has_fsdp(self) -> bool:
        """True if FSDP2 gathers weights from several ranks; tensor-parallel ranks alone gather none."""
        return self.mesh.shards_weights and self.mesh.data_ranks * self.mesh.context > 1

    @property
    def gathers_in_bf16(self) -> bool:
        """True if FSDP2 keeps fp32 shards, gathers them in bf16 and reduces gradients in fp32."""
        return self.precision == "mixed-bf16" or (self.precision == "bf16-master" and self.has_fsdp)

    @property
    def optimizer_keeps_master(self) -> bool:
        """True if the model's weights have 16 bits and the optimizer keeps an fp32 copy of them."""
        return self.precision in ("bf16-master", "fp16-master") and not self.has_fsdp

    @property
    def scales_loss(self) -> bool:
        """True if the backward computes in fp16, so that the loss is scaled."""
        return self.precision in ("amp-fp16", "fp16-master", "fp16-pure")

    @property
    def weight_bytes(self) -> int:
        """Bytes of each weight as the model is built: of bf16, fp16 or fp32."""
        return 2 if self.precision in ("bf16", "fp8", "fp16-pure") or self.optimizer_keeps_master else 4

    @property
    def base(self) -> Quantized | None:
        """How the frozen base is quantised; None: it is not."""
        return None if self.quantize is None else Quantized.of(self.quantize)

    @property
    def has_open_fields(self) -> bool:
        """True if a field states a goal, so that it is planned before a step is built."""
        return self.plans_recompute or self.attention == "best"

    @property
    def plans_recompute(self) -> bool:
        """True if the recomputation of each block is planned, within a budget or the GPU's memory."""
        return isinstance(self.recompute, BudgetGib) or self.recompute == "fit"

    def without_open_fields(self) -> "Recipe":
        """Return the recipe with a plain value for each open field, which can be checked before planning."""
        recompute = "none" if self.plans_recompute else self.recompute
        attention = "sdpa" if self.attention == "best" else self.attention
        return self.model_copy(update={"recompute": recompute, "attention": attention})

    @cached_property
    def id(self) -> str:
        """Sixteen hex digits of a hash of the fields that differ from their defaults.

        A field that is added with a default changes no id. A default must therefore never change: an id in
        which the field does not occur would stand for another recipe.
        """
        return short_hash(self.model_dump(mode="json", exclude_defaults=True))

    def content(self) -> dict[str, Any]:
        """Return all fields as plain data (what JSON holds), without derived values."""
        return self.model_dump(mode="json")
