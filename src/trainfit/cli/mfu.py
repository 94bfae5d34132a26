"""``trainfit mfu``: how well a run uses its GPUs, from model, batch, step time and hardware, or the time from the MFU.

And how long a run of so many tokens takes, and what GPU-hours cost.
"""

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainfit.cli.options import Json, PeakFlops, count, finite, only_json, print_json, share, tell

if TYPE_CHECKING:
    from trainfit.cli.flops import Counted
    from trainfit.predict.flops_accounting import StepFlops
    from trainfit.spec.hardware import Gpu
    from trainfit.spec.recipe import Recipe

Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="A catalog model, or the path of a config.json.")
]
Batch = Annotated[int | None, typer.Option(min=1, metavar="B", help="Sequences a step, over all GPUs.")]
Seq = Annotated[int | None, typer.Option(min=1, metavar="S", help="Tokens a sequence.")]
StepSeconds = Annotated[
    float | None, typer.Option("--step-s", metavar="T", callback=finite, help="Seconds a step.")
]
Given = Annotated[
    float | None,
    typer.Option(
        "--mfu", metavar="SHARE", parser=share, help="Instead of --step-s: the MFU, such as 40% or 0.4."
    ),
]
Tokens = Annotated[
    float | None,
    typer.Option(
        metavar="N", parser=count, help="Also tell how long a run over N tokens takes, such as 15T or 1.5e12."
    ),
]
GpuName = Annotated[str, typer.Option("--gpu", metavar="NAME", help="An accelerator of the catalog.")]
NumGpus = Annotated[int, typer.Option("--count", min=1, metavar="N", help="How many.")]
Adapter = Annotated[Literal["lora"] | None, typer.Option(help="Frozen weights: no weight gradients.")]
Rank = Annotated[int, typer.Option(min=1, metavar="R", help="The adapter's rank.")]
Recompute = Annotated[
    Literal["none", "full"], typer.Option(help="full: the whole forward again, in HFU only.")
]
Precision = Annotated[
    Literal["fp32", "bf16", "amp-bf16", "amp-fp16"], typer.Option(help="Picks the dense peak.")
]
Attention = Annotated[Literal["causal", "full"], typer.Option(help="Count masked attention scores or not.")]
ClosedForm = Annotated[
    Literal["products", "6n"],
    typer.Option(
        help="The closed form beside the count. products: multiplied weights, windows followed; 6n: all parameters, "
        "embedding included, no windows, as published figures have it."
    ),
]
GpuHours = Annotated[
    float | None,
    typer.Option(metavar="HOURS", parser=count, help="Also tell what so many GPU-hours cost, such as 1.46M."),
]
Price = Annotated[
    float | None,
    typer.Option(
        metavar="USD", min=0, callback=finite, help="Price of one GPU for one hour; default: the catalog's."
    ),
]


def register(app: typer.Typer) -> None:
    app.command("mfu")(run)


