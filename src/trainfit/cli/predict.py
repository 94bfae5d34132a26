"""``trainfit predict``: one recipe's memory, FLOPs, time and cost, without a GPU.

Torch is imported only where the ledger is not cached yet, by the prediction itself.
"""

from typing import TYPE_CHECKING

import typer

from trainfit.cli.options import (
    GpuOption,
    Json,
    PriceOption,
    RecipeArgument,
    RecordFile,
    Settings,
    keep,
    planned,
    print_json,
    read_recipe,
    with_hardware,
    work,
)

if TYPE_CHECKING:
    from rich.console import Console

    from trainfit.spec.recipe import Recipe
    from trainfit.spec.result import Estimate


def register(app: typer.Typer) -> None:
    app.command("predict")(run)


def run(
    recipe: RecipeArgument,
    settings: Settings = None,
    gpu: GpuOption = None,
    price: PriceOption = None,
    json: Json = False,
    record: RecordFile = None,
    deterministic: bool = typer.Option(
        False,
        "--deterministic",
        help="With kernels that repeat bit by bit, as train asks for unless told --no-deterministic.",
    ),
    no_cache: bool = typer.Option(False, "--no-cache", help="Trace anew, even where a ledger is cached."),
) -> None:
    """Predict a recipe's memory, FLOPs, time and cost. Needs no GPU."""
    settings = with_hardware(settings, gpu, price)
    asked = read_recipe(recipe, settings)
    from trainfit.predict.estimate import predict

    with work(recipe, settings, json=json, record=record):
        built, said = planned(asked)
        estimate = predict(built, use_cache=not no_cache, deterministic=deterministic)
        estimate = estimate.model_copy(update={"assumptions": (*estimate.assumptions, *said)})
        keep(record, "predict", built, estimate=estimate)
    if json:
        print_json(estimate)
    else:
        show(built, estimate)


def show(recipe: "Recipe", estimate: "Estimate") -> None:
    """The prediction for people: verdict, memory, FLOPs, time, money, and what it rests on."""
    from trainfit.cli.show import console, heading, notes, rows
    from trainfit.cli.words import describe, holds_for
    from trainfit.spec.units import format_count

    out = console()
    out.print(describe(recipe), style="bold")
    trained = (
        ""
        if estimate.trainable_params == estimate.params
        else f", {format_count(estimate.trainable_params)} trained"
    )
    out.print(f"{format_count(estimate.params)} parameters{trained} · recipe {estimate.recipe_id}")
    if line := holds_for(estimate.versions):
        out.print(line)
    out.print()
    _verdict(out, recipe, estimate)
    _memory(out, estimate)
    _phases(out, estimate)
    heading(out, "One step")
    rows(out, _step_lines(recipe, estimate), "left", "right", "wrap")
    notes(out, "Bounds", [_bound(name, estimate) for name in estimate.bounds])
    notes(out, "Conventions and assumptions", [f"FLOPs: {estimate.flops_convention}", *estimate.assumptions])
    notes(out, "Operations without a FLOP rule (counted as 0)", estimate.ops_without_flops)


def _verdict(out: "Console", recipe: "Recipe", estimate: "Estimate") -> None:
    from trainfit.spec.units import format_bytes

    headroom = estimate.headroom_bytes
    size = f"{format_bytes(estimate.peak_device_bytes)} of {format_bytes(estimate.device_bytes)}"
    gpu = recipe.hardware.gpu
    if estimate.fits:
        out.print(f"FITS on {gpu}: {size}, {format_bytes(headroom)} to spare", style="bold green")
    elif headroom >= 0:
        spare = f"only {format_bytes(headroom)} to spare, and free memory falls into pieces in later steps"
        out.print(f"DOES NOT FIT SAFELY on {gpu}: {size}, {spare}", style="bold red")
    else:
        out.print(f"DOES NOT FIT on {gpu}: {size}, {format_bytes(-headroom)} too much", style="bold red")


