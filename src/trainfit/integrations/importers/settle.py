"""From facts of several files to the fields of a recipe that depend on more than one of them."""

from typing import Any

from trainfit.catalog.load import model_config
from trainfit.flops.closed_form import layer_windows
from trainfit.integrations.importers.base import Draft, shown
from trainfit.integrations.importers.vocabulary import DTYPES, targets_of
from trainfit.spec.errors import InputError
from trainfit.spec.imported import Change, TakenField
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import MESH_DIMENSIONS, Batch, Recipe
from trainfit.techniques import registry

ON_HOST = (
    "FSDP's host offload: weights, gradients and optimizer states wait in host memory; less on the GPU, "
    "more time"
)
STATES_ON_HOST = (
    "host offload of the optimizer: its states wait in host memory and are updated there; less on the GPU, "
    "more time"
)
TORCHAO = "states of torchao's layout and equal size, in trainfit's kernel"
COUNT = "no file states it"
OF_CHECKPOINT = "the checkpoint's dtype, as transformers 5 loads it"
MAX_REFUSALS = 12
NEAREST: dict[str, dict[Any, tuple[str, str]]] = {
    "optimizer.name": {
        "bnb-adamw8bit": ("adamw8bit", TORCHAO),
        "paged-adamw8bit": ("adamw8bit", TORCHAO),
        "torchao-adamw8bit": ("adamw8bit", TORCHAO),
        "torchao-adamw4bit": ("adamw4bit", TORCHAO),
        "paged-adamw": ("adamw", "its states stay on the GPU"),
    },
    "optimizer.implementation": {
        "foreach": ("fused", "the kernel that has these states"),
        "forloop": ("fused", "the kernel that has these states"),
    },
    "precision": {
        "bf16-master": ("amp-bf16", "fp32 weights that compute in bf16"),
        "mixed-bf16": ("amp-bf16", "fp32 weights that compute in bf16"),
        "fp16-master": ("amp-fp16", "fp32 weights that compute in fp16"),
    },
}
"""Field of a recipe -> value -> the nearest where the others of the recipe exclude it, and what that is.

bitsandbytes' and torchao's states do not follow shards, and AdamW alone has fp32 master weights.
"""
KEPT = (
    "model", "batch", "hardware", "adapter", "quantize", *(f"parallel.{axis}" for axis in MESH_DIMENSIONS),
    "parallel.expert",
)  # fmt: skip
"""Fields without which a recipe would be another run: what is refused of them is the user's to change."""
FALLBACKS: dict[str, tuple[tuple[Change, ...], str]] = {
    "offload.weights": (("memory", "time"), ON_HOST),
    "offload.optimizer": (("memory", "time"), STATES_ON_HOST),
    "recompute": (("memory", "time"), "predicted without recomputation"),
}
"""Field of a recipe -> what is lost where the recipe cannot have it."""


def settle(draft: Draft) -> None:
    """Set the fields that depend on several facts: precision, recomputation, GPUs and sharding, offload."""
    _targets(draft)
    _size(draft)
    _count(draft)
    _accumulate(draft)
    _sharding(draft)
    _recompute(draft)
    _precision(draft)
    _offload(draft)
    _attention(draft)


def _take(draft: Draft, key: str, dotted: str, value: Any, note: str = "") -> None:
    """Set a recipe's field from a fact: taken where a file states it, else assumed."""
    fact = draft.facts[key]
    if fact.is_stated:
        draft.take(fact.name, fact.given, dotted, value, note)
    else:
        draft.assume(fact.name, dotted, value, note)


def _mention(draft: Draft, key: str, note: str) -> None:
    """Account for a stated fact that sets no field by itself."""
    fact = draft.facts.get(key)
    if fact is not None and fact.is_stated and not _is_listed(draft, fact.name):
        value = shown(fact.value)
        draft.taken.append(
            TakenField(name=fact.name, given=shown(fact.given), field="", value=value, note=note)
        )


def _targets(draft: Draft) -> None:
    """Set the adapter's targets where none are named, to PEFT's for the type of the model."""
    if "targets" in draft.facts and draft.value("adapter.kind") == "lora":
        kind = str(model_config(draft.data["model"]["config"]).get("model_type"))
        draft.assume(
            draft.facts["targets"].name, "adapter.targets", targets_of(kind), "PEFT's for this model"
        )