def run(
    model: Model = None,
    batch: Batch = None,
    seq: Seq = None,
    step_s: StepSeconds = None,
    mfu: Given = None,
    gpu: GpuName = "h200",
    count: NumGpus = 1,
    adapter: Adapter = None,
    rank: Rank = 16,
    recompute: Recompute = "none",
    precision: Precision = "bf16",
    attention: Attention = "causal",
    closed_form: ClosedForm = "products",
    peak_flops: PeakFlops = None,
    tokens: Tokens = None,
    gpu_hours: GpuHours = None,
    price: Price = None,
    json: Json = False,
) -> None:
    """MFU and HFU of a step; the time and cost of a run.

    Give --step-s for the MFU, or --mfu for the time.
    """
    from trainfit.catalog.load import gpu as find_gpu
    from trainfit.cli.show import progress
    from trainfit.spec.errors import InputError
    from trainfit.spec.names import gpu_note

    found: dict[str, object] = {}
    row = find_gpu(gpu)
    note = gpu_note(gpu)
    tell([] if note is None else [f"note: {note}"])
    price = row.price_per_hour if price is None else price
    if any(value is not None for value in (model, batch, seq, step_s, mfu, tokens)) or gpu_hours is None:
        if model is None or batch is None or seq is None or (step_s is None) == (mfu is None):
            raise typer.BadParameter(
                "give --model, --batch, --seq and one of --step-s and --mfu together, or --gpu-hours alone"
            )
        for option, value in (("--step-s", step_s), ("--mfu", mfu), ("--tokens", tokens)):
            if value is not None and value <= 0:
                raise typer.BadParameter(f"{option} must be above 0")
        if tokens is not None and gpu_hours is not None:
            raise typer.BadParameter("--tokens tells the GPU-hours: leave --gpu-hours out")
        recipe = _recipe(model, seq, precision, adapter, rank)
        speed = _Speed(step_s, mfu, row, count, peak_flops)
        with only_json(json), progress(f"counting the FLOPs of {recipe.model.display_name}"):
            found |= _utilization(recipe, batch, attention, recompute == "full", speed, closed_form)
        if tokens is not None:
            found |= _run_of(tokens, batch * seq, found, price)
    if gpu_hours is not None:
        if price is None:
            raise InputError("no price known", "give --price", field="--gpu", value=gpu)
        found |= _money(gpu_hours, price)
    _check_finite(found)
    if json:
        print_json(found)
    else:
        _show(found)


def _check_finite(found: dict[str, object]) -> None:
    """Refuse options each of which is a number while what follows from them is past the largest float."""
    for name, value in found.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise typer.BadParameter(
                f"{name} would be past {sys.float_info.max:.0e}: give more usual numbers"
            )


@dataclass(frozen=True)
class _Speed:
    """How fast a step is (its time, or its MFU, the other None), and on what; ``peak``: the user's own, FLOP/s."""

    step_s: float | None
    mfu: float | None
    gpu: "Gpu"
    num_gpus: int
    peak: float | None


def _recipe(model: str, seq: int, precision: str, adapter: str | None, rank: int) -> "Recipe":
    """One step of one sequence on one GPU.

    A batch needs so many times as much, and how GPUs share it does not change what the mathematics needs, nor does
    which GPU it is: operations are always counted on ``COUNTED_ON``, so any accelerator will do, CUDA or not.
    """
    from trainfit.cli.flops import COUNTED_ON
    from trainfit.spec.recipe_file import recipe_from

    return recipe_from({
        "model": {"config": model}, "batch": {"micro": 1, "seq": seq}, "precision": precision,
        "adapter": adapter and {"kind": adapter, "rank": rank}, "hardware": {"gpu": COUNTED_ON},
    })  # fmt: skip


def _utilization(
    recipe: "Recipe",
    batch: int,
    attention: Literal["causal", "full"],
    recomputed: bool,
    speed: _Speed,
    closed_form: Literal["products", "6n"],
) -> dict[str, object]:
    """MFU and HFU of a step of ``batch`` times the recipe, by counted operations, and by closed form beside them.

    Full recomputation is the whole forward once more, whoever's code ran it. (Transformers' own stops before each
    block's last product, which is not needed again: ``predict`` counts that.)
    """
    from trainfit.cli.flops import counted_flops, dense_peak
    from trainfit.predict.flops_accounting import step_seconds, utilization
    from trainfit.spec.errors import InputError

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
        "model": recipe.model.display_name, "params": counted.params, "trainable_params": counted.trainable_params,
        "gpu": gpu.name, "step_s": step_s, **cluster, "attention": attention,
        "model_flops": model_flops, "hardware_flops": hardware_flops,
        "tokens_per_s": batch * recipe.batch.tokens / step_s, "mfu": used.mfu, "hfu": used.hfu,
        "closed_form": closed and simple and {**closed.model_dump(), **simple.model_dump()},
        "ops_without_flops": list(counted.ops_without_flops),
    }  # fmt: skip


def _closed_form(
    recipe: "Recipe", batch: int, counted: "Counted", attention: Literal["causal", "full"], recomputed: bool,
    closed_form: Literal["products", "6n"],
) -> "StepFlops | None":  # fmt: skip
    """The step's FLOPs by the chosen closed form; None for a model whose shape the closed forms do not know."""
    from trainfit.catalog.load import model_config
    from trainfit.predict.flops_accounting import step_flops
    from trainfit.predict.product_flops import product_step_flops
    from trainfit.spec.errors import InputError

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


