"""A prediction as text for a terminal: what ``trainfit predict`` prints and ``print(estimate)`` shows."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from trainfit.catalog.load import gpu as find_gpu
from trainfit.report import loop_text
from trainfit.report.console import bar, can_draw, console, heading, rows
from trainfit.report.console import notes as bullets
from trainfit.report.precision import meaning
from trainfit.report.words import describe, holds_for, parameters, quantity
from trainfit.spec.explanation import Explanation
from trainfit.spec.plan import Advice, Found
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CATEGORIES, PHASES, Estimate, OtherPhase, Peak, Phases, Run
from trainfit.spec.units import format_bytes, format_count, format_flops, format_seconds


def show(
    recipe: Recipe | None,
    estimate: Estimate,
    *,
    run: Run | None = None,
    notes: Sequence[str] = (),
    assumed: str = "",
    caveat: str = "",
    verbose: bool = False,
    out: Console | None = None,
) -> None:
    """Print a prediction: the answer, memory, time, and with ``verbose`` its assumptions.

    Args:
        recipe: None for the user's own code.
        run: time and cost of a run of such steps.
        notes: choices made for open fields, and ignored keys of the model's config.
        assumed: what was not given, and is at its default.
        caveat: what the verdict leaves out, and what would change it.
        out: the console; None: standard output.
    """
    out = out or console()
    _answer(out, recipe, estimate, assumed, caveat)
    if run is not None:
        fitted = "" if estimate.fits else ", if a step fitted"
        heading(out, f"A run over {format_count(run.tokens)} tokens{fitted}")
        rows(out, run_lines(run.model_dump()), "left", "right", "wrap")
    bullets(out, "Notes", notes)
    _memory(out, estimate)
    _phases(out, estimate)
    _other_phases(out, estimate)
    _pipeline(out, estimate)
    if estimate.loop is not None:
        loop_text.show(out, estimate.loop, recipe)
    if estimate.code is not None:
        heading(out, "Largest holders at the peak")
        holders = [
            (one.num_bytes, one.category, f"{one.module} {one.operation}") for one in estimate.code.holders
        ]
        rows(out, [[format_bytes(size), *words] for size, *words in holders], "right", "left", "wrap")
    heading(out, f"One {'update' if estimate.loop else 'step'}{of_one(estimate)}")
    rows(out, _step_lines(estimate), "left", "right", "wrap")
    bullets(out, "Operations without a FLOP rule (counted as 0)", estimate.ops_without_flops)
    shown = {*notes, *estimate.warnings}
    assumptions = [line for line in estimate.assumptions if line not in shown]
    if verbose or estimate.code is not None:  # The assumptions say which parts of the code were not followed.
        bullets(out, "Bounds", [_bound(name, estimate) for name in estimate.bounds])
        bullets(out, "Conventions and assumptions", [f"FLOPs: {estimate.flops_convention}", *assumptions])
    else:
        out.print("\n--verbose prints the conventions and assumptions behind these figures", style="dim")


def _if_it_fitted(estimate: Estimate) -> str:
    """Return the words before a speed or a cost of a step that does not fit."""
    return "" if estimate.fits else "if it fitted: "


def _answer(out: Console, recipe: Recipe | None, estimate: Estimate, assumed: str, caveat: str) -> None:
    """Print verdict, subject, speed, cost and precision, what was assumed; then the warnings."""
    line = "; ".join(filter(None, (verdict(recipe, estimate), caveat)))
    out.print(line, style="bold green" if estimate.fits else "bold red")
    out.print(subject(recipe, estimate), style="bold")
    identity = "" if recipe is None else f" · recipe {estimate.recipe_id}"
    lines: list[list[str | Text]] = [
        *([name, words] for name, words in two_peaks(estimate)),
        ["speed", speed(recipe, estimate)],
        *([["compiling", words]] if (words := compiling(estimate)) else []),
        *([["batch", _batch(recipe)]] if recipe is not None and estimate.num_gpus > 1 else []),
        *([["cost", cost(recipe, estimate)]] if estimate.cost or (recipe and estimate.tokens_per_s) else []),
        *([] if recipe is None else [["precision", meaning(recipe)]]),
        *([["assumed", assumed]] if assumed else []),
        ["model", f"{parameters(estimate)}{identity}"],
    ]
    if estimate.versions:
        lines.append(["versions", holds_for(estimate.versions)])
    lines += [[Text("warning", style="bold yellow"), line] for line in estimate.warnings]
    rows(out, lines, "left", "wrap")


def two_peaks(of: Estimate | Explanation) -> list[list[str]]:
    """Return lines of the expected and the possible peak, and why; none where there is one peak."""
    peaks = of.two_peaks
    if peaks is None:
        return []

    def sizes(peak: Peak) -> str:
        allocated, reserved, device = (format_bytes(size) for _, size in peak)
        return f"{allocated} allocated, {reserved} reserved, {device} on the device"

    decides = "; the verdict is by this peak" * isinstance(of, Estimate)
    return [
        ["expected", sizes(peaks.expected)],
        ["possible", f"{sizes(peaks.possible)}: {peaks.reason}{decides}"],
    ]


def show_advice(recipe: Recipe, advice: Advice, out: Console | None = None) -> None:
    """Print the changes with which a recipe fits, and the GPUs on which it does."""
    out = out or console()
    heading(out, "What would fit")
    found = [*advice.changes, *(one for one in (advice.gpu, advice.gpus) if one is not None)]
    if not advice.changes:
        count, gpu = recipe.hardware.count, recipe.hardware.gpu
        here = f"{count} x {gpu}" if count > 1 else gpu
        line = f"on {here} none of the changes tried makes it fit; trainfit plan tries more"
        rows(out, [[line]], "wrap")
    rows(out, map(_advised, found), "right", "right", "wrap")
    if not advice.is_complete:
        rows(out, [["the search stopped after a minute; trainfit plan searches longer"]], "wrap")
    if found:
        rows(out, [[f"take one: {' '.join(map(_as_option, found[0].changes))}"]], "wrap")


def _as_option(change: str) -> str:
    """Return the options that make a change, such as ``--set loss=fused``."""
    field, _, value = change.partition(": ")
    return f"--set {shlex.quote(f'{field}={value}')}"


def _advised(one: Found) -> list[str]:
    found, gpu = one.estimate, find_gpu(one.as_recipe().hardware.gpu)
    speed = "" if found.tokens_per_s is None else f"{found.tokens_per_s:,.0f} tokens/s"
    notes = [f"changes the numerics: {', '.join(one.numerics)}"] if one.numerics else []
    if found.host_bytes:
        notes.append(f"pins {format_bytes(found.host_bytes)} of the host's memory for each GPU")
    if any(change.startswith("hardware.gpu:") for change in one.changes):
        notes += ["modelled, no step was measured on it"] * (gpu.basis != "measured")
        notes += ["no price is known"] * (gpu.price_per_hour is None)
    marked = f" ({'; '.join(notes)})" if notes else ""
    return [format_bytes(found.highest.device), speed, ", ".join(one.changes) + marked]


def _batch(recipe: Recipe) -> str:
    """Return the tokens of a step of several GPUs, and what they are the product of."""
    one, ranks, count = recipe.batch, recipe.mesh.data_ranks, recipe.hardware.count
    parts = f"{one.micro} x {one.seq:,}" + f" x {one.accumulate} accumulated" * (one.accumulate > 1)
    groups = f"{count} GPUs" if ranks == count else f"{ranks} groups of {count // ranks} GPUs"
    where = f"one batch for all {count} GPUs" if ranks == 1 else f"on each of {groups}"
    return f"{one.tokens * ranks:,} tokens a step: {parts}, {where}"


def subject(recipe: Recipe | None, estimate: Estimate) -> str:
    """Return one line: the recipe in words, or the traced code."""
    if recipe is not None:
        return describe(recipe)
    assert estimate.code is not None, "an estimate without a recipe is of traced code"
    steps = estimate.code.num_steps
    traced = f"{steps} step{'s' * (steps != 1)} traced"
    return f"{estimate.code.name}, {traced}, on {estimate.num_gpus} x {estimate.code.gpu}"


def gpu_name(recipe: Recipe | None, estimate: Estimate) -> str:
    """Return the name of the GPU that a recipe or traced code is predicted for."""
    return estimate.code.gpu if recipe is None and estimate.code else recipe.hardware.gpu if recipe else ""


def verdict(recipe: Recipe | None, estimate: Estimate) -> str:
    """Return whether it fits, and by how much."""
    headroom, device = estimate.headroom_bytes, estimate.device_bytes
    size = f"{format_bytes(estimate.highest.device)} of {format_bytes(device)}"
    gpu = gpu_name(recipe, estimate)
    if estimate.num_gpus > 1:
        gpu = f"each of {estimate.num_gpus} x {gpu}"
    share = f"{format_bytes(abs(headroom))} ({abs(headroom) / device:.1%})"
    if estimate.fits:
        return f"FITS on {gpu}: {size}, {share} to spare"
    if headroom >= 0:
        spare = f"only {share} to spare, and fragmentation may grow in later steps"
        return f"DOES NOT FIT SAFELY on {gpu}: {size}, {spare}"
    return f"DOES NOT FIT on {gpu}: {size}, {share} too much"


def speed(recipe: Recipe | None, estimate: Estimate) -> str:
    """Return tokens a second, a step's time with its bounds, MFU: as far as they are known."""
    if estimate.step_s is None:
        return f"not predicted: the speed of {gpu_name(recipe, estimate)} is not known"
    bound = estimate.bounds.get("step_s")
    between = f" ({quantity('step_s', bound.low)} to {quantity('step_s', bound.high)})" if bound else ""
    mfu = "" if estimate.mfu is None else f", {estimate.mfu:.1%} MFU"
    step = f"a step {format_seconds(estimate.step_s)}{between}"
    mark = _if_it_fitted(estimate)
    inputs = None if estimate.code is None else estimate.code.inputs
    rate, unit = estimate.tokens_per_s, "tokens"
    if rate is None and inputs is not None:
        rate, unit = inputs.samples_per_s, "samples"
    if rate is None:
        return f"{mark}{step}{mfu}"
    every = " in all" * (estimate.num_gpus > 1)
    return f"{mark}{rate:,.0f} {unit}/s{every}{mfu}, {step}"


