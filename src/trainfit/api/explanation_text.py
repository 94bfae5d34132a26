"""An explanation as text for a terminal: the peak, a chart of the step's memory, categories, holders."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich.console import Console

from trainfit.api.later_text import show_later, show_savings
from trainfit.explanation.ledgers import Comparison, Entry
from trainfit.explanation.oom_text import OutOfMemoryText
from trainfit.explanation.peak import difference
from trainfit.ledger.allocator import segment_size
from trainfit.ledger.segments import rounded
from trainfit.report.console import bar, broken, can_draw, console, heading, rows
from trainfit.report.prediction_text import two_peaks
from trainfit.report.words import describe, holds_for
from trainfit.spec.explanation import (
    CommunicationBound,
    CurvePoint,
    Explanation,
    FailedRequest,
    Holder,
    Moment,
)
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CATEGORIES, MemoryBreakdown
from trainfit.spec.units import format_bytes, format_flops, format_seconds

CHART_ROWS = 8


def show(recipe: Recipe, explanation: Explanation, top: int, *, out: Console | None = None) -> None:
    """Print the peak, a chart of the step's memory, and what is alive by category and by holder."""
    out = out or console()
    out.print(describe(recipe), style="bold")
    each = " of one GPU" * (recipe.hardware.count > 1)
    out.print(f"Peak {format_bytes(explanation.peak_allocated_bytes)}{each}: {moment(explanation.moment)}")
    if explanation.two_peaks is not None:
        rows(out, two_peaks(explanation), "left", "wrap")
    if line := holds_for(explanation.versions):
        out.print(line)
    _chart(out, explanation)
    _categories(out, explanation)
    _modules(out, explanation, top)
    _holders(out, explanation, top)
    if explanation.communication is not None:
        _communication(out, explanation.communication, recipe.hardware.count)
    if explanation.savings is not None:
        show_savings(out, explanation.savings)
    if explanation.later is not None:
        show_later(out, explanation.later)
    missing = [
        option
        for option, found in (("--changes", explanation.savings), ("--later", explanation.later))
        if found is None
    ]
    if missing:
        words = {"--changes": "what each change would save", "--later": "what needs memory later in the run"}
        rows(out, [["; ".join(f"{option}: {words[option]}" for option in missing)]], "wrap")
    out.print()


def show_script(explanation: Explanation, top: int, *, out: Console | None = None) -> None:
    """Print the peak of a traced script, and what holds memory there."""
    out = out or console()
    out.print(f"{explanation.script}, on 1 x {explanation.gpu}", style="bold")
    out.print(f"Peak {format_bytes(explanation.peak_allocated_bytes)}: {moment(explanation.moment)}")
    if explanation.two_peaks is not None:
        rows(out, two_peaks(explanation), "left", "wrap")
    if line := holds_for(explanation.versions):
        out.print(line)
    _chart(out, explanation)
    _categories(out, explanation)
    _holders(out, explanation, top)
    out.print()


def moment(at: Moment) -> str:
    """Return the step, phase and operation of a moment."""
    where = f" of {at.module}" * bool(at.op and at.module) or at.module
    return f"{at.step} step, {at.phase}" + f", at {at.op}{where}" * bool(at.op or at.module)


def show_snapshot(explanation: Explanation, top: int, *, out: Console | None = None) -> None:
    """Print the peak of a memory snapshot, what held memory there, and what else would have fitted."""
    out, facts = out or console(), explanation.snapshot
    assert facts is not None
    out.print(f"{facts.file}: GPU {facts.device}, {facts.num_events:,} events", style="bold")
    out.print(f"Peak {format_bytes(explanation.peak_allocated_bytes)}: {moment(explanation.moment)}")
    notes = [[line] for line in snapshot_notes(explanation)]
    rows(out, notes, "wrap")
    _chart(out, explanation)
    _categories(out, explanation)
    _holders(out, explanation, top)
    out.print()


def snapshot_notes(explanation: Explanation) -> Iterator[str]:
    """Yield what a snapshot says beyond its peak: reserved bytes, a failed request, its remedies."""
    facts = explanation.snapshot
    assert facts is not None
    reserved, peak = facts.peak_reserved_bytes, explanation.peak_allocated_bytes
    unused = max(0, facts.reserved_at_peak_bytes - peak)
    yield f"reserved {format_bytes(reserved)} at most; {format_bytes(unused)} of it unused at the peak"
    if not facts.has_stacks:
        yield (
            "the history has no stacks, so nothing says who allocated or when a phase began: record it with "
            "_record_memory_history(stacks='python')"
        )
    saved = reserved - facts.expandable_reserved_bytes
    if facts.is_expandable:
        yield "expandable_segments:True was set"
        saved = 0
    gain = "would save " if saved > 0 else "would take "
    if saved:
        more = " more" * (saved < 0)
        yield f"expandable_segments:True {gain}{format_bytes(abs(saved))} of reserved memory{more}"
    if not facts.is_whole:
        yield (
            "the history begins late: what was there before has the place of its own allocation if that was "
            "recorded, and counts as weights otherwise"
        )
    if facts.failed is not None:
        yield from failure_notes(facts.failed, explanation.breakdown, is_expandable=facts.is_expandable)


