"""A policy's loop as text: memory of its phases, time of its parts, and what would lower its peak."""

from collections.abc import Iterator, Sequence

from rich.console import Console

from trainfit.report.console import heading, rows
from trainfit.report.console import notes as bullets
from trainfit.report.table import percent
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CATEGORIES, Loop, LoopPart, LoopTime
from trainfit.spec.units import format_bytes, format_seconds

DASH = "-"


def show(out: Console, loop: Loop, recipe: Recipe | None) -> None:
    """Print a loop, predicted or measured."""
    heading(out, f"Loop: {loop.completions:,} completions, {loop.slots:,} at a time on a GPU")
    lines = list(_memory(loop))
    rows(out, lines, "left", *(["right"] * (len(lines[0]) - 1)))
    for time in filter(None, (loop.longest, loop.expected)):
        heading(out, f"Time of a loop: {time.lengths}")
        rows(out, _times(time), "left", *(["right"] * 8))
    if loop.recorded is not None and loop.expected is not None:
        heading(out, "The same rollouts as the run measured them, without its environment")
        rows(out, _phase_times(loop.expected, loop.recorded), "left", *(["right"] * 3))
    if loop.levers:
        heading(out, "What moving between phases would give")
        titles = ["", "during", "moved", "lower peak", "time a loop"]
        lines = [
            [
                one.moved,
                one.during,
                format_bytes(one.num_bytes),
                format_bytes(one.lower_bytes),
                _s(one.seconds),
            ]
            for one in loop.levers
        ]
        rows(out, [titles, *lines], "wrap", "left", "right", "right", "right")
    if recipe is not None:
        bullets(out, "Before the run", answers(loop, recipe))


def compared(out: Console, predicted: Loop, measured: Loop) -> None:
    """Print each phase's memory and each part's time, predicted and measured."""
    for title, lines in comparison(predicted, measured):
        heading(out, title)
        rows(out, lines, "left", *(["right"] * (len(lines[0]) - 1)))


def comparison(predicted: Loop, measured: Loop) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield titles, and lines of the phases' memory and of each time that both have, of equal lengths."""
    yield "Memory of each phase", _both_memories(predicted, measured)
    one, other = predicted.longest, measured.longest
    if one is not None and other is not None:
        yield f"Time of a loop: {other.lengths}", _both_times(one, other)
    one, other = predicted.expected, measured.expected
    if one is not None and other is not None and one.mean_new == other.mean_new:
        yield f"Time of a loop: {other.lengths}", _phase_times(one, other)


def _both_memories(predicted: Loop, measured: Loop) -> list[list[str]]:
    """Return two lines a phase: on a CPU, where nothing is reserved, one."""
    lines = [["phase", "predicted", "measured", "error"]]
    known = {one.phase: one for one in predicted.memory}
    for one in measured.memory:
        for name, what in (("peak_allocated_bytes", "allocated"), ("peak_reserved_bytes", "reserved")):
            was, is_ = getattr(known.get(one.phase), name, None), getattr(one, name)
            if what == "allocated" or measured.reserves:
                cells = [DASH if was is None else format_bytes(was), format_bytes(is_), _error(was, is_)]
                lines.append([f"{one.phase}, {what}", *cells])
    return lines


def _both_times(predicted: LoopTime, measured: LoopTime) -> list[list[str]]:
    """Return a line a part that both or one of them has, and the loop's."""
    one, other = ({part.name: part.seconds for part in side.parts} for side in (predicted, measured))
    both = [(name, one.get(name), other.get(name)) for name in {**one, **other}]
    return _time_lines("part", [*both, ("loop", predicted.seconds, measured.seconds)])


def _phase_times(predicted: LoopTime, measured: LoopTime) -> list[list[str]]:
    """Return a line a phase: a run's log does not divide a rollout into its parts."""
    one, other = predicted.by_phase(), measured.by_phase()
    both = [(name, one[name], other[name]) for name in one]
    return _time_lines("phase", [*both, ("loop", predicted.seconds, measured.seconds)])