def compiling(estimate: Estimate) -> str:
    """Return how long compiling takes, and when that pays; empty: nothing is compiled."""
    one = estimate.compilation
    if one is None:
        return ""
    graphs = f"{one.num_graphs} graph{'s' * (one.num_graphs != 1)} of {one.num_kernels:,} kernels"
    low, high = format_seconds(one.bounds.low), format_seconds(one.bounds.high)
    seconds = f"{format_seconds(one.seconds)} ({low} to {high})"
    text = f"{seconds} before the first step, with an empty cache: {graphs}"
    if one.eager_step_s is None:
        return text
    eager = f"a step takes {format_seconds(one.eager_step_s)} without"
    if one.eager_fits is False:
        return f"{text}; without it the step does not fit"
    if one.pays_from_steps is None:
        return f"{text}; never pays: {eager}"
    pays = f"{one.pays_from_steps:,} steps"
    if estimate.step_s is not None and (between := one.pays_between(estimate.step_s)):
        pays += f" ({between[0]:,} to {between[1]:,})"
    return f"{text}; pays from {pays}: {eager}"


def cost(recipe: Recipe | None, estimate: Estimate) -> str:
    """Return dollars a million tokens and an hour, or that no price is known."""
    money = estimate.cost
    if money is None:
        return f"no price of {gpu_name(recipe, estimate)} is known: give yours, --price USD"
    gpus = f"{money.num_gpus} GPU{'s' * (money.num_gpus > 1)} at {money.price_per_gpu_hour:.2f} $"
    costs = f"{money.per_hour:.2f} $ an hour ({gpus})"
    if money.per_million_tokens is not None:
        costs = f"{money.per_million_tokens:.4g} $ a million tokens, {costs}"
    elif money.per_million_samples is not None:
        costs = f"{money.per_million_samples:.4g} $ a million samples, {costs}"
    return f"{_if_it_fitted(estimate)}{costs}"


