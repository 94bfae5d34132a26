"""Words that several tools share: optimizers, attention, dtypes, LoRA, bitsandbytes, and sharding by FSDP."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trainfit.integrations.importers.base import OFF, Reading
from trainfit.spec.imported import Change
from trainfit.spec.parsing.synonyms import OPTIMIZERS as RECIPES_WORDS


class OptimizerWord(NamedTuple):
    """What a tool's name of an optimizer is in a recipe, and what is lost."""

    fields: Mapping[str, Any]
    changes: tuple[Change, ...] = ()
    note: str = ""


FUSED, FOREACH = RECIPES_WORDS["adamw_torch_fused"], RECIPES_WORDS["adamw_torch"]
ONE_MOMENT = "keeps one moment of each weight; predicted as AdamW, which keeps two"
LION = OptimizerWord(FUSED, ("memory", "numbers"), ONE_MOMENT)
LION_8BIT = OptimizerWord({"name": "adamw8bit"}, ("memory", "numbers"), ONE_MOMENT)
ADAM = OptimizerWord(FOREACH, ("numbers",), "Adam adds the decay to the gradient; AdamW's cost is equal")
OPTIMIZERS: dict[str, OptimizerWord] = {
    **{word: OptimizerWord(fields) for word, fields in RECIPES_WORDS.items()},
    "adamw_apex_fused": OptimizerWord(FUSED),
    "adamw": OptimizerWord(FOREACH),
    "adamw_hf": OptimizerWord({"name": "adamw", "implementation": "forloop"}),
    "adam": ADAM,
    "adamw8bit": OptimizerWord({"name": "bnb-adamw8bit"}),
    "paged_adamw": OptimizerWord({"name": "paged-adamw"}),
    "adafactor": OptimizerWord({"name": "adafactor"}),
    "sgd": OptimizerWord({"name": "sgd", "implementation": "foreach"}),
    "muon": OptimizerWord({"name": "muon"}),
    "lion": LION,
    "lion_32bit": LION,
    "lion_8bit": LION_8BIT,
    "paged_lion_8bit": LION_8BIT,
    "paged_lion_32bit": LION,
}
"""Names that transformers, axolotl, LLaMA-Factory and torchtune give optimizers."""
OTHER_OPTIMIZER = "predicted as AdamW with two moments a weight"

ATTENTION = {
    "flash": "flash",
    "flash_attention": "flash",
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "fa2": "flash",
    "fa3": "flash",
    "flash_attn": "flash",
    "sdpa": "sdpa",
    "auto": "sdpa",
    "torch": "sdpa",
    "eager": "eager",
    "disabled": "eager",
    "xformers": "efficient",
}
DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "torch.bfloat16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
    "float": "fp32",
    "torch.float32": "fp32",
    "auto": "auto",
}

DEFAULT_TARGETS = {
    "gpt2": ["c_attn"],
    "gpt_neox": ["query_key_value"],
    "bloom": ["query_key_value"],
    "falcon": ["query_key_value"],
}
"""PEFT's targets by model type where none are named; of other decoders ``q_proj`` and ``v_proj``."""

FSDP_IDLE = """
auto_wrap_policy transformer_layer_cls_to_wrap min_num_params state_dict_type final_state_dict_type
sync_module_states cpu_ram_efficient_loading use_orig_params backward_prefetch forward_prefetch
limit_all_gathers xla xla_fsdp_v2 xla_fsdp_grad_ckpt xla_fsdp_settings cpu_offload_pin_memory version
""".split()
"""Of FSDP's settings: how modules are grouped, loaded and saved."""

PAIR_LOSSES = ("sigmoid", "ipo", "hinge")
"""Of pairs, as TRL's DPOTrainer and LLaMA-Factory name them, and the recipe too."""


def take_optimizer(reading: Reading, name: str, default: str) -> None:
    """Set ``optimizer.name`` and its implementation from a tool's word."""
    word = reading.word(name, default)
    known = OPTIMIZERS.get(word) or OptimizerWord(FUSED, ("memory", "numbers"), OTHER_OPTIMIZER)
    for key, value in known.fields.items():
        if key == "name":
            reading.take_or_assume(name, "optimizer.name", value)
        else:
            reading.draft.set(f"optimizer.{key}", value)
    if known.changes:
        reading.draft.leave(reading.full(name), word, known.changes, known.note)


