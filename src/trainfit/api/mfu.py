"""``trainfit.mfu``: MFU and HFU of a step from its time, or the time from the MFU; time and cost of a run.

Operations are counted on the virtual GPU and compared with a closed form. Torch is imported only without a
cached ledger.
"""

from dataclasses import dataclass
from typing import Any, Literal

from trainfit.api.flops import COUNTED_ON, Counted, counted_flops, dense_peak
from trainfit.api.results import Usage
from trainfit.catalog.load import gpu as find_gpu
from trainfit.catalog.load import model_config
from trainfit.prediction.flops_accounting import (
    StepFlops,
    dollars,
    gpu_hours,
    step_flops,
    step_seconds,
    utilization,
)
from trainfit.prediction.product_flops import product_step_flops
from trainfit.spec import DEFAULT_GPU
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import recipe_from


def mfu(
    model: str,
    *,
    batch: int,
    seq: int,
    step_s: float | None = None,
    mfu: float | None = None,
    gpu: str = DEFAULT_GPU,
    count: int = 1,
    adapter: Literal["lora"] | None = None,
    rank: int = 16,
    recompute: Literal["none", "full"] = "none",
    precision: Literal["fp32", "bf16", "amp-bf16", "amp-fp16"] = "bf16",
    attention: Literal["causal", "full"] = "causal",
    closed_form: Literal["products", "6n"] = "products",
    peak_flops: float | None = None,
    tokens: float | None = None,
    price: float | None = None,
) -> Usage:
    """Return the MFU and HFU of a step that takes ``step_s`` seconds, or the time of a step at an ``mfu``.

    Args:
        model: a catalog model, or the path of a config.json.
        batch: sequences a step, over all GPUs; ``seq``: tokens a sequence.
        step_s: seconds a step. Give it or ``mfu`` (a share, 0.4 is 40 %), not both.
        gpu: an accelerator of the catalog; ``count``: how many.
        recompute: ``full`` counts the whole forward again, in HFU only.
        precision: picks the dense peak, which ``peak_flops`` (FLOP/s) overrides.
        attention: ``causal`` leaves masked attention scores out, ``full`` counts them.
        closed_form: compared with the count: products (multiplied weights, windows) or 6n (all parameters).
        tokens: also return the time, GPU-hours and dollars of a run over so many.
        price: of one GPU for one hour, US dollars; None: the catalog's.

    Raises:
        InputError: an unknown model or GPU, no dense peak known, or a value that is not above 0.
    """
    if (step_s is None) == (mfu is None):
        raise InputError(
            "give one of step_s and mfu", "the other is what is computed", field="step_s", value=step_s
        )
    positive = {"batch": batch, "seq": seq, "step_s": step_s, "mfu": mfu, "count": count, "rank": rank,
                "peak_flops": peak_flops, "tokens": tokens}  # fmt: skip
    for name, value in positive.items():
        if value is not None and not 0 < value < float("inf"):
            raise InputError("must be above 0 and finite", "correct it", field=name, value=value)
    row = find_gpu(gpu)
    recipe = recipe_of_one(model, seq, precision, adapter, rank)
    speed = Speed(step_s, mfu, row, count, peak_flops)
    found = step_usage(recipe, batch, attention, recompute == "full", speed, closed_form)
    if tokens is not None:
        found |= run_usage(tokens, batch * seq, found, row.price_per_hour if price is None else price)
    return Usage.model_validate({**found, "ops_without_flops": tuple(found["ops_without_flops"])})


@dataclass(frozen=True)
class Speed:
    """Speed of a step (its time or its MFU, the other None) and its device; ``peak``: the user's, FLOP/s."""

    step_s: float | None
    mfu: float | None
    gpu: Gpu
    num_gpus: int
    peak: float | None


def recipe_of_one(model: str, seq: int, precision: str, adapter: str | None, rank: int) -> Recipe:
    """One step of one sequence on one GPU.

    A batch needs so many times as much, and how GPUs share it does not change what the mathematics needs, nor
    does which GPU it is: operations are always counted on ``COUNTED_ON``, so any accelerator will do, CUDA or
    not.
    """
    return recipe_from({
        "model": {"config": model}, "batch": {"micro": 1, "seq": seq}, "precision": precision,
        "adapter": adapter and {"kind": adapter, "rank": rank}, "hardware": {"gpu": COUNTED_ON},
    })  # fmt: skip