def _accumulate(draft: Draft) -> None:
    """Set the accumulation from the sequences of a whole step, which some tools state instead."""
    total = draft.fact("global_batch")
    if total is None:
        return
    each = (draft.value("batch.micro") or 1) * _data_ranks(draft)
    fact = draft.facts["global_batch"]
    if draft.value("batch.accumulate") is not None or total % each:
        note = f"{each} sequences run at once on these GPUs; the recipe's accumulation decides"
        draft.leave(fact.name, fact.given, ("time", "numbers"), note)
        return
    draft.take(fact.name, fact.given, "batch.accumulate", total // each, f"of {each} sequences at once")


def _data_ranks(draft: Draft) -> int:
    """Return the number of GPUs, or groups of GPUs, that read different data."""
    ranks = draft.value("hardware.count")
    for axis in ("tensor", "context", "pipeline"):
        ranks //= draft.value(f"parallel.{axis}") or 1
    return max(ranks, 1)


def _is_listed(draft: Draft, name: str) -> bool:
    lists = (*draft.taken, *draft.without, *draft.unread)
    return any(one.name == name for one in lists) or name in draft.idle


def _size(draft: Draft) -> None:
    """List the micro-batch and the length of its sequences where no file states them."""
    for name, value in (("micro", Batch().micro), ("seq", Batch().seq)):
        draft.assume("", f"batch.{name}", value, COUNT)


def _count(draft: Draft) -> None:
    """Set the number of GPUs: the user's, a file's, the product of the degrees, or one."""
    product = 1
    for axis in ("replicate", "shard", "tensor", "context", "pipeline"):
        product *= draft.value(f"parallel.{axis}") or 1
    if draft.count is not None:
        draft.set("hardware.count", draft.count)
        _mention(draft, "count", "--count comes first")
    elif "count" in draft.facts:
        count = draft.fact("count")
        _take(draft, "count", "hardware.count", count if count % product == 0 else product)
    else:
        draft.assume("", "hardware.count", product, COUNT if product == 1 else "the product of the degrees")


def _sharding(draft: Draft) -> None:
    """Set how data parallelism is done, where there are several data-parallel GPUs; by default DDP."""
    draft.know("sharding", "ddp", "", is_stated=False)
    sharding, count = draft.fact("sharding"), draft.value("hardware.count")
    if count == 1 or _data_ranks(draft) == 1:
        _mention(draft, "sharding", "one GPU shards nothing" if count == 1 else "")
        _mention(draft, "reshard", "one GPU shards nothing")
        return
    if sharding in ("ddp", "zero1"):
        _take(draft, "sharding", "parallel.strategy", sharding)
    elif sharding == "zero2":
        _take(draft, "sharding", "parallel.reshard_after_forward", False, "FSDP2 that keeps gathered weights")
    else:
        _take(draft, "sharding", "parallel.strategy", "fsdp")
        if sharding == "hsdp" and draft.value("parallel.replicate") is None:
            _replicate(draft, count)
    if sharding in ("fsdp", "hsdp") and draft.fact("reshard") is not None:
        _take(draft, "reshard", "parallel.reshard_after_forward", draft.fact("reshard"))
    _mention(draft, "reshard", "")


def _replicate(draft: Draft, count: int) -> None:
    """Shard within each host and replicate between hosts."""
    nodes = draft.value("hardware.nodes") or 1
    if nodes > 1 and count % nodes == 0:
        draft.set("parallel.replicate", nodes)
        draft.set("parallel.shard", count // nodes)


def _recompute(draft: Draft) -> None:
    value = draft.fact("recompute")
    if value is not None:
        _take(
            draft,
            "recompute",
            "recompute",
            {True: "full", False: "none"}[value] if isinstance(value, bool) else value,
        )


def _precision(draft: Draft) -> None:
    """Set the precision from the dtype of the weights, that of the products, and the sharding."""
    if draft.value("precision") is not None:
        return
    compute, sharding = draft.fact("compute"), draft.fact("sharding")
    weights, why = draft.fact("weights"), ""
    if weights in (None, "auto"):
        weights, why = _of_checkpoint(draft), OF_CHECKPOINT
    deepspeed = sharding in ("zero1", "zero2", "zero3") or draft.fact("deepspeed")
    found = _precision_of(draft, weights, compute, bool(deepspeed))
    if deepspeed and compute == "fp16" and found == "bf16-master":
        fact = draft.facts["compute"]
        draft.leave(fact.name, fact.given, ("numbers",), "FSDP2 gathers in bf16 here, whose sizes are equal")
    key = next(
        (one for one in ("compute", "weights") if one in draft.facts and draft.facts[one].is_stated), ""
    )
    note = f"weights in {weights}"
    if key:
        _take(draft, key, "precision", found, note)
    else:
        draft.assume("", "precision", found, note)
    for one in ("weights", "compute"):
        _mention(draft, one, "")
    if "weights" not in draft.facts or not draft.facts["weights"].is_stated:
        name = draft.facts["weights"].name if "weights" in draft.facts else ""
        draft.suppose(name, f"weights in {weights}", why)


def _precision_of(draft: Draft, weights: str, compute: str | None, deepspeed: bool) -> str:
    adapter, sharded = draft.value("adapter") is not None, draft.fact("sharding") in ("fsdp", "hsdp")
    count, ranks = draft.value("hardware.count"), _data_ranks(draft)
    if compute == "bf16" and draft.fact("only_by_shards") and 1 == ranks < count:
        return weights  # torchtitan's mixed precision is that of FSDP, or autocast on one GPU.
    if compute == "fp8":
        return "fp8"
    if deepspeed and compute == "fp16" and not (adapter or _gathers(draft)):
        return "fp16-master"
    if deepspeed and compute in ("bf16", "fp16") and not adapter:
        return "bf16-master"  # fp32 master weights and moments next to bf16 weights
    if deepspeed and compute == "bf16":
        return "bf16"
    if compute == "bf16" and sharded and not adapter and (weights == "fp32" or draft.fact("upcasts")):
        return "mixed-bf16" if count > 1 else "amp-bf16"
    if compute in (None, "no", "fp32"):
        return {"fp32": "fp32", "bf16": "bf16"}.get(weights, "bf16")
    if compute == "fp16":
        # Of a frozen base in 16 bits autocast makes no copies; an adapter in fp32 keeps its own dtype.
        return "fp16-pure" if adapter and (deepspeed or weights != "fp32") else "amp-fp16"
    return "amp-bf16" if weights == "fp32" else "bf16"


def _gathers(draft: Draft) -> bool:
    """Return whether FSDP2 gathers the weights of DeepSpeed's stages 2 and 3."""
    return draft.fact("sharding") not in ("ddp", "zero1") and _data_ranks(draft) > 1


def _of_checkpoint(draft: Draft) -> str:
    """Return the dtype that the model's config.json names; bf16 where it names none."""
    config = model_config(draft.data["model"]["config"])
    word = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return DTYPES.get(word, "bf16")


def _attention(draft: Draft) -> None:
    """Replace a kernel of attention by one that runs here: on shared sequences, or with a window."""
    kernel = draft.value("attention")
    if (draft.value("parallel.context") or 1) > 1 and kernel != "triton":
        draft.replace("attention", "triton", "the kernel with which context parallelism runs here")
    elif kernel == "flash":
        seq = draft.value("batch.seq") or Batch().seq
        config = model_config(draft.data["model"]["config"])
        if any(limit is not None and limit[1] < seq for limit in layer_windows(config)):
            draft.replace("attention", "sdpa", "computes a layer's window alone; predicted with a mask of it")


def _offload(draft: Draft) -> None:
    """Set what waits in host memory; where a recipe cannot have it, everything stays on the GPU.

    Weights that train can leave only where they are updated in the backward; their state can always.
    """
    stays = draft.value("adapter") is None and not draft.value("optimizer.in_backward")
    if draft.fact("offload_params") and stays and draft.value("hardware.count") == 1:
        fact = draft.facts["offload_params"]
        note = "predicted with weights on the GPU, unless optimizer.in_backward and offload.weights are set"
        draft.leave(fact.name, fact.given, ("memory", "time"), note)
        draft.assume(fact.name, "offload.optimizer", True, "the states alone")
        _mention(draft, "offload_optimizer", "")
    elif draft.fact("offload_params"):
        _take(draft, "offload_params", "offload.weights", True)
        _mention(draft, "offload_optimizer", "with the weights")
    elif draft.fact("offload_optimizer"):
        _take(draft, "offload_optimizer", "offload.optimizer", True)


def build(draft: Draft, settings: list[str]) -> Recipe:
    """Return the recipe of the draft; what it refuses becomes a field without counterpart.

    Raises:
        InputError: what is refused came of no field of the files, or the user set it.
    """
    for _ in range(MAX_REFUSALS):
        try:
            recipe = recipe_from(draft.data, settings)
            registry.check(recipe.without_open_fields())
            return recipe
        except InputError as error:
            if not _given_up(draft, error):
                raise
    return recipe_from(draft.data, settings)


def _given_up(draft: Draft, error: InputError) -> bool:
    """Leave the refused field at its default, and list the fields that set it; False: no file set it."""
    refused = error.field
    value = draft.value(refused)
    if isinstance(value, str) and value in NEAREST.get(refused, {}):
        nearest, what = NEAREST[refused][value]
        draft.replace(refused, nearest, f"the recipe's other fields exclude {value}: predicted as {what}")
        return True

    def is_of(field: str) -> bool:
        return bool(field) and (
            f"{refused}.".startswith(f"{field}.") or f"{field}.".startswith(f"{refused}.")
        )

    fields = {one.field for one in (*draft.taken, *draft.assumed) if is_of(one.field)}
    if not refused or refused.partition(".")[0] in KEPT or refused in KEPT or not fields:
        return False
    for field in fields:
        draft.remove(field)
    changes, instead = FALLBACKS.get(refused, (("memory", "time"), ""))
    note = instead or f"no recipe has it: {error.problem}"
    for one in draft.taken:
        if one.field in fields:
            draft.leave(one.name, one.given, changes, note)
    for one in draft.assumed:
        if one.field in fields:
            draft.leave(one.name or one.field, one.value, changes, note)
    draft.taken = [one for one in draft.taken if one.field not in fields]
    draft.assumed = [one for one in draft.assumed if one.field not in fields]
    return True