def take_attention(reading: Reading, name: str) -> None:
    """Set ``attention`` from the name of an implementation; an unknown one is named."""
    word = reading.word(name)
    if word is None:
        return
    is_kernel = "/" in word and "flash" in word  # Of the Hub, such as kernels-community/flash-attn3
    if word in ATTENTION or is_kernel:
        reading.take(name, "attention", "flash" if is_kernel else ATTENTION[word])
    else:
        reading.leave(name, ("memory", "time"), "predicted with torch's own choice (sdpa)")


def dtype(reading: Reading, name: str) -> str | None:
    """Return ``bf16``, ``fp16``, ``fp32`` or ``auto`` for a field that names a dtype."""
    word = reading.text(name)
    if word is None:
        return None
    if word.lower() not in DTYPES:
        raise reading.error(name, "bfloat16, float16, float32 or auto", "correct it")
    return DTYPES[word.lower()]


def take_lora(
    reading: Reading,
    *,
    rank: str,
    alpha: str,
    dropout: str,
    default_rank: int,
    default_alpha: int | None = None,
) -> None:
    """Set the adapter's rank, alpha and dropout; the alpha is the rank by default in a recipe."""
    found = reading.whole(rank, default_rank)
    reading.draft.set("adapter.kind", "lora")
    reading.take_or_assume(rank, "adapter.rank", found)
    value = reading.number(alpha)
    if value is not None:
        if value != int(value) or value < 1:
            raise reading.error(alpha, "a whole number of at least 1", "correct it")
        reading.take(alpha, "adapter.alpha", int(value))
    elif default_alpha is not None:
        reading.draft.assume(reading.full(alpha), "adapter.alpha", default_alpha)
    share = reading.number(dropout)
    if share is not None:
        reading.take(dropout, "adapter.dropout", float(share))


def take_targets(reading: Reading, name: str, *, every: Iterable[str] = ("all-linear", "all")) -> bool:
    """Set the adapter's targets; return whether the field has them."""
    targets = reading.raw(name)
    if targets is None:
        return False
    if isinstance(targets, str) and targets in every:
        reading.take(name, "adapter.targets", "all-linear")
    elif (
        isinstance(targets, str) and not targets.replace("_", "").replace(",", "").replace(" ", "").isalnum()
    ):
        reading.take(name, "adapter.targets", targets, "as one regular expression")
    else:
        reading.take(name, "adapter.targets", sorted(set(reading.texts(name))))
    return True


def targets_of(model_type: str) -> list[str]:
    """Return the modules that PEFT adapts where none are named."""
    return DEFAULT_TARGETS.get(model_type, ["q_proj", "v_proj"])


def take_adapter_variants(
    reading: Reading, *, dora: str = "use_dora", rslora: str = "use_rslora", saved: str = "modules_to_save"
) -> None:
    """Set what LoRA has beyond its products: DoRA's magnitudes, another scale, modules that train whole."""
    for name, field in ((dora, "adapter.dora"), (rslora, "adapter.rslora")):
        if reading.flag(name):
            reading.take(name, field, True)
        reading.idle([name])
    if modules := reading.texts(saved):
        reading.take(saved, "adapter.modules_to_save", sorted(set(modules)))


def take_bitsandbytes(
    reading: Reading,
    *,
    in_4bit: bool,
    in_8bit: bool,
    kind: str = "",
    double: str = "",
    compute: str = "",
    default_kind: str = "nf4",
    default_double: bool = False,
    default_compute: str | None = None,
    skipped: str = "",
    by: str = "",
) -> None:
    """Set ``quantize`` as bitsandbytes stores a base.

    Args:
        kind: field with nf4 or fp4.
        double: field with whether the magnitudes are quantised as well.
        compute: field with the dtype of the products.
        skipped: field with the names of layers that stay as they are.
        by: field that turns it on.
    """
    if in_8bit:
        reading.take(by, "quantize", "int8", "bitsandbytes keeps outlier columns in 16 bits")
    if not in_4bit:
        return
    word = reading.word(kind, default_kind) if kind else default_kind
    if word == "fp4":
        note = "other 16 values of 4 bits than nf4, of equal size"
        if reading.has(kind):
            reading.leave(kind, ("numbers",), note)
        else:
            reading.draft.suppose(reading.full(kind), "fp4", f"predicted as nf4: {note}")
    doubled = reading.flag(double, default_double) if double else default_double
    value: dict[str, Any] = {"kind": "nf4", "double": doubled, "library": "bitsandbytes"}
    computed = (dtype(reading, compute) if compute else None) or default_compute
    if computed in ("bf16", "fp16", "fp32"):
        value["compute"] = computed
    # The output head is outside of the blocks, which alone are quantised.
    if skipped and (names := [one for one in reading.texts(skipped, []) if one != "lm_head"]):
        value["skip_modules"] = names
    parts = [one for one in (kind, double, compute, skipped) if one and reading.is_open(one)]
    reading.accounted(*parts)
    reading.draft.idle += map(reading.full, parts)
    reading.take(by, "quantize", value)


