"""Measurements, training runs and utilisation as text; every result as an HTML table for Jupyter."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainfit.report import html, loop_text
from trainfit.report import prediction_text as predictions
from trainfit.report.console import console, heading, notes, rows
from trainfit.report.plot import CATEGORY_COLORS, INK, MUTED, PREDICTED, WRONG
from trainfit.report.words import describe, quantity
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CATEGORIES, Estimate, Measurement
from trainfit.spec.units import format_bytes, format_count, format_flops, format_seconds

if TYPE_CHECKING:
    from trainfit.training.export.result import Export
    from trainfit.training.observer import TrainSummary

PEAK_IS = {"cuda-allocated": "allocated on the GPU", "live-tensors": "of live tensors"}
"""Parts counted in a training run's peak memory."""
NAMES = {
    "peak_allocated_bytes": "peak allocated", "peak_reserved_bytes": "peak reserved",
    "peak_device_bytes": "peak device", "tokens_per_s": "tokens a second", "model_flops": "model FLOPs",
    "hardware_flops": "hardware FLOPs", "mfu": "MFU", "hfu": "HFU",
}  # fmt: skip

LONG_DATA_WAIT = 0.05  # Share of a step's time from which a remedy is named
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
Line = list[str]  # Name, value, and a note


def _known(value: Any, *names: str) -> list[Line]:
    """Return lines of the fields that are not None."""
    return [
        [NAMES[name], quantity(name, held), ""]
        for name in names
        if (held := getattr(value, name)) is not None
    ]


def _ending(value: Any) -> str:
    return f"{value.status.upper()}{': ' + value.message if value.message else ''}"


def _cpu(result: "Measurement | TrainSummary") -> str | None:
    """Return the CPU that a result is of; None: it is of GPUs."""
    if isinstance(result, Measurement):
        return result.environment.device if result.environment.driver is None else None
    return result.run.device if result.run.device_type == "cpu" else None


def show_measurement(recipe: Recipe, result: Measurement, *, out: Console | None = None) -> None:
    """Print a measurement: status, memory by phase, times with their spread, device and versions."""
    out = out or console()
    held_back = bool(result.environment.held_back)
    if held_back:  # First, because the measurement has no time.
        out.print(_ending(result), style="bold red")
    out.print(describe(recipe, _cpu(result)), style="bold")
    built = f"{format_count(result.params)} parameters · " if result.params else ""
    out.print(f"{built}recipe {result.recipe_id}")
    where = result.environment
    names = {"torch": "torch", "CUDA": "cuda", "driver": "driver", "transformers": "transformers"}
    versions = {name: getattr(where, field) for name, field in names.items()}
    software = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    out.print(f"{where.device} ({format_bytes(where.device_bytes)}) · {software}")
    out.print()
    if not held_back:
        out.print(_ending(result), style="bold green" if result.status == "done" else "bold red")
    if result.phases is not None:
        heading(out, "Highest allocated bytes by phase")
        rows(out, predictions.phase_lines(result.phases), "left", "right", "right")
    if result.loop is not None:
        loop_text.show(out, result.loop, None)
    heading(out, "One update" if result.loop is not None else "One step")
    rows(out, _measured(recipe, result), "left", "right", "wrap")
    if result.ranks:
        heading(out, "Ranks: highest bytes, and median time a step")
        rows(out, _ranks(result), "left", "right", "right", "right", "right")


def _ranks(result: Measurement) -> list[Line]:
    lines: list[Line] = [["", "allocated", "reserved", "device", "step"]]
    for number, rank in enumerate(result.ranks):
        held = {name: getattr(rank, name) for name in (*PEAKS, "step_s")}
        cells = ["" if value is None else quantity(name, value) for name, value in held.items()]
        lines.append([f"rank {number}", *cells])
    return lines


def _measured(recipe: Recipe, result: Measurement) -> list[Line]:
    lines = _known(result, *PEAKS)
    if result.step_s is not None:
        spread = ""
        if times := result.step_times:
            ends = f"{format_seconds(times.low)} to {format_seconds(times.high)}"
            spread = f"median of {len(times.samples)}; 10 % to 90 %: {ends}"
        lines.append(["time a step", format_seconds(result.step_s), spread])
    if recipe.compile and result.first_step_s is not None:
        lines.append(
            ["first step", format_seconds(result.first_step_s), "compiles, unless an earlier run did"]
        )
    lines += _known(result, "tokens_per_s", "model_flops", "hardware_flops", "mfu", "hfu")
    for name, share, what in (
        ("GPU busy", result.busy, "of the time a kernel ran, as nvidia-smi prints it"),
        ("memory access", result.memory_access, "of the time its memory was read or written"),
    ):
        if share is not None:
            lines.append([name, f"{share:.0%}", what])
    if result.losses:
        first = f"first {result.losses[0]:.4f}, {len(result.losses)} steps"
        lines.append(["loss", f"{result.losses[-1]:.4f}", first])
    return lines