def step_usage(
    recipe: Recipe,
    batch: int,
    attention: Literal["causal", "full"],
    recomputed: bool,
    speed: Speed,
    closed_form: Literal["products", "6n"],
) -> dict[str, Any]:
    """Return MFU and HFU of a step of ``batch`` times the recipe, by counted operations and by closed form.

    Full recomputation is the whole forward once more, whoever's code ran it. (Transformers' own stops before
    each block's last product, which is not needed again: ``predict`` counts that.)
    """
    gpu = speed.gpu
    if speed.peak is None and not gpu.peak_flops_per_s:
        raise InputError("no dense peak known", "give --peak-flops", field="--gpu", value=gpu.name)
    counted = counted_flops(recipe, attention)
    peak = dense_peak(gpu, counted.dtype) if speed.peak is None else speed.peak
    assert peak is not None
    cluster = {"num_gpus": speed.num_gpus, "peak_flops_per_s": peak}
    model_flops = batch * counted.model_flops
    hardware_flops = batch * (counted.hardware_flops + (counted.forward_flops if recomputed else 0.0))
    step_s = speed.step_s if speed.mfu is None else step_seconds(model_flops, mfu=speed.mfu, **cluster)
    assert step_s is not None
    used = utilization(model_flops, hardware_flops, step_s=step_s, **cluster)
    closed = _closed_form(recipe, batch, counted, attention, recomputed, closed_form)
    simple = closed and utilization(closed.model_flops, closed.hardware_flops, step_s=step_s, **cluster)
    return {
        "model": recipe.model.display_name, "params": counted.params,
        "trainable_params": counted.trainable_params,
        "gpu": gpu.name, "step_s": step_s, **cluster, "attention": attention,
        "model_flops": model_flops, "hardware_flops": hardware_flops,
        "tokens_per_s": batch * recipe.batch.tokens / step_s, "mfu": used.mfu, "hfu": used.hfu,
        "closed_form": closed and simple and {**closed.model_dump(), **simple.model_dump()},
        "ops_without_flops": list(counted.ops_without_flops),
    }  # fmt: skip


def _closed_form(
    recipe: Recipe, batch: int, counted: Counted, attention: Literal["causal", "full"], recomputed: bool,
    closed_form: Literal["products", "6n"],
) -> StepFlops | None:  # fmt: skip
    """Return the step's FLOPs by the closed form; None for a model whose shape it does not cover."""
    config = model_config(recipe.model.config)
    seq, trained = recipe.batch.seq, "all" if recipe.adapter is None else "adapter"
    again = "full" if recomputed else "none"
    try:
        if closed_form == "6n":
            return step_flops(
                config,
                counted.base_params,
                batch=batch,
                seq=seq,
                attention=attention,
                trained=trained,
                recomputed=again,
            )
        return product_step_flops(
            config, batch=batch, seq=seq, attention=attention, trained=trained, recomputed=again,
            adapter_params=counted.params - counted.base_params,
        )  # fmt: skip
    except InputError:
        return None


def run_usage(tokens: float, step_tokens: int, step: dict[str, Any], price: float | None) -> dict[str, Any]:
    """Return time, GPU-hours and, where a price is known, dollars of a run over ``tokens`` tokens."""
    step_s, num_gpus = step["step_s"], step["num_gpus"]
    run_s = tokens / step_tokens * step_s
    hours = gpu_hours(num_gpus=num_gpus, seconds=run_s)
    found: dict[str, Any] = {
        "tokens": tokens,
        "step_tokens": step_tokens,
        "run_s": run_s,
        "gpu_hours": hours,
    }
    return found if price is None else {**found, **money(hours, price)}


def money(hours: float, price: float) -> dict[str, Any]:
    return {"gpu_hours": hours, "price_per_gpu_hour": price, "dollars": dollars(hours, price)}