def read_fsdp(reading: Reading) -> None:
    """Read FSDP's settings, whose names may begin with ``fsdp_``: sharding, offload and recomputation."""

    def named(name: str) -> str:
        return reading.first(name, f"fsdp_{name}")

    strategy, reshard = named("sharding_strategy"), named("reshard_after_forward")
    word = str(reading.word(strategy, "")).rpartition(".")[2]
    kinds = {
        "full_shard": ("fsdp", True),
        "1": ("fsdp", True),
        "shard_grad_op": ("fsdp", False),
        "2": ("fsdp", False),
        "no_shard": ("ddp", None),
        "3": ("ddp", None),
        "hybrid_shard": ("hsdp", True),
        "4": ("hsdp", True),
        "hybrid_shard_zero2": ("hsdp", False),
        "_hybrid_shard_zero2": ("hsdp", False),
        "5": ("hsdp", False),
    }
    if word:
        if word not in kinds:
            raise reading.error(strategy, "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD", "correct it")
        sharding, keeps = kinds[word]
        reading.know("sharding", sharding, strategy)
        if keeps is not None:
            reading.draft.know("reshard", keeps, reading.full(strategy), word.upper())
    value = reading.word(reshard)
    if value in kinds:  # accelerate 1.6 and later take either form here.
        reading.know("reshard", bool(kinds[value][1]), reshard)
    elif value is not None:
        reading.know("reshard", reading.flag(reshard), reshard)
    for name, key in (("offload_params", "offload_params"), ("activation_checkpointing", "recompute")):
        if (flag := reading.flag(named(name))) is not None:
            if flag:
                reading.know(key, True, named(name))
            else:
                reading.idle([named(name)])
    reading.leave(named("mixed_precision_policy"), ("memory", "time"), "the dtype of mixed precision decides")
    reading.idle((*FSDP_IDLE, *(f"fsdp_{one}" for one in FSDP_IDLE)))
    reading.finish()


def take_recompute(reading: Reading, name: str, *, default: bool) -> None:
    """Note whether each block is recomputed, by a field that is true or false."""
    reading.know("recompute", reading.flag(name, default), name)


def take_pair_loss(reading: Reading, *, loss: str, beta: str, label_smoothing: str) -> None:
    """Read DPO's loss of pairs: the fields' names of its kind, its beta and the share of wrong labels."""
    if reading.has(beta) and reading.number(beta) > 0:
        reading.take(beta, "objective.beta", reading.number(beta))
    losses = reading.raw(loss)
    kind = losses[0] if isinstance(losses, list) and len(losses) == 1 else losses
    if kind in PAIR_LOSSES:
        reading.take(loss, "objective.loss", kind)
    reading.leave(loss, ("numbers",), "another loss of pairs, with the same log-probabilities")
    share = reading.number(label_smoothing, 0.0)
    if kind in (None, "sigmoid") and 0 < share < 0.5:
        reading.take(label_smoothing, "objective.label_smoothing", share)
    reading.leave(label_smoothing, ("numbers",), "labels of pairs that are smoothed")


def leave_all(reading: Reading, fields: Mapping[str, tuple[tuple[Change, ...], str]]) -> None:
    """List the fields of a table that are there, with what each would change."""
    for name, (changes, note) in fields.items():
        reading.leave(name, changes, note, off=OFF)