def show_training(recipe: Recipe, summary: "TrainSummary", *, out: Console | None = None) -> None:
    """Print a training run: status, losses, speed, memory, its newest checkpoint."""
    out = out or console()
    heading(out, describe(recipe, _cpu(summary)))
    good = summary.status in {"done", "stopped"}
    out.print(_ending(summary), style="bold green" if good else "bold red")
    rows(out, _trained(summary), "left", "right", "wrap")
    if summary.checkpoint:
        out.print(f"  checkpoint  {summary.checkpoint}", soft_wrap=True)


def _trained(summary: "TrainSummary") -> list[Line]:
    now = summary.steps - summary.first_step
    lines = [["steps", f"{summary.steps:,}", f"of {summary.run.steps:,}, {now:,} of them now"]]
    if summary.losses:
        lines.append(["loss", f"{summary.losses[-1]:.4f}", f"from {summary.losses[0]:.4f}"])
    if summary.eval_perplexity is not None:
        lines.append(["perplexity", f"{summary.eval_perplexity:.4g}", "of held-out documents"])
    if summary.eval_reward is not None:
        lines.append(["reward", f"{summary.eval_reward:.4f}", "of held-out prompts"])
    if summary.step_s is not None:
        total = f"median; {format_seconds(summary.wall_s)} in all"
        lines.append(["time a step", format_seconds(summary.step_s), total])
    if (share := summary.data_wait_share) is not None:
        remedy = ": raise loader.workers or loader.prefetch" if share >= LONG_DATA_WAIT else ""
        lines.append(["data wait", f"{share:.1%}", f"of that time the device waited for data{remedy}"])
    lines += _known(summary, "tokens_per_s", "mfu", "hfu")
    for reason, count in summary.held_back.items():
        lines.append(["throttled", f"{count:,} steps", f"by the driver ({reason}); excluded from the speeds"])
    if (peak := summary.peak_memory_bytes) is not None:
        lines.append(["peak memory", format_bytes(peak), PEAK_IS.get(summary.peak_memory_is or "", "")])
    return lines


def show_export(found: "Export", *, out: Console | None = None) -> None:
    """Print what an export wrote, and the lines of Python that load it."""
    out = out or console()
    out.print(f"{found.folder}: {found.kind} of step {found.step:,}", style="bold green")
    weights = [one for one in found.files if one.endswith(".safetensors")]
    files = f"in {len(weights)} file{'s' * (len(weights) > 1)}"
    start = found.base or "random weights: it knows what this run taught it alone"
    lines = [
        ["parameters", f"{format_count(found.parameters)} in {found.dtype}"],
        ["weights", f"{format_bytes(found.weights_bytes)} {files}"],
        ["began with", start],
    ]
    rows(out, lines, "left", "wrap")
    notes(out, "Notes", found.notes)
    heading(out, "Load it")
    loaded = found.folder if found.kind == "model" else found.base or "BASE"
    out.print(f"  model = AutoModelForCausalLM.from_pretrained({loaded!r})", soft_wrap=True)
    if found.kind == "adapter":
        out.print(f"  model = PeftModel.from_pretrained(model, {found.folder!r})", soft_wrap=True)
    if "tokenizer.json" in found.files:
        out.print(f"  tokenizer = AutoTokenizer.from_pretrained({found.folder!r})", soft_wrap=True)


def show_usage(found: dict[str, Any], *, out: Console | None = None) -> None:
    """Print the numbers of ``trainfit.mfu``, by their names in the command's JSON."""
    out = out or console()
    if "mfu" in found:
        trained = found["trainable_params"]
        some = "" if trained == found["params"] else f", {format_count(trained)} of them trained"
        out.print(f"{found['model']}, {format_count(found['params'])} parameters{some}", style="bold")
        rows(out, _used(found), "left", "right", "wrap")
        if isinstance(found["closed_form"], dict):
            out.print(f"  closed form: {found['closed_form']['convention']}", soft_wrap=True)
        if whole := found.get("of_full_training"):
            shares = f"{whole['mfu']:.2%} MFU, {whole['hfu']:.2%} HFU"
            why = "whoever counts 6N for an adapter's run states these"
            out.print(f"  as if every weight were trained: {shares}; {why}", soft_wrap=True)
        if found["mfu"] > 1:
            why = "more than the peak allows: check --step-s, --count and --precision"
            out.print(f"  {why}", style="bold red")
        notes(out, "Operations without a FLOP rule (counted as 0)", found["ops_without_flops"])
    if "run_s" in found:
        heading(out, f"A run over {format_count(found['tokens'])} tokens")
        rows(out, predictions.run_lines(found), "left", "right", "wrap")
    elif "dollars" in found:
        hours = f"{predictions.amount(found['gpu_hours'])} GPU-hours at {found['price_per_gpu_hour']:.2f} $"
        out.print(f"{hours}: {predictions.amount(found['dollars'])} $")