def _memory(out: "Console", estimate: "Estimate") -> None:
    from trainfit.cli.show import bar, can_draw, heading, rows
    from trainfit.spec.result import CATEGORIES
    from trainfit.spec.units import format_bytes

    label = len("pinned on the host" if estimate.host_bytes else "on the device")
    blocks, width = can_draw(out), max(0, min(40, out.width - 27 - label))
    whole = _full_bar(estimate)
    peak = estimate.peak_allocated_bytes
    heading(out, f"Memory at the peak ({estimate.peak_phase.replace('.', ' step, ')})")

    def line(name: str, size: int, share: str = "") -> list[str]:
        return [name, format_bytes(size), share, bar(size / whole, width, blocks=blocks)]

    lines = []
    for name in CATEGORIES:
        size = getattr(estimate.breakdown, name)
        lines.append(line(name, size, f"{size / peak:.1%}" if peak else ""))
    lines.append(line("allocated", peak, "100.0%"))
    lines.append(line("reserved", estimate.peak_reserved_bytes))
    lines.append(line("on the device", estimate.peak_device_bytes))
    if whole >= estimate.device_bytes:
        lines.append(line("the device", estimate.device_bytes))
    if estimate.host_bytes:
        lines.append(["pinned on the host", format_bytes(estimate.host_bytes), "", ""])
    rows(out, lines, "left", "right", "right", "left")


def _full_bar(estimate: "Estimate") -> int:
    """Bytes that a full bar stands for: the device's, or the peak's where that is larger or would hardly be seen."""
    peak, device = estimate.peak_device_bytes, estimate.device_bytes
    return max(1, peak if peak > device or peak < device / 10 else device)


def _phases(out: "Console", estimate: "Estimate") -> None:
    from trainfit.cli.show import bar, can_draw, heading, rows
    from trainfit.spec.result import PHASES
    from trainfit.spec.units import format_bytes

    phases = estimate.phases
    blocks, width = can_draw(out), max(0, min(40, out.width - 44))
    whole = _full_bar(estimate)
    heading(out, "Highest allocated bytes by phase")
    lines = [
        [
            "after init",
            format_bytes(phases.after_init),
            "",
            bar(phases.after_init / whole, width, blocks=blocks),
        ]
    ]
    for phase in PHASES:
        first, steady = getattr(phases.first, phase), getattr(phases.steady, phase)
        lines.append(
            [phase, format_bytes(first), format_bytes(steady), bar(steady / whole, width, blocks=blocks)]
        )
    rows(out, [["", "first step", "steady step", ""], *lines], "left", "right", "right", "left")


def _step_lines(recipe: "Recipe", estimate: "Estimate") -> list[list[str]]:
    from trainfit.spec.units import format_flops, format_seconds

    lines = [
        ["model FLOPs", format_flops(estimate.model_flops), "what the mathematics needs"],
        [
            "hardware FLOPs",
            format_flops(estimate.hardware_flops),
            "what the device executes, recomputation included",
        ],
    ]
    if estimate.step_s is not None:
        lines.append(["time", format_seconds(estimate.step_s), _parts(estimate)])
    if estimate.tokens_per_s is not None:
        lines.append(["tokens a second", f"{estimate.tokens_per_s:,.0f}", ""])
    if estimate.mfu is not None:
        lines.append(["MFU", f"{estimate.mfu:.1%}", "model FLOPs over the time and the dense peak"])
    if estimate.hfu is not None:
        lines.append(["HFU", f"{estimate.hfu:.1%}", "hardware FLOPs over the same"])
    cost = estimate.cost
    if cost is not None:
        price = f"{cost.num_gpus} GPU{'s' * (cost.num_gpus > 1)} at {cost.price_per_gpu_hour:.2f} $/h"
        lines.append(["cost an hour", f"{cost.per_hour:.2f} $", price])
        lines.append(["cost", f"{cost.per_million_tokens:.4g} $", "a million tokens"])
    return lines


def _parts(estimate: "Estimate") -> str:
    from trainfit.spec.units import format_seconds

    if estimate.time is None:
        return ""
    parts = [("matmul", estimate.time.matmul_s), ("memory", estimate.time.memory_s),
             ("communication", estimate.time.communication_s), ("host", estimate.time.host_s)]  # fmt: skip
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds)


def _bound(name: str, estimate: "Estimate") -> str:
    from trainfit.cli.words import quantity

    bound = estimate.bounds[name]
    words = "time" if name == "step_s" else name.removesuffix("_bytes").replace("_", " ")
    return f"{words} {quantity(name, bound.low)} to {quantity(name, bound.high)}. {bound.basis}"