def show_message(found: OutOfMemoryText) -> None:
    """Print what the message of an OutOfMemoryError says, and what would help."""
    out = console()
    rows(out, [[title, format_bytes(size)] for title, size in message_sizes(found)], "left", "right")
    out.print()
    rows(out, [[line] for line in message_advice(found)], "wrap")


def message_sizes(found: OutOfMemoryText) -> list[tuple[str, int]]:
    """Return what the message of an OutOfMemoryError says, in bytes by title."""
    every = (
        ("requested", found.requested), ("allocated by PyTorch", found.allocated),
        ("reserved and unused", found.cached), ("free on the GPU", found.free),
        ("the GPU", found.capacity), ("this process is allowed", found.allowed),
        ("another process", found.others),
    )  # fmt: skip
    return [(title, size) for title, size in every if size is not None]


def message_advice(found: OutOfMemoryText) -> Iterator[str]:
    """Yield a line on each thing that the message means, and what would help."""
    if found.allocated is None or found.reserved is None or found.room is None:
        yield "the message does not say how much PyTorch holds: the traceback of a newer PyTorch does"
        return
    if found.others:
        yield f"another process holds {format_bytes(found.others)} of this GPU: end it, or choose another GPU"
    request = FailedRequest(
        num_bytes=found.requested,
        allocated_bytes=found.allocated,
        reserved_bytes=max(found.reserved, found.allocated),
        free_bytes=found.room,
    )
    yield from list(failure_notes(request))[1:]
    if request.missing_bytes:
        yield "who holds it: torch.cuda.memory._record_memory_history(), then explain the snapshot"


def failure_notes(
    failed: FailedRequest, alive: MemoryBreakdown | None = None, *, is_expandable: bool = False
) -> Iterator[str]:
    """Yield what a failed request lacked, and what would give it.

    Args:
        alive: what held memory, if that is known.
        is_expandable: ``expandable_segments:True`` was set.
    """
    requested, cached = format_bytes(failed.num_bytes), failed.reserved_bytes - failed.allocated_bytes
    yield (
        f"failed: a request of {requested}, with {format_bytes(failed.allocated_bytes)} in use, "
        f"{format_bytes(cached)} reserved and unused, {format_bytes(failed.free_bytes)} free on the device"
    )
    if failed.free_bytes >= segment_size(rounded(failed.num_bytes)):
        yield (
            "the device had room for it: a limit of the process stopped it "
            "(torch.cuda.set_per_process_memory_fraction)"
        )
        return
    if not failed.missing_bytes:
        joins = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins them, and " * (not is_expandable)
        yield (
            f"enough was there, in pieces: {joins}"
            "torch.cuda.empty_cache() before it gives back whole segments"
        )
        return
    yield f"missing: {format_bytes(failed.missing_bytes)}"
    if alive is None:
        return
    grows = alive.activations + alive.temporary
    if grows > failed.missing_bytes:
        share = 1 - failed.missing_bytes / (grows + failed.num_bytes)
        yield f"a batch of {share:.0%} of the tokens fits, if activations and temporaries grow with it"
    remedies = {
        "activations": "recomputation of activations (gradient checkpointing) saves most of them",
        "optimizer": "8-bit AdamW holds a quarter of fp32 moments; sharding divides them",
        "gradients": "an update in the backward frees them one by one; sharding divides them",
        "weights": "sharding divides them; a quantised base with LoRA holds a quarter",
    }
    for name in sorted(remedies, key=lambda name: -getattr(alive, name)):
        size = getattr(alive, name)
        if size >= failed.missing_bytes / 2:
            yield f"{name} {format_bytes(size)}: {remedies[name]}"


