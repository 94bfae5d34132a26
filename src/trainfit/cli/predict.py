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
    from collections.abc import Sequence

    from rich.console import Console

    from trainfit.spec.recipe import Recipe
    from trainfit.spec.result import Estimate

EXIT_DOES_NOT_FIT = 1
"""With ``--check``."""


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
    check: bool = typer.Option(False, "--check", help="Exit with 1 where it does not fit."),
    verbose: bool = typer.Option(
        False, "--verbose", "-v", help="Also print conventions, assumptions and what the bounds rest on."
    ),
) -> int:
    """Predict a recipe's memory, FLOPs, time and cost. Needs no GPU."""
    settings = with_hardware(settings, gpu, price)
    asked = read_recipe(recipe, settings)
    from trainfit.cli.show import progress

    with (
        work(recipe, settings, json=json, record=record),
        progress(f"predicting {asked.model.display_name}: one step on the virtual GPU"),
    ):
        from trainfit.predict.estimate import predict

        built, said = planned(asked)
        estimate = predict(built, use_cache=not no_cache, deterministic=deterministic)
        estimate = estimate.model_copy(update={"assumptions": (*estimate.assumptions, *said)})
        keep(record, "predict", built, estimate=estimate)
    if json:
        print_json(estimate)
    else:
        show(built, estimate, notes=said, verbose=verbose)
    return EXIT_DOES_NOT_FIT if check and not estimate.fits else 0


def show(
    recipe: "Recipe", estimate: "Estimate", *, notes: "Sequence[str]" = (), verbose: bool = False
) -> None:
    """The prediction for people: the answer, then where the memory and the time go; with ``verbose`` what it rests on.

    Args:
        notes: what was chosen or ignored on the way, always printed.
    """
    from trainfit.cli.show import console, heading, rows
    from trainfit.cli.show import notes as bullets

    out = console()
    _answer(out, recipe, estimate)
    bullets(out, "Notes", notes)
    _memory(out, estimate)
    _phases(out, estimate)
    heading(out, "One step")
    rows(out, _step_lines(estimate), "left", "right", "wrap")
    bullets(out, "Operations without a FLOP rule (counted as 0)", estimate.ops_without_flops)
    shown = {*notes, *estimate.warnings}
    assumptions = [line for line in estimate.assumptions if line not in shown]
    if verbose:
        bullets(out, "Bounds", [_bound(name, estimate) for name in estimate.bounds])
        bullets(out, "Conventions and assumptions", [f"FLOPs: {estimate.flops_convention}", *assumptions])
    else:
        out.print("\n--verbose: the conventions and assumptions that this rests on", style="dim")


def _answer(out: "Console", recipe: "Recipe", estimate: "Estimate") -> None:
    """Whether it fits, how fast it is, what it costs, what the precision means; then whatever may turn out otherwise."""
    from rich.text import Text

    from trainfit.cli.show import rows
    from trainfit.cli.words import describe, holds_for
    from trainfit.report.precision import meaning
    from trainfit.spec.units import format_count

    _verdict(out, recipe, estimate)
    out.print(describe(recipe), style="bold")
    frozen = estimate.trainable_params != estimate.params
    trained = f", {format_count(estimate.trainable_params)} trained" if frozen else ""
    lines: list[list[str | Text]] = [
        ["speed", _speed(recipe, estimate)],
        *([["cost", _cost(recipe, estimate)]] if estimate.tokens_per_s else []),
        ["precision", meaning(recipe)],
        ["model", f"{format_count(estimate.params)} parameters{trained} · recipe {estimate.recipe_id}"],
    ]
    if estimate.versions:
        lines.append(["versions", holds_for(estimate.versions)])
    lines += [[Text("warning", style="bold yellow"), line] for line in estimate.warnings]
    rows(out, lines, "left", "wrap")


def _verdict(out: "Console", recipe: "Recipe", estimate: "Estimate") -> None:
    from trainfit.spec.units import format_bytes

    headroom, device = estimate.headroom_bytes, estimate.device_bytes
    size = f"{format_bytes(estimate.peak_device_bytes)} of {format_bytes(device)}"
    gpu = recipe.hardware.gpu
    share = f"{format_bytes(abs(headroom))} ({abs(headroom) / device:.1%})"
    if estimate.fits:
        out.print(f"FITS on {gpu}: {size}, {share} to spare", style="bold green")
    elif headroom >= 0:
        spare = f"only {share} to spare, and free memory falls into pieces in later steps"
        out.print(f"DOES NOT FIT SAFELY on {gpu}: {size}, {spare}", style="bold red")
    else:
        out.print(f"DOES NOT FIT on {gpu}: {size}, {share} too much", style="bold red")


def _speed(recipe: "Recipe", estimate: "Estimate") -> str:
    """Tokens a second, a step's time with its bounds, MFU: as far as they are known."""
    from trainfit.cli.words import quantity
    from trainfit.spec.units import format_seconds

    if estimate.step_s is None or estimate.tokens_per_s is None:
        return f"not predicted: the speed of {recipe.hardware.gpu} is not known"
    bound = estimate.bounds.get("step_s")
    between = f" ({quantity('step_s', bound.low)} to {quantity('step_s', bound.high)})" if bound else ""
    mfu = "" if estimate.mfu is None else f", {estimate.mfu:.1%} MFU"
    return f"{estimate.tokens_per_s:,.0f} tokens/s{mfu}, a step {format_seconds(estimate.step_s)}{between}"


def _cost(recipe: "Recipe", estimate: "Estimate") -> str:
    cost = estimate.cost
    if cost is None:
        return f"no price of {recipe.hardware.gpu} is known: give yours, --price USD"
    gpus = f"{cost.num_gpus} GPU{'s' * (cost.num_gpus > 1)} at {cost.price_per_gpu_hour:.2f} $"
    return f"{cost.per_million_tokens:.4g} $ a million tokens, {cost.per_hour:.2f} $ an hour ({gpus})"


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
        if size := getattr(estimate.breakdown, name):
            lines.append(line(name, size, f"{size / peak:.1%}"))
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


def _step_lines(estimate: "Estimate") -> list[list[str]]:
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
    if estimate.mfu is not None:
        lines.append(["MFU", f"{estimate.mfu:.1%}", "model FLOPs over the time and the dense peak"])
    if estimate.hfu is not None:
        lines.append(["HFU", f"{estimate.hfu:.1%}", "hardware FLOPs over the same"])
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
