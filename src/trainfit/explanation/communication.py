"""When a recipe of several GPUs is bound by communication, from its ledger.

A phase is compute-bound where its operations take at least as long as its collectives, and as its host to
issue them. Each operation and collective has a size that is linear in the batch, drawn through the recipe's
step and one of twice its micro-batch; its time is the prediction's for that size. The optimizer's collectives
are left out, which no larger batch hides.
"""

from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from trainfit.ledger.ledger import Collective, Ledger, Op
from trainfit.prediction import communication
from trainfit.prediction.machine import Machine
from trainfit.prediction.predict import ledger_of
from trainfit.prediction.time.device_time import op_s
from trainfit.prediction.time.host_time import Issue, collective_issue_s
from trainfit.prediction.time.roofline import step_times
from trainfit.spec.explanation import CommunicationBound, PhaseCommunication
from trainfit.spec.recipe import Recipe
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS

Entry = TypeVar("Entry", Op, Collective)
PHASES: tuple[str, ...] = ("forward", "backward")
MOST_DOUBLINGS = 12
"""Of the micro-batch, until a phase that still is not compute-bound counts as one that never is."""


def communication_bound(recipe: Recipe, machine: Machine, ledger: Ledger) -> CommunicationBound | None:
    """Return the smallest compute-bound batch of the recipe; None without collectives or known rates.

    Also None for a pipeline, whose GPU's ledger has its micro-batches but not their time.
    """
    if recipe.mesh.pipeline > 1:
        return None
    gpu = machine.gpu
    if not ledger.collectives or gpu.memory_bytes_per_s is None or not gpu.peak_flops_per_s:
        return None
    micro = recipe.batch.micro
    batch = recipe.batch.model_copy(update={"micro": 2 * micro})
    twice = ledger_of(recipe.model_copy(update={"batch": batch}), machine)
    times = step_times(ledger, machine)
    tokens = recipe.step_tokens
    phases = list[PhaseCommunication]()
    for name in PHASES:
        phase = _Phase(ledger, twice, name, machine)
        here = phase.at(1.0)
        if not here.moved_s:
            continue
        exposed = (each.get(at, 0.0) for each in (times.exposed_s, times.slowed_s) for at in phase.segments)
        smallest = _smallest(micro, lambda some, phase=phase: phase.at(some / micro).is_compute_bound)
        phases.append(
            PhaseCommunication(
                phase=name,
                compute_s=here.compute_s,
                communication_s=here.moved_s,
                exposed_s=sum(exposed),
                compute_bound_tokens=None if smallest is None else smallest * tokens / micro,
            )
        )
    least = [one.compute_bound_tokens for one in phases]
    return CommunicationBound(
        tokens=tokens,
        phases=tuple(phases),
        compute_bound_tokens=None if None in least else max((one for one in least if one), default=0.0),
    )


def _smallest(micro: int, is_compute_bound: Callable[[int], bool]) -> int | None:
    """Return the smallest compute-bound micro-batch, 0 if one sample is enough; None: there is none."""
    low, high = 0, micro
    for _ in range(MOST_DOUBLINGS):
        if is_compute_bound(high):
            break
        low, high = high, 2 * high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_compute_bound(middle) else (middle, high)
    return 0 if high == 1 else high


class Times(NamedTuple):
    """Seconds of a phase's operations, of its collectives, and of its host."""

    compute_s: float
    moved_s: float
    issued_s: float

    @property
    def is_compute_bound(self) -> bool:
        return self.compute_s >= max(self.moved_s, self.issued_s)


class _Phase:
    """Operations and collectives of one phase of the steady step, with a batch and with twice as much."""

    def __init__(self, once: Ledger, twice: Ledger, name: str, machine: Machine):
        self.ledger, self.machine, host = once, machine, machine.known.rates.host
        self.segments, issue = _segments(once, name), Issue(once, host)
        issued = [op for op in once.ops if op.segment in self.segments]
        collectives = [one for one in once.collectives if one.segment in self.segments]
        issue = Issue(once, host)
        self.issued_s = sum(once.times(op) * issue.seconds(op) for op in issued)
        self.issued_s += sum(once.times(one) * collective_issue_s(one, host) for one in collectives)
        of_twice = _segments(twice, name)
        self.ops = _pairs(issued, (op for op in twice.ops if op.segment in of_twice))
        self.collectives = _pairs(collectives, (one for one in twice.collectives if one.segment in of_twice))

    def at(self, size: float) -> Times:
        """Return the times with a batch of a size, that of the recipe being 1."""
        compute_s = moved_s = 0.0
        for pair in self.ops:
            op, number = _sized(pair, size)
            if op.name not in COPY_DIRECTIONS:
                compute_s += number * self.ledger.times(op) * op_s(op, self.machine)
        for pair in self.collectives:
            one, number = _sized(pair, size)
            moved_s += number * self.ledger.times(one) * communication.collective_s(one, self.machine.gpu)
        return Times(compute_s, moved_s, self.issued_s)


def _segments(ledger: Ledger, phase: str) -> set[int]:
    return {at for at, one in enumerate(ledger.segments) if (one.step, one.phase) == ("steady", phase)}


def _pairs(once: Iterable[Entry], twice: Iterable[Entry]) -> list[tuple[Entry | None, Entry | None]]:
    """Return the entries of two batches that stand for the same call; None where one has more calls."""
    calls: dict[tuple[object, ...], tuple[list[Entry], list[Entry]]] = {}
    for number, entries in enumerate((once, twice)):
        for entry in entries:
            same = entry.name, entry.segment, entry.group, getattr(entry, "module", "")
            calls.setdefault(same, ([], []))[number].append(entry)
    return [pair for both in calls.values() for pair in zip_longest(*both)]


def _sized(pair: tuple[Entry | None, Entry | None], size: float) -> tuple[Entry, float]:
    """Return an entry at a size of the batch, and how often there is one."""
    once, twice = pair
    if once is None:
        assert twice is not None
        return twice, max(0.0, size - 1)
    if twice is None:
        return once, max(0.0, 2 - size)
    fields: dict[str, Any] = {"num_bytes": _line(once.num_bytes, twice.num_bytes, size)}
    if isinstance(once, Op) and isinstance(twice, Op):
        fields["causal_flops"] = _line(once.causal_flops, twice.causal_flops, size)
        lengths = zip(once.shape, twice.shape, strict=False)
        fields["shape"] = tuple(max(1, _line(*both, size)) for both in lengths)
    return once._replace(**fields), 1.0


def _line(once: float, twice: float, size: float) -> int:
    return max(0, round(once + (twice - once) * (size - 1)))