def _time_lines(title: str, both: Sequence[tuple[str, float | None, float | None]]) -> list[list[str]]:
    lines = [[title, "predicted", "measured", "error"]]
    for name, was, is_ in both:
        cells = [DASH if value is None else format_seconds(value) for value in (was, is_)]
        lines.append([name, *cells, _error(was, is_)])
    return lines


def _error(predicted: float | None, measured: float | None) -> str:
    """Return predicted minus measured, over measured."""
    return percent(None if predicted is None or not measured else (predicted - measured) / measured)


def answers(loop: Loop, recipe: Recipe) -> list[str]:
    """Return lines on what fails most often in reinforcement learning: logits, cache, shards, lengths."""
    policy = recipe.objective
    assert isinstance(policy, Policy)
    memory = {one.phase: one for one in loop.memory}
    tokens = f"{recipe.batch.micro} x {recipe.batch.seq:,} tokens"
    found = [
        f"logits: those of {tokens} would take {format_bytes(loop.whole_logits_bytes)} in fp32; scoring and "
        "update compute them in chunks, and no phase holds them",
        f"cache of keys and values: {format_bytes(loop.cache_bytes)}, allocated once and kept between "
        "rollouts; it is in every phase's peak above",
    ]
    rollout, update = memory.get("rollout"), memory.get("update")
    if (
        recipe.hardware.count > 1
        and recipe.mesh.shards_weights
        and rollout
        and update
        and rollout.breakdown
        and update.breakdown
    ):
        base = "the quantised base" if recipe.base is not None else "weights"
        found.append(
            f"shards: a GPU holds {format_bytes(update.breakdown.weights)} of {base} and what trains; a "
            f"rollout gathers them whole, {format_bytes(rollout.breakdown.communication)} more, and frees "
            "them before scoring"
        )
    found.append(
        f"longest sample: the peaks are those of {policy.max_prompt:,} tokens of prompt and "
        f"{policy.max_new:,} new ones in every sequence, so no later sample takes more"
    )
    return found


def _memory(loop: Loop) -> Iterator[list[str]]:
    """Yield a column for each phase: its bytes by category, and its peaks."""
    known = [one.breakdown for one in loop.memory]
    yield ["", *(one.phase for one in loop.memory)]
    for name in CATEGORIES:
        sizes = [0 if one is None else getattr(one, name) for one in known]
        if any(sizes):
            yield [name.replace("_", " "), *map(format_bytes, sizes)]
    yield ["peak allocated", *(format_bytes(one.peak_allocated_bytes) for one in loop.memory)]
    yield ["reserved", *(format_bytes(one.peak_reserved_bytes) for one in loop.memory)]
    devices = [one.peak_device_bytes for one in loop.memory]
    if any(devices):
        yield ["on the device", *(DASH if size is None else format_bytes(size) for size in devices)]


def _times(time: LoopTime) -> list[list[str]]:
    titles = ["part", "calls", "time", "share", "tokens/s", "MFU", "HFU", "busy", "memory"]
    lines = [_line(one, time) for one in time.parts]
    rate = DASH if time.new_tokens_per_s is None else f"{time.new_tokens_per_s:,.0f}"
    shares = [_share(one) for one in (time.mfu, time.hfu, time.busy, time.memory_access)]
    return [titles, *lines, ["loop", "", format_seconds(time.seconds), "", rate, *shares]]


def _line(one: LoopPart, time: LoopTime) -> list[str]:
    rate = f"{one.tokens_per_s:,.0f}" if one.tokens and one.tokens_per_s else DASH
    shares = [_share(value) for value in (one.mfu, one.hfu, one.busy, one.memory_access)]
    return [
        one.name, f"{one.calls:,}", format_seconds(one.seconds), f"{time.share(one):.1%}", rate, *shares,
    ]  # fmt: skip


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def _s(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "none"