def _used(found: dict[str, Any]) -> list[Line]:
    simple = found["closed_form"] if isinstance(found["closed_form"], dict) else None
    peak = f"{found['peak_flops_per_s'] / 1e12:,.4g} TFLOP/s dense peak each"
    passes = f"forward and backward, attention {found['attention']}"
    closed = {name: f"closed form: {simple[name]:.2%}" if simple else "" for name in ("mfu", "hfu")}
    return [
        ["GPUs", f"{found['num_gpus']} x {found['gpu']}", peak],
        ["step", format_seconds(found["step_s"]), f"{found['tokens_per_s']:,.0f} tokens a second"],
        ["model FLOPs", format_flops(found["model_flops"]), passes],
        ["hardware FLOPs", format_flops(found["hardware_flops"]), "executed, recomputation included"],
        *([name.upper(), f"{found[name]:.2%}", text] for name, text in closed.items()),
    ]


def _html(title: str, verdict: str, lines: Sequence[Line | html.Line], *, good: bool) -> str:
    """Return the table that Jupyter shows."""
    rows = [
        line if isinstance(line, html.Line) else html.Line(line[0], line[1], " ".join(line[2:]))
        for line in lines
    ]
    return html.notebook_table(title, verdict, rows, good=good)


def _bars(value: Estimate | Measurement, whole: float) -> list[html.Line]:
    """Return a line with a bar for each category of memory at the peak; a bar of ``whole`` bytes is full."""
    if value.breakdown is None:
        return []
    sizes = {name: getattr(value.breakdown, name) for name in CATEGORIES}
    return [
        html.Line(name, format_bytes(size), f"{size / value.breakdown.total:.1%}", size / whole,
                  CATEGORY_COLORS.get(name, MUTED))
        for name, size in sizes.items() if size
    ]  # fmt: skip


def prediction_html(recipe: Recipe | None, estimate: Estimate, notes: Sequence[str] = ()) -> str:
    """Return the table of a prediction: verdict, speed, cost, memory at the peak by category, warnings."""
    lines: list[Line | html.Line] = [
        *predictions.two_peaks(estimate),
        ["speed", predictions.speed(recipe, estimate)],
    ]
    if estimate.tokens_per_s:
        lines.append(["cost", predictions.cost(recipe, estimate)])
    lines.append(html.Line("Memory at the peak"))
    whole = max(estimate.device_bytes, estimate.peak_device_bytes)
    lines += _bars(estimate, whole)
    totals = {"allocated": "peak_allocated", "reserved": "peak_reserved", "on the device": "peak_device"}
    totals |= {"pinned on the host": "host"} if estimate.host_bytes else {}
    for name, field in totals.items():
        size = getattr(estimate, f"{field}_bytes")
        bar = size / whole if field == "peak_device" else None
        color = PREDICTED if estimate.fits else WRONG
        lines.append(html.Line(f"{name}{predictions.of_one(estimate)}", format_bytes(size), "", bar, color))
    size = estimate.device_bytes
    lines.append(html.Line("the device", format_bytes(size), "", size / whole, INK))
    lines += [*(["warning", line] for line in estimate.warnings), *(["note", line] for line in notes)]
    verdict = predictions.verdict(recipe, estimate)
    return _html(predictions.subject(recipe, estimate), verdict, lines, good=estimate.fits)


def measurement_html(recipe: Recipe, result: Measurement) -> str:
    """Return the table of a measurement: status, memory, time, speed, device."""
    lines: list[Line | html.Line] = [["device", result.environment.device], *_measured(recipe, result)]
    if result.breakdown is not None:
        lines += [html.Line("Memory at the peak"), *_bars(result, result.breakdown.total)]
    return _html(describe(recipe, _cpu(result)), _ending(result), lines, good=result.status == "done")


def training_html(recipe: Recipe, summary: "TrainSummary") -> str:
    """Return the table of a training run: status, losses, speed, memory, its newest checkpoint."""
    lines = [*_trained(summary), *([["checkpoint", summary.checkpoint]] if summary.checkpoint else [])]
    return _html(
        describe(recipe, _cpu(summary)), _ending(summary), lines, good=summary.status in ("done", "stopped")
    )


def usage_html(found: dict[str, Any]) -> str:
    """Return the table of the numbers of ``trainfit.mfu``."""
    lines = [*_used(found), *(predictions.run_lines(found) if "run_s" in found else [])]
    title = f"{found['model']}, {format_count(found['params'])} parameters"
    return _html(title, f"{found['mfu']:.2%} MFU", lines, good=found["mfu"] <= 1)