def _run_of(
    tokens: float, step_tokens: int, step: dict[str, object], price: float | None
) -> dict[str, object]:
    """A run over ``tokens`` tokens of steps like ``step``: its time, GPU-hours and, where a price is known, dollars."""
    from trainfit.predict.flops_accounting import gpu_hours

    step_s, num_gpus = step["step_s"], step["num_gpus"]
    assert isinstance(step_s, float)
    assert isinstance(num_gpus, int)
    run_s = tokens / step_tokens * step_s
    hours = gpu_hours(num_gpus=num_gpus, seconds=run_s)
    found: dict[str, object] = {
        "tokens": tokens,
        "step_tokens": step_tokens,
        "run_s": run_s,
        "gpu_hours": hours,
    }
    return found if price is None else {**found, **_money(hours, price)}


def _money(hours: float, price: float) -> dict[str, object]:
    from trainfit.predict.flops_accounting import dollars

    return {"gpu_hours": hours, "price_per_gpu_hour": price, "dollars": dollars(hours, price)}


def _show(found: dict[str, object]) -> None:
    from trainfit.cli.show import console, heading, notes, rows
    from trainfit.spec.units import format_count, format_flops, format_seconds

    out = console()
    number = {key: value for key, value in found.items() if isinstance(value, int | float)}
    if "mfu" in found:
        trained = number["trainable_params"]
        some = "" if trained == number["params"] else f", {format_count(trained)} of them trained"
        out.print(f"{found['model']}, {format_count(number['params'])} parameters{some}", style="bold")
        closed = found["closed_form"]
        simple = closed if isinstance(closed, dict) else None
        rows(out, [
            ["GPUs", f"{found['num_gpus']} x {found['gpu']}", f"{number['peak_flops_per_s'] / 1e12:,.4g} TFLOP/s dense peak each"],
            ["step", format_seconds(number["step_s"]), f"{number['tokens_per_s']:,.0f} tokens a second"],
            ["model FLOPs", format_flops(number["model_flops"]), f"what the mathematics needs, attention {found['attention']}"],
            ["hardware FLOPs", format_flops(number["hardware_flops"]), "what is executed, recomputation included"],
            ["MFU", f"{number['mfu']:.2%}", f"closed form: {simple['mfu']:.2%}" if simple else ""],
            ["HFU", f"{number['hfu']:.2%}", f"closed form: {simple['hfu']:.2%}" if simple else ""],
        ], "left", "right", "wrap")  # fmt: skip
        if simple:
            out.print(f"  closed form: {simple['convention']}", soft_wrap=True)
        if number["mfu"] > 1:
            out.print(
                "  more than the peak allows: check --step-s, --count and --precision", style="bold red"
            )
        without = found["ops_without_flops"]
        assert isinstance(without, list)
        notes(out, "Operations without a FLOP rule (counted as 0)", without)
    if "run_s" in found:
        heading(out, f"A run over {format_count(number['tokens'])} tokens")
        lines = [
            [
                "time",
                format_seconds(number["run_s"]),
                f"{math.ceil(number['tokens'] / number['step_tokens']):,} steps",
            ],
            ["GPU-hours", _amount(number["gpu_hours"]), ""],
        ]
        if "dollars" in found:
            price = f"{number['price_per_gpu_hour']:.2f} $ a GPU-hour"
            lines.append(["cost", f"{_amount(number['dollars'])} $", price])
        else:
            lines.append(["cost", "-", "no price known: give --price"])
        rows(out, lines, "left", "right", "wrap")
    elif "dollars" in found:
        hours = f"{_amount(number['gpu_hours'])} GPU-hours at {number['price_per_gpu_hour']:.2f} $"
        out.print(f"{hours}: {_amount(number['dollars'])} $")


def _amount(value: float) -> str:
    """Return hours or dollars for people: whole ones, and three digits of fewer than a hundred."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
