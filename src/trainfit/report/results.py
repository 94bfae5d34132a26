"""Measurements, training runs and utilisation as text; every result as HTML for a notebook."""

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainfit.report import html, loop_text, pictures
from trainfit.report import prediction_text as predictions
from trainfit.report.compare import PHASE_NAMES, Comparison
from trainfit.report.comparisons import outcome
from trainfit.report.console import console, heading, notes, rows
from trainfit.report.table import Column, Table
from trainfit.report.words import describe, quantity
from trainfit.spec.explanation import MemoryCourse
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Measurement, MemoryBreakdown
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

COMPARED = NAMES | {"step_s": "time a step"}
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


def _lines(lines: Sequence[Line]) -> list[html.Line]:
    return [html.Line(line[0], line[1], " ".join(line[2:])) for line in lines]


def _sizes(breakdown: MemoryBreakdown) -> list[html.Line]:
    """Return a line for each category of memory at the peak."""
    sizes = pictures.categories(breakdown)
    return [
        html.Line(one.name, format_bytes(one.num_bytes), f"{one.num_bytes / breakdown.total:.1%}")
        for one in sizes
    ]


def _course(course: MemoryCourse | None, each: str = "") -> html.Part:
    """Return the picture of memory over the step; None: it is not known, and there is no picture."""
    return html.Part(picture="" if course is None else pictures.course(f"Memory{each} over the step", course))


def prediction_bar(name: str, estimate: Estimate) -> pictures.Bar:
    """Return the bar of a prediction against its device."""
    sizes, text = pictures.on_device(estimate), f"{format_bytes(estimate.highest.device)} of "
    return pictures.Bar(name, text + format_bytes(estimate.device_bytes), sizes, estimate.device_bytes)


def prediction_html(
    recipe: Recipe | None, estimate: Estimate, notes: Sequence[str] = (), course: MemoryCourse | None = None
) -> str:
    """Return a prediction for a notebook: verdict, memory against the device, speed, cost, warnings.

    Args:
        course: the memory over the step; None: not known.
    """
    each, name = predictions.of_one(estimate), predictions.gpu_name(recipe, estimate)
    answer = [*predictions.two_peaks(estimate), ["speed", predictions.speed(recipe, estimate)]]
    if estimate.tokens_per_s:
        answer.append(["cost", predictions.cost(recipe, estimate)])
    answer += [*(["warning", line] for line in estimate.warnings), *(["note", line] for line in notes)]
    memory = [html.Line(f"Memory{each} at the peak"), *_sizes(estimate.breakdown)]
    totals = {"allocated": "peak_allocated", "reserved": "peak_reserved", "on the device": "peak_device"}
    totals |= {"the device": "device"} | ({"pinned on the host": "host"} if estimate.host_bytes else {})
    memory += [html.Line(name, format_bytes(getattr(estimate, f"{field}_bytes")))
               for name, field in totals.items()]  # fmt: skip
    bar = pictures.bars("Memory against the device", [prediction_bar(name, estimate)])
    parts = [html.Part(picture=bar), html.Part(_lines(answer)), _course(course, each), html.Part(memory)]
    verdict = predictions.verdict(recipe, estimate)
    return html.notebook(predictions.subject(recipe, estimate), verdict, parts, good=estimate.fits)


def measurement_html(recipe: Recipe, result: Measurement) -> str:
    """Return a measurement for a notebook: status, memory, time, speed, device."""
    where = result.environment
    parts = [html.Part(_lines([["device", where.device], *_measured(recipe, result)]))]
    if result.breakdown is not None:
        bar = measurement_bar("at the peak", result, result.breakdown)
        parts.insert(0, html.Part(picture=pictures.bars("Measured memory by category", [bar])))
        parts.append(html.Part([html.Line("Memory at the peak"), *_sizes(result.breakdown)]))
    good = result.status == "done"
    return html.notebook(describe(recipe, _cpu(result)), _ending(result), parts, good=good)