def _chart(out: Console, explanation: Explanation) -> None:
    """Draw the step's allocated bytes: columns of equally many allocations, rows of 1/8 of the peak."""
    heading(out, f"Allocated through the {explanation.moment.step} step (not to scale of time)")
    highest = max((point.alive.total for point in explanation.curve), default=0)
    if not highest:
        return
    label = len(format_bytes(highest))
    points = _fitted(explanation.curve, out.width - label - 3)
    heights = [point.alive.total / highest * CHART_ROWS for point in points]
    for row in range(CHART_ROWS, 0, -1):
        named = format_bytes(highest * row / CHART_ROWS) if row in (CHART_ROWS, CHART_ROWS // 2) else ""
        line = "".join(_cell(height - row + 1, blocks=can_draw(out)) for height in heights)
        out.file.write(f"  {named:>{label}} {line.rstrip()}\n")
    out.file.write(f"  {'':>{label}} {_phase_line([point.phase for point in points])}\n")


def _fitted(curve: Sequence[CurvePoint], columns: int) -> Sequence[CurvePoint]:
    """Return the highest point of each of at most ``columns`` equal stretches."""
    size = -(-len(curve) // max(1, columns))
    stretches = [curve[at : at + size] for at in range(0, len(curve), size)]
    return [max(stretch, key=lambda point: point.alive.total) for stretch in stretches]


def _cell(filled: float, *, blocks: bool) -> str:
    """Return one character of a column that is ``filled`` (0 to 1) below the curve."""
    if not blocks:
        return "#" if filled >= 0.5 else " "
    return " ▁▂▃▄▅▆▇█"[max(0, min(8, round(filled * 8)))]


def _phase_line(phases: Sequence[str]) -> str:
    """Return the line below the chart: each phase's name where it begins, cut to its width."""
    lengths = [(phase, len(list(group))) for phase, group in groupby(phases)]
    return "".join(f"|{phase}"[:length].ljust(length) for phase, length in lengths).rstrip()


def _categories(out: Console, explanation: Explanation) -> None:
    heading(out, "Alive at the peak")
    width, blocks = max(0, min(40, out.width - 40)), can_draw(out)
    lines = []
    for name in CATEGORIES:
        if size := getattr(explanation.breakdown, name):
            share = size / explanation.peak_allocated_bytes
            lines.append([name, format_bytes(size), f"{share:.1%}", bar(share, width, blocks=blocks)])
    rows(out, lines, "left", "right", "right", "left")


def _modules(out: Console, explanation: Explanation, top: int) -> None:
    """Print bytes by module and category."""
    heading(out, "By module and category (equal layers together)")
    found: dict[str, dict[str, int]] = {}
    for one in explanation.holders:
        row = found.setdefault(_module_of(one), {})
        row[one.category] = row.get(one.category, 0) + one.num_bytes
    used = [name for name in CATEGORIES if any(name in row for row in found.values())]
    ranked = sorted(found.items(), key=lambda item: -sum(item[1].values()))
    shown, rest = ranked[: max(4, top // 2)], ranked[max(4, top // 2) :]
    if rest:
        others = {name: sum(row.get(name, 0) for _, row in rest) for name in used}
        shown.append((f"{len(rest)} more", others))
    lines = [["module", *(name[:11] for name in used), "all"]]
    for module, row in shown:
        sizes = [format_bytes(row[name]) if row.get(name) else "" for name in used]
        lines.append([broken(module, 34), *sizes, format_bytes(sum(row.values()))])
    widths = [max(map(len, "\n".join(column).splitlines())) for column in zip(*lines, strict=True)]
    if sum(widths) + 2 * len(widths) > out.width:  # Figures must not be cut: a list in place of columns.
        lines = [["module", "all", "of it"]]
        for module, row in shown:
            largest = sorted(row.items(), key=lambda item: -item[1])
            parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
            lines.append([broken(module, 34), format_bytes(sum(row.values())), parts])
        rows(out, lines, "left", "right", "wrap")
        return
    rows(out, lines, "left", *(["right"] * (len(used) + 1)))


def _module_of(holder: Holder) -> str:
    """Return the module that a holder belongs to; of a parameter, the one that has it."""
    path = holder.path
    if holder.category in ("weights", "optimizer") and "." in path:
        path = path.rpartition(".")[0]
    return path or "no module"


def _holders(out: Console, explanation: Explanation, top: int) -> None:
    heading(out, "Who holds it (equal layers together)")
    lines = [
        [format_bytes(one.num_bytes), str(one.count), one.category, what(one.path, one.op),
         made_in(one.made_in)]
        for one in explanation.holders[:top]
    ]  # fmt: skip
    rest = explanation.holders[top:]
    if rest:
        lines.append([format_bytes(sum(one.num_bytes for one in rest)), "", "", f"{len(rest)} more", ""])
    if explanation.unsplit_bytes:
        unsplit = format_bytes(explanation.unsplit_bytes)
        lines.append([unsplit, "", "", "ends of blocks that are not split", ""])
    _named_rows(out, [["bytes", "number", "category", "what", "made in"], *lines], "right", "right")


def _communication(out: Console, found: CommunicationBound, num_gpus: int) -> None:
    heading(out, "Computation and communication of one GPU in a steady step")
    lines = [["", "computes", "communicates", "exposed", "compute-bound from"]]
    for one in found.phases:
        seconds = map(format_seconds, (one.compute_s, one.communication_s, one.exposed_s))
        lines.append([one.phase, *seconds, _from(one.compute_bound_tokens, num_gpus)])
    rows(out, lines, "left", "right", "right", "right", "right")
    bound = "Communication-bound" if found.is_bound else "Compute-bound"
    smallest = "compute-bound at every batch"
    if found.compute_bound_tokens is None:
        smallest = "communication, or the host, takes longer at every batch"
    elif found.compute_bound_tokens:
        smallest = f"compute-bound from {_from(found.compute_bound_tokens, num_gpus)}"
        smallest += f", {math.ceil(found.compute_bound_tokens):,} in all"
    rows(out, [[f"{bound} at {found.tokens / num_gpus:,.0f} tokens a GPU; {smallest}"]], "wrap")


def _from(tokens: float | None, num_gpus: int) -> str:
    if not tokens:
        return "no batch" if tokens is None else "any batch"
    return f"{math.ceil(tokens / num_gpus):,} tokens a GPU"


def _named_rows(out: Console, lines: list[list[str]], *numbers: str) -> None:
    """Print rows of ``numbers``, a category, a name and where it was made; long names break at their dots."""
    name = len(numbers) + 1
    others = [index for index in range(len(lines[0])) if index != name]
    taken = sum(2 + max(len(line[index]) for line in lines) for index in others)
    room = out.width - taken - 4
    shown = [[*line[:name], broken(line[name], room), *line[name + 1 :]] for line in lines]
    rows(out, shown, *numbers, "left", "wrap", "left")


def made_in(step_and_phase: str) -> str:
    """Return the phase, with the step unless it is the steady one."""
    return step_and_phase.removeprefix("steady.").replace(".", " ")


def what(path: str, op: str) -> str:
    """Return a holder's path and operation."""
    return f"{path} {op}".strip() or "-"


def show_difference(first: Explanation, second: Explanation, top: int, *, out: Console | None = None) -> None:
    """Print the bytes of the second minus the first's, each at its own peak."""
    out = out or console()
    heading(out, "The second's peak minus the first's")
    lines = [["peak", signed(second.peak_allocated_bytes - first.peak_allocated_bytes)]]
    for name in CATEGORIES:
        if more := getattr(second.breakdown, name) - getattr(first.breakdown, name):
            lines.append([name, signed(more)])
    rows(out, lines, "left", "right")
    if (first.snapshot is None) is not (second.snapshot is None):
        return  # A snapshot names lines of code, a recipe modules.
    changes = difference(first, second)[:top]
    if changes:
        heading(out, "By holder, the largest changes")
        lines = [
            [signed(one.num_bytes), one.category, what(one.path, one.op), made_in(one.made_in)]
            for one in changes
        ]
        _named_rows(out, lines, "right")


def show_ledgers(found: Comparison, top: int) -> None:
    """Print the totals of two ledgers, then the operations and allocations that differ."""
    out = console()
    lines = [["", "first", "second", "change"]]
    for one in found.totals:
        change = one.second - one.first
        cells = [_amount(one.name, value) for value in (one.first, one.second)]
        sign = "-" if change < 0 else "+"
        lines.append([one.name, *cells, f"{sign}{_amount(one.name, abs(change))}" if change else ""])
    rows(out, lines, "left", "right", "right", "right")
    if not found.ops and not found.allocations:
        out.print("\nEqual in every operation and allocation")
    _unlike(out, "Operations that differ in number", found.ops, top, lambda value: f"{value:,.0f}")
    _unlike(
        out, "Allocations that differ in bytes", found.allocations, top, lambda value: format_bytes(value)
    )


def _amount(name: str, value: float) -> str:
    if name.startswith("peak") or "bytes" in name:
        return format_bytes(int(value))
    return format_flops(value) if "FLOPs" in name else f"{value:,.0f}"


def _unlike(
    out: Console, title: str, entries: Sequence[Entry], top: int, shown: Callable[[float], str]
) -> None:
    if not entries:
        return
    heading(out, title)
    lines = [["first", "second", "phase", "what"]]
    for one in entries[:top]:
        lines.append([shown(one.first), shown(one.second), one.phase, what(one.module, one.name)])
    rows(out, lines, "right", "right", "left", "wrap")
    if len(entries) > top:
        out.print(f"  {len(entries) - top} more: --top")


def signed(num_bytes: int) -> str:
    """Return bytes with their sign."""
    return f"{'-' if num_bytes < 0 else '+'}{format_bytes(abs(num_bytes))}"
