"""``trainfit.mfu``: MFU and HFU of a step from its time, or the time from the MFU; time and cost of a run.

Operations are counted on the virtual GPU and compared with a closed form. Torch is imported only without a
cached ledger.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainfit.api.flops import COUNTED_ON
from trainfit.api.results import Usage
from trainfit.api.run import count_of, run_usage, seconds_of, share_of, step_of_run
from trainfit.catalog.load import gpu as find_gpu
from trainfit.catalog.load import model_config
from trainfit.catalog.names import find_model
from trainfit.flops.closed_form import StepFlops, Trained, product_step_flops, step_flops
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.estimate import matmul_dtype
from trainfit.prediction.predict import ledger_of
from trainfit.prediction.time.peaks import peak_flops_per_s
from trainfit.spec import DEFAULT_GPU
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Adapter, Recipe

Attention = Literal["causal", "full"]
ClosedForm = Literal["products", "6n"]


def mfu(
    model: str,
    *,
    batch: int = 1,
    seq: int,
    step_s: float | str | None = None,
    tokens_per_s: float | str | None = None,
    mfu: float | str | None = None,
    gpu_hours: float | str | None = None,
    gpu: str = DEFAULT_GPU,
    count: int = 1,
    adapter: Literal["lora"] | None = None,
    rank: int = 16,
    recompute: Literal["none", "full"] = "none",
    precision: Literal["fp32", "bf16", "amp-bf16", "amp-fp16"] = "bf16",
    attention: Attention = "causal",
    closed_form: ClosedForm = "products",
    peak_flops: float | None = None,
    tokens: float | str | None = None,
    price: float | None = None,
) -> Usage:
    """Return the MFU and HFU of a step or of a whole run, or the time of a step at an ``mfu``.

    Args:
        model: a catalog model, or the path of a config.json or of its folder.
        batch: sequences a step, over all GPUs; ``seq``: tokens a sequence.
        step_s: seconds a step, or such as "448ms". Give it, or ``tokens_per_s``, or ``mfu`` (a share: 0.4 or
            "40%"), or ``gpu_hours`` and ``tokens``.
        tokens_per_s: of all GPUs, such as 9143 or "9.1k".
        gpu_hours: of the whole run over ``tokens`` ("1.46M"); no batch is needed then.
        gpu: an accelerator of the catalog; ``count``: how many.
        recompute: ``full`` counts what each block recomputes, as ``predict`` does, in HFU only.
        precision: selects the dense peak; ``peak_flops`` (FLOP/s) overrides it.
        attention: ``causal`` leaves masked attention scores out, ``full`` counts them.
        closed_form: compared with the count: products (multiplied weights, windows) or 6n (all parameters).
        tokens: also return the time, GPU-hours and dollars of a run over so many, such as "15T".
        price: of one GPU for one hour, US dollars; None: the catalog's.

    Raises:
        InputError: an unknown model or GPU, no dense peak known, or a value that is not above 0.
    """
    if sum(speed is not None for speed in (step_s, tokens_per_s, mfu, gpu_hours)) != 1:
        remedy = "the others are what is computed"
        problem = "give one of step_s, tokens_per_s, mfu and gpu_hours"
        raise InputError(problem, remedy, field="step_s", value=step_s)
    if gpu_hours is not None and tokens is None:
        remedy = "give the tokens of the run"
        raise InputError("says nothing without tokens", remedy, field="gpu_hours", value=gpu_hours)
    num_tokens = None if tokens is None else count_of(tokens)
    step_s = None if step_s is None else seconds_of(step_s)
    positive = {"batch": batch, "seq": seq, "count": count, "rank": rank,
                "peak_flops": peak_flops}  # fmt: skip
    for name, value in positive.items():
        if value is not None:
            count_of(value, name)
    if tokens_per_s is not None:
        step_s = batch * seq / count_of(tokens_per_s, "tokens_per_s")
    if gpu_hours is not None and num_tokens is not None:
        step_s = step_of_run(count_of(gpu_hours, "gpu_hours"), num_tokens, batch * seq, count)
    row = find_gpu(gpu)
    recipe = recipe_of_one(model, seq, precision, adapter, rank, recompute)
    speed = Speed(step_s, None if mfu is None else share_of(mfu), row, count, peak_flops)
    found = step_usage(recipe, batch, attention, speed, closed_form)
    if num_tokens is not None:
        own = row.price_per_hour if price is None else price
        found |= run_usage(num_tokens, batch * seq, found["step_s"], count, own)
    return Usage.model_validate({**found, "ops_without_flops": tuple(found["ops_without_flops"])})


@dataclass(frozen=True)
class Speed:
    """Speed of a step (its time or its MFU, the other None) and its device; ``peak``: the user's, FLOP/s."""

    step_s: float | None
    mfu: float | None
    gpu: Gpu
    num_gpus: int
    peak: float | None