def measurement_bar(name: str, result: Measurement, breakdown: MemoryBreakdown) -> pictures.Bar:
    """Return the bar of a measurement, against the memory of its GPU; a CPU's is not the step's alone."""
    card = None if result.environment.cuda is None else result.environment.device_bytes
    of = "" if card is None else f" of {format_bytes(card)}"
    return pictures.Bar(name, f"{format_bytes(breakdown.total)}{of}", pictures.categories(breakdown), card)


def compared_lines(recipe: Recipe, predicted: Estimate, measured: Measurement) -> list[Line]:
    """Return both sides and the error of each peak; on the recipe's device also of times."""
    both = Comparison(recipe, predicted, measured)
    names = [*PEAKS, *(f"phases.{name}" for name in PHASE_NAMES)]
    names += ["step_s", "tokens_per_s", "mfu"] if both.on_its_device else []
    lines: list[Line] = []
    for name in names:
        error = both.error(name)
        if error is None:
            continue
        field = name.removeprefix("phases.")
        shown = [
            format_bytes(both.value(side, name)) if field != name else quantity(name, both.value(side, name))
            for side in ("predicted", "measured")
        ]
        lines.append([COMPARED.get(field, field.replace(".", " step, ")), *shown, f"{error:+.2%}"])
    return lines


def show_compared(
    recipe: Recipe, predicted: Estimate, measured: Measurement, *, out: Console | None = None
) -> None:
    """Print a prediction beside a measurement of the same recipe."""
    out, both = out or console(), Comparison(recipe, predicted, measured)
    out.print(f"{describe(recipe)}, measured on {both.device}", style="bold")
    out.print("; ".join([outcome(both), *_caveats(both)]))
    lines = compared_lines(recipe, predicted, measured)
    rows(out, [["", "predicted", "measured", "error"], *lines], "left", "right", "right", "right")


def _caveats(both: Comparison) -> list[str]:
    """Return why the errors may not be those of the prediction."""
    other = "" if both.on_its_device else "measured on another device than the recipe names"
    return [text for text in (other, both.other_versions) if text]


def compared_html(recipe: Recipe, predicted: Estimate, measured: Measurement) -> str:
    """Return a prediction beside a measurement for a notebook: both peaks on one scale, then the table."""
    both, columns = Comparison(recipe, predicted, measured), ("", "predicted", "measured", "error")
    table = Table(
        [Column(title, itemgetter(at), is_number=at > 0) for at, title in enumerate(columns)],
        compared_lines(recipe, predicted, measured),
    )
    shown = [pictures.Bar("predicted", format_bytes(predicted.breakdown.total),
                          pictures.categories(predicted.breakdown))]  # fmt: skip
    if measured.breakdown is not None:
        bar = measurement_bar("measured", measured, measured.breakdown)
        shown.append(bar._replace(text=format_bytes(bar.total), card=None))
    parts = [html.Part(picture=pictures.bars("Allocated at the peak", shown)), html.Part(table=table)]
    parts.append(html.Part([html.Line("note", text) for text in _caveats(both)]))
    title = f"{describe(recipe)}, measured on {both.device}"
    return html.notebook(title, outcome(both), parts, good=measured.status == "done")


def training_html(recipe: Recipe, summary: "TrainSummary") -> str:
    """Return a training run for a notebook: status, losses, speed, memory, its newest checkpoint."""
    lines = [*_trained(summary), *([["checkpoint", summary.checkpoint]] if summary.checkpoint else [])]
    good = summary.status in ("done", "stopped")
    return html.notebook(
        describe(recipe, _cpu(summary)), _ending(summary), [html.Part(_lines(lines))], good=good
    )


def usage_html(found: dict[str, Any]) -> str:
    """Return the numbers of ``trainfit.mfu`` for a notebook."""
    lines = [*_used(found), *(predictions.run_lines(found) if "run_s" in found else [])]
    title = f"{found['model']}, {format_count(found['params'])} parameters"
    return html.notebook(title, f"{found['mfu']:.2%} MFU", [html.Part(_lines(lines))], good=found["mfu"] <= 1)
