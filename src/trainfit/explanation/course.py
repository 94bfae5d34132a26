"""The course of memory through one step of a ledger: what is alive by category and holder, and when.

Moments are placed by the predicted time of the operation that allocates; where no speed is known, by the
number of allocations and frees so far.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from trainfit.explanation.peak import Explained, holder_name
from trainfit.ledger.ledger import ALLOCATE, Ledger, LiveEvent
from trainfit.ledger.segments import rounded
from trainfit.prediction.time.roofline import step_spans
from trainfit.prediction.time.timeline import Spans
from trainfit.spec.explanation import CourseMoment, MemoryCourse, PhaseSpan
from trainfit.spec.result import CATEGORIES, MemoryBreakdown

NUM_LARGEST = 6
"""Holders of a moment that are named."""


def event_places(ledger: Ledger, spans: Spans | None, step: str = "steady") -> list[tuple[float, LiveEvent]]:
    """Return each allocation and free of a step with its place: seconds, or its number.

    An allocation is placed where its operation begins, a free with the allocation before it.
    """
    inside = [one for one in ledger.expand() if ledger.segments[one.segment].step == step]
    if spans is None:
        return [(float(number), one) for number, one in enumerate(inside)]
    began: dict[int, list[float]] = defaultdict(list)
    first_of_segment: dict[int, float] = {}
    for span in spans.ops:
        began[span.index].append(span.began_s)
        first_of_segment.setdefault(ledger.ops[span.index].segment, span.began_s)
    found: list[tuple[float, LiveEvent]] = []
    now, segment, num_seen = 0.0, -1, Counter[int]()
    for one in inside:
        if one.segment != segment:
            segment = one.segment
            now = max(now, first_of_segment.get(segment, now))
        if one.kind == ALLOCATE:
            times = began.get(ledger.storages[one.storage].op)
            if times:
                now = max(now, times[min(num_seen[one.storage], len(times) - 1)])
            num_seen[one.storage] += 1
        found.append((now, one))
    return found


def course_of(ledger: Ledger, spans: Spans | None, step: str, num_moments: int) -> MemoryCourse:
    """Return the highest moment of each of ``num_moments`` equal stretches of a step.

    Args:
        spans: when operations run; None: their speed is not known, or the step is not the steady one.
    """
    placed = event_places(ledger, spans, step)
    ends = spans.step_s if spans is not None else float(len(placed))
    chosen = _highest(ledger, placed, ends / max(1, num_moments), step)
    return MemoryCourse(
        moments=tuple(_moments(ledger, placed, chosen, step)),
        phases=_phases(ledger, placed, ends),
        is_timed=spans is not None,
    )


def course_of_explained(found: Explained, num_moments: int) -> MemoryCourse:
    """Return the course of memory through the step that has the peak of an explanation."""
    step, machine = found.explanation.moment.step, found.machine
    is_fast = machine is not None and machine.gpu.memory_bytes_per_s and machine.gpu.peak_flops_per_s
    spans = step_spans(found.ledger, machine) if machine and is_fast and step == "steady" else None
    course = course_of(found.ledger, spans, step, num_moments)
    more = {"unsplit_bytes": found.explanation.unsplit_bytes, "capacity_bytes": found.capacity_bytes}
    return course.model_copy(update=more)


def _phases(ledger: Ledger, placed: Sequence[tuple[float, LiveEvent]], end: float) -> tuple[PhaseSpan, ...]:
    begins: list[tuple[str, float]] = []
    for at, one in placed:
        name = ledger.segments[one.segment].phase
        if not begins or begins[-1][0] != name:
            begins.append((name, at))
    ends = [at for _, at in begins[1:]] + [end]
    return tuple(
        PhaseSpan(name=name, begin=begin, end=until)
        for (name, begin), until in zip(begins, ends, strict=True)
    )


def _highest(
    ledger: Ledger, placed: Sequence[tuple[float, LiveEvent]], size: float, step: str
) -> frozenset[int]:
    """Return the number of the event with the highest sum in each stretch of ``size``."""
    total = sum(_change(one) for one in _before(ledger, step))
    best: dict[int, tuple[int, int]] = {}
    for number, (at, one) in enumerate(placed):
        total += _change(one)
        stretch = int(at / size) if size else 0
        if stretch not in best or total > best[stretch][0]:
            best[stretch] = total, number
    return frozenset(number for _, number in best.values())


def _moments(
    ledger: Ledger, placed: Sequence[tuple[float, LiveEvent]], chosen: frozenset[int], step: str
) -> Iterator[CourseMoment]:
    alive, holders = dict.fromkeys(CATEGORIES, 0), Counter[tuple[str, ...]]()
    names = [holder_name(ledger, storage) for storage in ledger.storages]

    def apply(one: LiveEvent) -> None:
        change = _change(one)
        alive[one.category] += change
        holders[names[one.storage]] += change

    for one in _before(ledger, step):
        apply(one)
    for number, (at, one) in enumerate(placed):
        apply(one)
        if number in chosen:
            phase = ledger.segments[one.segment].phase
            largest = heapq.nlargest(NUM_LARGEST, holders.items(), key=lambda item: item[1])
            named = tuple((_text(name), num_bytes) for name, num_bytes in largest if num_bytes)
            yield CourseMoment(at=at, phase=phase, alive=MemoryBreakdown(**alive), largest=named)


def _before(ledger: Ledger, step: str) -> Iterator[LiveEvent]:
    """Yield the events before the first one of a step."""
    for one in ledger.expand():
        if ledger.segments[one.segment].step == step:
            return
        yield one


def _change(one: LiveEvent) -> int:
    return rounded(one.num_bytes) * (1 if one.kind == ALLOCATE else -1)


def _text(name: tuple[str, ...]) -> str:
    category, path, op, _ = name
    return f"{category}: {f'{path} {op}'.strip()}"