def recipe_of_one(
    model: str, seq: int, precision: str, adapter: str | None, rank: int, recompute: str
) -> Recipe:
    """Return the recipe whose step is counted: one sequence on one GPU.

    A batch takes a multiple of it, however GPUs share it. Operations are always counted on ``COUNTED_ON``, so
    any accelerator will do, CUDA or not.
    """
    in_folder = Path(model) / "config.json"
    if find_model(model) is None and in_folder.is_file():
        model = str(in_folder)
    written_out = model_config(model).get("model_type") == "trainfit"  # No family of transformers.
    implementation = "native" if written_out else "hf"
    return recipe_from({
        "model": {"config": model, "implementation": implementation}, "batch": {"micro": 1, "seq": seq},
        "precision": precision,
        "adapter": adapter and {"kind": adapter, "rank": rank}, "recompute": recompute,
        "hardware": {"gpu": COUNTED_ON},
    })  # fmt: skip


def step_usage(
    recipe: Recipe, batch: int, attention: Attention, speed: Speed, closed_form: ClosedForm
) -> dict[str, Any]:
    """Return MFU and HFU of ``batch`` times the recipe's step, by counted operations and by closed form."""
    gpu = speed.gpu
    if speed.peak is None and not gpu.peak_flops_per_s:
        raise InputError("no dense peak known", "give --peak-flops", field="--gpu", value=gpu.name)
    ledger = ledger_of(recipe)
    peak = peak_flops_per_s(gpu, matmul_dtype(ledger)) if speed.peak is None else speed.peak
    of_all, causal = speed.num_gpus * peak, attention == "causal"
    model_flops = batch * ledger.steady_sum("model_flops" if causal else "model_flops_full")
    hardware_flops = batch * ledger.steady_sum("causal_flops" if causal else "flops")
    step_s = model_flops / (speed.mfu * of_all) if speed.mfu is not None else speed.step_s
    assert step_s is not None

    def shares(model_flops: float, hardware_flops: float) -> dict[str, float]:
        return {"mfu": model_flops / step_s / of_all, "hfu": hardware_flops / step_s / of_all}

    closed = _closed_form(recipe, batch, ledger, attention, closed_form)
    whole = recipe.adapter and _closed_form(recipe, batch, ledger, attention, closed_form, trained="all")
    return {
        "model": recipe.model.display_name, "params": ledger.params,
        "trainable_params": ledger.trainable_params, "gpu": gpu.name, "step_s": step_s,
        "num_gpus": speed.num_gpus, "peak_flops_per_s": peak, "attention": attention,
        "model_flops": model_flops, "hardware_flops": hardware_flops,
        "tokens_per_s": batch * recipe.batch.tokens / step_s, **shares(model_flops, hardware_flops),
        "closed_form": closed and closed.model_dump() | shares(closed.model_flops, closed.hardware_flops),
        "of_full_training": whole and shares(whole.model_flops, whole.hardware_flops),
        "ops_without_flops": list(ledger.ops_without_flops),
    }  # fmt: skip


def _trains_more_than_products(adapter: Adapter) -> bool:
    """Return whether an adapter has weights that are in no product, or in products of weights."""
    targets = (adapter.targets,) if isinstance(adapter.targets, str) else adapter.targets
    embeds = any("emb" in name or name.endswith(("wte", "wpe")) for name in targets)
    return adapter.dora or bool(adapter.modules_to_save) or embeds


def _closed_form(
    recipe: Recipe,
    batch: int,
    ledger: Ledger,
    attention: Attention,
    closed_form: ClosedForm,
    trained: Trained | None = None,
) -> StepFlops | None:
    """Return the step's FLOPs by the closed form; None for a model or an adapter that it does not cover.

    ``trained``: None: what the recipe trains; ``all``: as if it trained every weight.
    """
    config, adapter_params = model_config(recipe.model.config), 0
    if recipe.adapter is not None:
        if _trains_more_than_products(recipe.adapter):
            return None
        adapter_params = ledger.trainable_params
    options: Any = {
        "batch": batch, "seq": recipe.batch.seq, "attention": attention,
        "trained": trained or ("all" if recipe.adapter is None else "adapter"),
        "recomputed": recipe.recompute,
    }  # fmt: skip
    try:
        if closed_form == "6n":
            return step_flops(config, ledger.params - adapter_params, **options)
        return product_step_flops(config, adapter_params=adapter_params, **options)
    except InputError:
        return None