def run_lines(found: Mapping[str, Any]) -> list[list[str]]:
    """Return time, GPU-hours and cost of a run, from the fields of ``spec.result.Run``."""
    num_steps = math.ceil(found["tokens"] / found["step_tokens"])
    steps, hours = f"{num_steps:,} steps of {format_count(found['step_tokens'])} tokens", ""
    if (bounds := found.get("bounds")) is not None:
        ends = (bounds["low"], bounds["high"])
        steps = f"{' to '.join(map(format_seconds, ends))}; {steps}"
        hours = " to ".join(amount(found["gpu_hours"] * end / found["run_s"]) for end in ends)
    cost = ["cost", "-", "no price known: give --price"]
    if found.get("dollars") is not None:
        cost[1:] = f"{amount(found['dollars'])} $", f"{found['price_per_gpu_hour']:.2f} $ a GPU-hour"
    time = ["time", format_seconds(found["run_s"]), steps]
    return [time, ["GPU-hours", amount(found["gpu_hours"]), hours], cost]


def amount(value: float) -> str:
    """Return hours or dollars: whole ones, and three digits of fewer than a hundred."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def of_one(estimate: Estimate) -> str:
    """Return what a heading adds where the figures below it are of one GPU of several."""
    return " of one GPU" * (estimate.num_gpus > 1)


def _memory(out: Console, estimate: Estimate) -> None:
    label = len("pinned on the host" if estimate.host_bytes else "on the device")
    width = max(0, min(40, out.width - 27 - label))
    peak = estimate.peak_allocated_bytes
    name = "peak" if estimate.two_peaks is None else "expected peak"
    heading(out, f"Memory{of_one(estimate)} at the {name} ({estimate.peak_phase.replace('.', ' step, ')})")
    sizes = {name: getattr(estimate.breakdown, name) for name in CATEGORIES}
    lines = [(name, size, f"{size / peak:.1%}") for name, size in sizes.items() if size]
    lines += [
        ("allocated", peak, "100.0%"),
        ("reserved", estimate.peak_reserved_bytes, ""),
        ("on the device", estimate.peak_device_bytes, ""),
    ]
    if _full_bar(estimate) >= estimate.device_bytes:
        lines.append(("the device", estimate.device_bytes, ""))
    bars = _bars(out, estimate, [size for _, size, _ in lines], width)
    if estimate.host_bytes:
        lines.append(("pinned on the host", estimate.host_bytes, ""))
    cells = zip(lines, [*bars, ""], strict=False)
    shown = [[name, format_bytes(size), share, filled] for (name, size, share), filled in cells]
    rows(out, shown, "left", "right", "right", "left")


def _full_bar(estimate: Estimate) -> int:
    """Return the bytes of a full bar: the device's, or the peak's where it is larger or very small."""
    peak, device = estimate.peak_device_bytes, estimate.device_bytes
    return max(1, peak if peak > device or peak < device / 10 else device)


def _bars(out: Console, estimate: Estimate, sizes: Sequence[int], width: int) -> list[str]:
    whole, blocks = _full_bar(estimate), can_draw(out)
    return [bar(size / whole, width, blocks=blocks) for size in sizes]


def _phases(out: Console, estimate: Estimate) -> None:
    heading(out, "Highest allocated bytes by phase")
    sizes = [estimate.phases.after_init, *(getattr(estimate.phases.steady, phase) for phase in PHASES)]
    bars = ["", *_bars(out, estimate, sizes, max(0, min(40, out.width - 44)))]
    lines = [[*line, filled] for line, filled in zip(phase_lines(estimate.phases), bars, strict=True)]
    rows(out, lines, "left", "right", "right", "left")


def _other_phases(out: Console, estimate: Estimate) -> None:
    """Print a row for evaluations, generations and checkpoints of traced code."""
    code = estimate.code
    if code is None:
        return
    if code.other_phases:
        heading(out, "Outside the training step (its memory counts for the verdict, its time does not)")
        rows(out, map(_other_phase, code.other_phases), "left", "right", "right", "wrap")
    generations = [one.seconds for one in code.other_phases if one.name == "generation" and one.seconds]
    if not generations:
        return
    heading(out, "A policy's loop")
    if code.scoring is not None:
        rows(out, [_other_phase(code.scoring)], "left", "right", "right", "wrap")
    if estimate.step_s:
        parts = {"generation": generations[0]}
        if code.scoring is not None and code.scoring.seconds:
            parts["scoring"] = code.scoring.seconds
        parts["update"] = max(0.0, estimate.step_s - parts.get("scoring", 0.0))
        total_s = sum(parts.values())
        shares = [f"{name} {format_seconds(one)} ({one / total_s:.0%})" for name, one in parts.items()]
        rows(out, [["time", format_seconds(total_s), ", ".join(shares)]], "left", "right", "wrap")


def _other_phase(one: OtherPhase) -> list[str]:
    what = [f"{one.num_forwards:,} forward{'s' * (one.num_forwards != 1)}"] if one.num_forwards else []
    if one.flops:
        what.append(format_flops(one.flops))
    if one.saved_bytes:
        what.append(f"{format_bytes(one.saved_bytes)} copied to the host; writing to disk is not counted")
    after = sorted({number for number in one.after_steps if number})
    when = ["before the first step"] * (0 in one.after_steps)
    if after:
        numbers = ", ".join(map(str, after[:-1])) + " and " * (len(after) > 1) + str(after[-1])
        when.append(f"after step{'s' * (len(after) > 1)} {numbers}")
    time = "" if one.seconds is None else format_seconds(one.seconds)
    peak = format_bytes(one.peak_allocated_bytes)
    return [one.name, time, peak, f"{', '.join(what)}; {' and '.join(when)}"]


def phase_lines(phases: Phases) -> list[list[str]]:
    """Return the table of the highest allocated bytes by phase, in the first and in the steady step."""
    lines = [["", "first step", "steady step"], ["after init", format_bytes(phases.after_init), ""]]
    for phase in PHASES:
        sizes = (getattr(phases.first, phase), getattr(phases.steady, phase))
        lines.append([phase, *map(format_bytes, sizes)])
    return lines


def _pipeline(out: Console, estimate: Estimate) -> None:
    """Print a row for each position of a pipeline; equal neighbours are one row."""
    if not estimate.pipeline:
        return
    heading(out, f"Pipeline{_bubble(estimate)}")
    titles = ["GPU", "blocks", "in flight", "peak", "forward", "backward", "idle in a step"]
    lines = [titles]
    for number, one in enumerate(estimate.pipeline):
        blocks = ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in one.blocks)
        times = [one.forward_s, one.backward_s, one.idle_s]
        lines.append(
            [str(number), blocks, str(one.in_flight), format_bytes(one.peak_device_bytes)]
            + ["" if seconds is None else format_seconds(seconds) for seconds in times]
        )
    rows(out, lines, "left", "left", *(["right"] * 5))


def _bubble(estimate: Estimate) -> str:
    if estimate.bubble is None:
        return ""
    return f": GPUs wait for other stages {estimate.bubble:.1%} of the forwards' and backwards' time"


def _step_lines(estimate: Estimate) -> list[list[str]]:
    lines = [
        ["model FLOPs", format_flops(estimate.model_flops), "forward and backward, nothing recomputed"],
        ["hardware FLOPs", format_flops(estimate.hardware_flops), "executed, recomputation included"],
    ]
    if estimate.step_s is not None:
        lines.append(["time", format_seconds(estimate.step_s), _parts(estimate)])
        lines += _utilisation(estimate)
    if estimate.code is not None and estimate.time is not None and estimate.code.num_python_calls:
        launches, calls = estimate.code.num_launches, estimate.code.num_python_calls
        blocks = f", {estimate.code.num_recomputed_blocks:,} blocks to recompute"
        work = f"{launches:,} launches, {calls:,} calls of Python functions"
        work += blocks * bool(estimate.code.num_recomputed_blocks)
        lines.append(["host", format_seconds(estimate.time.issue_s), work])
    if estimate.traffic:
        # The collectives of a step by kind, and the number of ranks that take part.
        calls = ", ".join(
            f"{one.calls} {one.kind.replace('_', '-')}{'s' * (one.calls != 1)} over {one.num_ranks}"
            f"{' between hosts' * one.between_hosts}"
            for one in estimate.traffic
        )
        lines.append(["sent by a GPU", format_bytes(sum(one.bytes_sent for one in estimate.traffic)), calls])
    if estimate.mfu is not None:
        lines.append(["MFU", f"{estimate.mfu:.1%}", "model FLOPs over the time and the dense peak"])
    if estimate.hfu is not None:
        lines.append(["HFU", f"{estimate.hfu:.1%}", "hardware FLOPs over the time and the dense peak"])
    return lines


def _utilisation(estimate: Estimate) -> list[list[str]]:
    """Return the shares of the GPU's busy time, and the rate of its products: why MFU is below it."""
    time = estimate.time
    if time is None or not estimate.hfu or not time.matmul_s:
        return []
    rate = estimate.hfu * time.total / time.matmul_s
    useful = estimate.model_flops / estimate.hardware_flops
    why = (
        f"{1 - time.memory_bound:.0%} of it products and attention, at {rate:.0%} of the peak, "
        f"{useful:.0%} of their FLOPs the model's; {time.memory_bound:.0%} memory-bound"
    )
    return [["GPU busy", f"{time.busy:.0%}", why]]


def _parts(estimate: Estimate) -> str:
    if estimate.time is None:
        return ""
    time = estimate.time
    parts = [
        ("matmul", time.matmul_s - time.attention_s), ("attention", time.attention_s),
        ("memory-bound", time.memory_s - time.optimizer_s), ("optimizer", time.optimizer_s),
        ("communication", time.communication_s), ("waiting for the host", time.host_s),
        ("waiting for other stages", time.bubble_s),
    ]  # fmt: skip
    hidden_s = time.hidden_communication_s
    hidden = f"; behind them {format_seconds(hidden_s)} of communication" if hidden_s else ""
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds) + hidden


def _bound(name: str, estimate: Estimate) -> str:
    bound = estimate.bounds[name]
    words = "time" if name == "step_s" else name.removesuffix("_bytes").replace("_", " ")
    return f"{words} {quantity(name, bound.low)} to {quantity(name, bound.high)}. {bound.basis}"
