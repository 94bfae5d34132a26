"""A profiler's trace and a Trainer's log as text for a terminal: busy, MFU and why, and what to do."""

from collections.abc import Iterator

from rich.console import Console

from trainfit.report.console import bar, can_draw, console, heading, rows
from trainfit.spec.profile import PRODUCTS, TraceFacts, TrainerRun
from trainfit.spec.units import format_count, format_flops, format_seconds

NOTABLE = 0.1
"""Share of the window from which a cause is named."""
SLOW_PRODUCTS = 0.3
"""Rate of products, of the peak, below which they are too small."""
FEW_PRODUCTS = 0.5
SHORT_KERNEL_S = 10e-6


def show_trace(found: TraceFacts) -> None:
    """Print the use of the GPU in a trace."""
    out = console()
    gpu = found.gpu or f"GPU {found.device}"
    steps = f"{found.num_steps} steps" if found.num_steps else "no steps marked"
    out.print(
        f"{found.file}: {gpu}, {steps}, {found.num_kernels:,} kernel{'s' * (found.num_kernels != 1)}",
        style="bold",
    )
    rows(out, [[line] for line in _answer(found)], "wrap")
    _window(out, found)
    _kinds(out, found)
    _stretches(out, found)
    _syncs(out, found)
    advice = list(trace_advice(found))
    if advice:
        heading(out, "What would help")
        rows(out, [["-", line] for line in advice], "left", "wrap")
    out.print()


def _answer(found: TraceFacts) -> Iterator[str]:
    at = found.utilisation
    step = f"a step {format_seconds(found.step_s)}, " if found.step_s else ""
    if at is None:
        yield f"{step}{found.busy:.1%} busy; MFU: name the run's recipe (--recipe), or profile with shapes"
        yield f"of the kernels' time {found.products:.1%} is products and attention"
        return
    yield f"{step}{found.busy:.1%} busy and {at.mfu:.2%} MFU"
    if found.busy > 0.5 and at.mfu < found.busy / 4:
        yield (
            "busy counts the time in which any kernel runs, as nvidia-smi does; MFU counts what the kernels "
            "compute"
        )
    whole = sum(one.seconds for one in found.kinds)
    products_s = found.seconds_of(*PRODUCTS)
    yield (
        f"MFU {at.mfu:.2%} = {whole / found.window_s:.1%} of the time in kernels x {products_s / whole:.1%} "
        f"of that in products and attention x {at.products_rate:.1%} of the peak while they run"
    )
    peak = f"peak {format_flops(at.peak_flops_per_s)}/s in {at.dtype}"
    yield f"{format_flops(at.flops)} a step ({at.flops_are}), {peak}"


def _window(out: Console, found: TraceFacts) -> None:
    heading(out, "Time of the GPU" + " in the marked steps" * bool(found.num_steps))
    alone_s = found.busy_s - found.exposed_communication_s - found.exposed_copies_s
    lines = [
        ("computes", alone_s), ("communication alone", found.exposed_communication_s),
        ("copies and fills alone", found.exposed_copies_s),
        ("waits for the host", found.waits_for_host_s), ("between kernels", found.between_kernels_s),
        ("other idle time", found.other_idle_s),
    ]  # fmt: skip
    _shares(out, [(name, seconds, "") for name, seconds in lines if seconds], found.window_s)
    if found.num_unqueued:
        share = found.num_unqueued / found.num_kernels
        line = f"{share:.0%} of the kernels begin as soon as they are launched: the host sets their pace"
        rows(out, [[line]], "wrap")
    hidden_s = found.communication_s - found.exposed_communication_s
    if hidden_s > 0:
        rows(out, [[f"behind the computation: {format_seconds(hidden_s)} of communication"]], "wrap")


def _kinds(out: Console, found: TraceFacts) -> None:
    whole = sum(one.seconds for one in found.kinds)
    heading(out, f"Kernels, median {format_seconds(found.kernel_s)}")
    lines = [(one.name, one.seconds, f"{one.num_kernels:,}") for one in found.kinds]
    _shares(out, lines, whole)


def _shares(out: Console, lines: list[tuple[str, float, str]], whole: float) -> None:
    width, blocks = max(0, min(40, out.width - 56)), can_draw(out)
    shown = [
        [name, format_seconds(seconds), f"{seconds / whole:.1%}", number,
         bar(seconds / whole, width, blocks=blocks)]
        for name, seconds, number in lines
    ]  # fmt: skip
    rows(out, shown, "left", "right", "right", "right", "left")


