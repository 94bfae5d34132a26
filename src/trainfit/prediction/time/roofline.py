"""Time of a step from its ledger: a lower bound, and the expected time with its parts. No torch here.

The expected time is a replay of the host, the GPU and its collectives (timeline.py), with the seconds of each
operation on the GPU (device_time.py) and on the host (host_time.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from trainfit.catalog.constants import constants
from trainfit.catalog.load import link, transfers
from trainfit.catalog.operation_kinds import operation_kinds
from trainfit.catalog.rates import Band, TensorShares, rates
from trainfit.ledger.ledger import Ledger, Op
from trainfit.prediction import communication
from trainfit.prediction.machine import Machine
from trainfit.prediction.time.device_time import least_s, op_s, part_of, roofline_kind
from trainfit.prediction.time.host_time import collective_issue_s, counts_python, issue_of, loop_issue_s
from trainfit.prediction.time.power_limit import shares_of, slow_down
from trainfit.prediction.time.timeline import Host, Overlap, Spans, Times, replay, spans
from trainfit.spec.hardware import Gpu
from trainfit.spec.result import StepTime
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS

T = TypeVar("T")
HOST_BOUND = 0.1
"""Share of a step that the GPU waits for the host, from which the host decides the step."""
LEAST_SAID = 0.01
"""Share of the GPU's time from which a kind of operations that was not timed is listed."""


@dataclass(frozen=True)
class Roofline:
    """Seconds of one steady step on one GPU."""

    expected: StepTime
    lowest_s: float
    """The longest of operations, copies and collectives at the data sheets' rates, the host infinitely fast:
    no run is faster."""

    @property
    def waits(self) -> bool:
        """Whether the host decides the step."""
        return self.expected.host_s > HOST_BOUND * self.expected.total

    def band(self, *, compiled: bool, several_gpus: bool = False, own_host: bool = False) -> Band:
        """Return the measured over the expected time of most steps of this kind.

        Args:
            own_host: the host was calibrated; else its work may take that of the slowest known host.
        """
        known = rates()
        if self.waits and own_host:
            return known.own_host
        if several_gpus:
            band = known.several_gpus
        elif compiled:
            band = known.compiled_host_bound if self.waits else known.compiled_device_bound
        else:
            band = known.host_bound if self.waits else known.device_bound
        return band if own_host else band.model_copy(update={"high": band.high * self.on_slowest_host})

    def script_range(self) -> tuple[float, float]:
        """Return the seconds between which a traced script's step should lie.

        The GPU's own work and the host's have ranges of their own; the larger decides each end, lengthened
        by what the step takes beyond both, as where each waits for the other in turn.
        """
        known, step = rates(), self.expected
        busy_s = step.total - step.host_s
        beyond = step.total / max(busy_s, step.issue_s)
        low = max(known.device_bound.low * busy_s, known.script_host.low * step.issue_s)
        high = max(known.device_bound.high * busy_s, known.script_host.high * step.issue_s)
        return max(self.lowest_s, low * beyond), high * beyond

    @property
    def on_slowest_host(self) -> float:
        """How much longer the step is on the slowest host of the catalog's constants, at least."""
        total, slowest = self.expected.total, constants().host.slowest
        slow_s = max(total + (slowest - 1) * self.expected.host_s, slowest * self.expected.issue_s)
        return slow_s / total if total else 1.0


def roofline(ledger: Ledger, machine: Machine, *, in_graph: bool = False) -> Roofline | None:
    """Time of the steady step; None where the GPU's rates are not known.

    Args:
        in_graph: the host launches the whole step at once, as a CUDA graph.
    """
    gpu = machine.gpu
    if gpu.memory_bytes_per_s is None or not gpu.peak_flops_per_s:
        return None
    parts = dict.fromkeys(("products", "attention", "memory", "optimizer"), 0.0)
    least = 0.0
    copies_s = {"in": 0.0, "out": 0.0}
    issue = _issue_s(ledger, machine)
    if in_graph:
        first = next(iter(issue), None)
        issue = {entry: machine.known.rates.host.graph * (entry == first) for entry in issue}
    device = _device_s(ledger, machine, issue)
    if in_graph:
        sooner_s = machine.known.rates.kernel_s - machine.known.rates.kernel_in_graph_s
        device |= {
            id(op): max(0.0, device[id(op)] - op.calls * sooner_s)
            for op in ledger.steady_ops
            if id(op) in device
        }
    for op in ledger.steady_ops:
        segment, times = ledger.segments[op.segment], ledger.times(op)
        if op.name in COPY_DIRECTIONS:
            copies_s[COPY_DIRECTIONS[op.name]] += times * copy_seconds(op, gpu)
            continue
        if segment.phase == "data":
            continue
        least += times * max(least_s(op, gpu))
        is_update = op.is_update or segment.phase == "optimizer"
        parts["optimizer" if is_update else part_of(op)] += times * device[id(op)]
    found = _replayed(ledger, machine, device, issue, replay)
    waited_s = sum(found.exposed_s.values())
    copied_s = max(copies_s.values()) * transfers(gpu).host_copies
    lowest_s = max(least, copied_s, communication.lowest_s(ledger, gpu))
    expected = StepTime(
        matmul_s=parts["products"] + parts["attention"],
        memory_s=parts["memory"] + parts["optimizer"],
        host_s=found.idle_s,
        communication_s=found.copies_s + waited_s + sum(found.slowed_s.values()),
        hidden_communication_s=max(0.0, round(communication.all_s(ledger, gpu) - waited_s, 12)),
        attention_s=parts["attention"],
        optimizer_s=parts["optimizer"],
        issue_s=found.issue_s,
    )
    return Roofline(expected, lowest_s)


def step_times(ledger: Ledger, machine: Machine) -> Times:
    """Replay the steady step; the GPU's rates are known."""
    issue = _issue_s(ledger, machine)
    return _replayed(ledger, machine, _device_s(ledger, machine, issue), issue, replay)


def step_spans(ledger: Ledger, machine: Machine) -> Spans:
    """Return when each entry of the steady step runs; the GPU's rates are known."""
    issue = _issue_s(ledger, machine)
    return _replayed(ledger, machine, _device_s(ledger, machine, issue), issue, spans)


def device_seconds(ledger: Ledger, machine: Machine) -> dict[int, float]:
    """Return the seconds on the GPU of each entry of the steady step but copies, by its ``id``."""
    return _device_s(ledger, machine, _issue_s(ledger, machine))


def tensor_shares(ledger: Ledger, machine: Machine) -> TensorShares:
    """Return how much of the steady step tensor cores are busy, as a step without CUDA graphs.

    For fits of the power limit's rates. The GPU's rates are known.
    """
    return shares_of(ledger, _full_clocks_s(ledger, machine), _issue_s(ledger, machine))


def without_rows(ledger: Ledger, machine: Machine) -> tuple[str, ...]:
    """Return the kinds of the steady step's operations that no calibrated row is of, as an assumption.

    Attention has its own (attention_time.py). Kinds that take less than ``LEAST_SAID`` of the GPU's time are
    not listed.
    """
    times, seconds = machine.known.times, device_seconds(ledger, machine)
    total_s, by_kind = 0.0, dict[str, float]()
    for op in ledger.steady_ops:
        taken_s = ledger.times(op) * seconds.get(id(op), 0.0)
        total_s += taken_s
        if taken_s and not op.kernel and (op.num_bytes or op.causal_flops) and not times.has(op):
            kind = roofline_kind(op)
            by_kind[kind] = by_kind.get(kind, 0.0) + taken_s
    kinds = sorted(
        (one for one in by_kind if by_kind[one] >= LEAST_SAID * total_s), key=lambda one: -by_kind[one]
    )
    if not kinds:
        return ()
    rows = operation_kinds()
    rooflines = [
        f"{one.replace('-', ' ')} {by_kind[one] / total_s:.0%} of the GPU's time "
        f"({rows[one].compute:.0%} of the peak, {rows[one].memory / rows[one].passes:.0%} of the bandwidth)"
        for one in kinds
    ]
    return (f"step time: operations of kinds that were not timed take rooflines: {', '.join(rooflines)}",)


def _device_s(ledger: Ledger, machine: Machine, issue: dict[int, float]) -> dict[int, float]:
    """Return the seconds on the GPU of each entry of the steady step, by its ``id``."""
    seconds = _full_clocks_s(ledger, machine)
    slow_down(ledger, machine, seconds, issue)
    return seconds


def _full_clocks_s(ledger: Ledger, machine: Machine) -> dict[int, float]:
    """Return the seconds on the GPU of each entry, were its clocks never lowered.

    An operation on lists of several groups' tensors is one call: its entries share that call's seconds.
    """
    calls = list[list[Op]]()
    for op in ledger.steady_ops:
        if op.name in COPY_DIRECTIONS:
            continue
        if not op.calls and calls and op.name == calls[-1][0].name:
            calls[-1].append(op)
        else:
            calls.append([op])
    seconds = dict[int, float]()
    for first, *others in calls:
        taken_s = None
        if others:
            num_bytes = sum(ledger.times(op) * op.num_bytes for op in (first, *others))
            taken_s = op_s(first._replace(num_bytes=num_bytes), machine) / num_bytes if num_bytes else None
        for op in (first, *others):
            seconds[id(op)] = op_s(op, machine) if taken_s is None else op.num_bytes * taken_s
    return seconds


def _issue_s(ledger: Ledger, machine: Machine) -> dict[int, float]:
    """Return the seconds that the host needs for each entry, by its ``id``."""
    issue = issue_of(ledger, machine.known.rates.host)
    return {id(op): issue.seconds(op) for op in ledger.steady_ops}


def _replayed(
    ledger: Ledger,
    machine: Machine,
    device: dict[int, float],
    issue: dict[int, float],
    run: Callable[..., T],
) -> T:
    """Call ``timeline.replay`` or ``spans`` with the times of a machine."""
    gpu, host, overlap = machine.gpu, machine.known.rates.host, machine.known.rates.overlap
    is_script = counts_python(ledger)
    return run(
        ledger,
        lambda op: device[id(op)],
        lambda one: communication.collective_s(one, gpu),
        copy_s=lambda op: copy_seconds(op, gpu),
        host=Host(
            lambda op: issue[id(op)],
            host.read,
            host.launch,
            lambda one: collective_issue_s(one, host, counts_python=is_script),
            lambda op: loop_issue_s(op, host),
        ),
        overlap=Overlap(overlap.computation, overlap.collectives),
        load=lambda one: communication.load(one, gpu),
    )


def copy_bytes_per_s(gpu: Gpu) -> float:
    """Return the rate of copies between the GPU and pinned host memory, each way."""
    return link(gpu.host_link).bytes_per_s * transfers(gpu).host_copies


def copy_seconds(op: Op, gpu: Gpu) -> float:
    """Return the seconds of a copy between the GPU and pinned host memory."""
    return op.num_bytes / copy_bytes_per_s(gpu)