def _stretches(out: Console, found: TraceFacts) -> None:
    if not found.stretches or found.waits_for_host_s < 0.01 * found.window_s:
        return
    heading(out, "Launch-bound stretches: the GPU waits for the host")
    lines = [["from", "length", "idle", "kernels", "median", "waits for"]]
    for one in found.stretches:
        step = "" if one.step is None else f"step {one.step}, "
        lines.append(
            [f"{step}{format_seconds(one.begin_s)}", format_seconds(one.seconds),
             f"{one.waited_s / one.seconds:.0%}", f"{one.num_kernels:,}", format_seconds(one.kernel_s),
             one.op or "code between operations"]
        )  # fmt: skip
    rows(out, lines, "left", "right", "right", "right", "right", "wrap")


def _syncs(out: Console, found: TraceFacts) -> None:
    if not found.syncs:
        return
    heading(out, "The host waits for the GPU")
    steps = max(1, found.num_steps)
    lines = [["calls a step", "seconds a step", "call", "in"]]
    for one in found.syncs:
        calls = f"{one.num_calls / steps:.3g}"
        lines.append([calls, format_seconds(one.seconds / steps), one.call, one.op or "no operation"])
    rows(out, lines, "right", "right", "left", "wrap")


def trace_advice(found: TraceFacts) -> Iterator[str]:
    """Yield what would make the steps faster, by what takes the time."""
    window, at = found.window_s, found.utilisation
    if found.waits_for_host_s > NOTABLE * window or found.num_unqueued > found.num_kernels / 2:
        share = found.waits_for_host_s / window
        yield (
            f"the host sets the pace, the GPU waits {share:.0%} of the time for it: more tokens a "
            "micro-batch, torch.compile or CUDA graphs, a fused optimizer"
        )
    if found.products < FEW_PRODUCTS:
        small = found.kernel_s < SHORT_KERNEL_S
        first = next((one.name for one in found.kinds if one.name not in PRODUCTS), "")
        remedy = "torch.compile and fused kernels move fewer bytes"
        if first == "optimizer":
            remedy = "more tokens an update (a larger micro-batch, accumulation); a fused optimizer"
        yield (
            f"{1 - found.products:.0%} of the kernels' time is no product ({first} first): {remedy}"
            + "; a larger micro-batch makes kernels longer" * (small and first != "optimizer")
        )
    if at is not None and at.products_rate < SLOW_PRODUCTS:
        yield (
            f"products run at {at.products_rate:.0%} of the peak: larger matrices (more tokens), bf16 in "
            "place of fp32, sizes that are multiples of 8"
        )
    if found.exposed_communication_s > NOTABLE * window:
        share = found.exposed_communication_s / window
        yield (
            f"{share:.0%} of the time only collectives run: more tokens between them (accumulation without "
            "synchronisation), prefetching, fewer ranks to shard over"
        )
    if found.exposed_copies_s > NOTABLE * window:
        yield "copies are not overlapped: pinned memory, non_blocking=True, a loader that reads ahead"
    reads = sum(one.num_calls for one in found.syncs) / max(1, found.num_steps)
    if reads >= 2 and found.waits_for_host_s > NOTABLE * window:
        copies = any(one.op == "aten::copy_" for one in found.syncs)
        yield (
            f"the host waits for the GPU {reads:.3g} times a step: fewer .item(), .cpu() and prints"
            + "; batches in pinned memory, copied with non_blocking=True" * copies
        )


def show_trainer_run(run: TrainerRun) -> None:
    """Print the speed of a Trainer's run."""
    out = console()
    out.print(f"{run.file or 'standard input'}: a Trainer's run, {run.num_logs:,} logs", style="bold")
    lines: list[list[str]] = []

    def add(name: str, value: object, text: str) -> None:
        if value is not None:
            lines.append([name, text])

    add("steps", run.num_steps, f"{run.num_steps:,}" if run.num_steps is not None else "")
    if run.first_loss is not None and run.last_loss is not None:
        lines.append(["loss", f"{run.first_loss:.4g} to {run.last_loss:.4g}"])
    add("time", run.runtime_s, format_seconds(run.runtime_s or 0))
    add("a step", run.step_s, format_seconds(run.step_s or 0))
    add("tokens/s", run.tokens_per_s, f"{run.tokens_per_s or 0:,.0f}")
    add("samples/s", run.samples_per_s, f"{run.samples_per_s or 0:,.4g}")
    add("tokens", run.tokens, format_count(run.tokens or 0))
    add("FLOPs by 6 N D", run.total_flos, format_flops(run.total_flos or 0))
    add("MFU", run.mfu, f"{run.mfu or 0:.2%}, of the recipe's model FLOPs")
    add("MFU by 6 N D", run.mfu_by_total_flos, f"{run.mfu_by_total_flos or 0:.2%}")
    rows(out, lines, "left", "wrap")
    if run.runtime_s is None:
        rows(out, [["the run has not ended, or its last line is missing: no time is known"]], "wrap")
    elif run.mfu is None:
        rows(out, [["MFU: name the run's recipe (--recipe)"]], "wrap")
    out.print()
