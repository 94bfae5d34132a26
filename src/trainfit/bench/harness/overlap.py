"""When a profiled step computes and communicates, and what it sends, from the profiler's trace.

On a GPU communication is NCCL's kernels and computation every other kernel, copy and fill; on a CPU gloo's
operations and PyTorch's. A kernel of NCCL also waits for the other ranks, and that time counts.
"""

import gzip
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import profile

from trainfit.bench.harness.profiled_trace import ON_GPU
from trainfit.bench.harness.profiling import PHASE
from trainfit.spec.bench import Curve

Interval = tuple[float, float]
COMPUTE, COMMUNICATION = "compute", "communication"
FULL = 1000  # A column of a timeline's curve that is busy throughout
OPERATIONS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "broadcast": "broadcast",
}
"""Part of the name of a ``c10d`` operator -> collective."""
DISPATCHER = "c10d::"


@dataclass(frozen=True)
class Timeline:
    """Seconds from the step's begin at which the device computes and communicates, merged and sorted."""

    compute: tuple[Interval, ...]
    communication: tuple[Interval, ...]
    phases: tuple[tuple[float, str], ...]  # (begin, name) of each phase

    @property
    def end(self) -> float:
        """End of the last interval."""
        return max((end for _, end in (*self.compute, *self.communication)), default=0.0)

    @property
    def communication_s(self) -> float:
        return total(self.communication)

    @property
    def hidden_s(self) -> float:
        """Communication during computation."""
        return common(self.compute, self.communication)

    def curve(self, num_points: int) -> Curve:
        """Return how busy each equal part of the step is, in thousandths."""
        width = self.end / num_points
        columns = {
            name: tuple(round(FULL * busy / width) for busy in _in_parts(intervals, width, num_points))
            for name, intervals in ((COMPUTE, self.compute), (COMMUNICATION, self.communication))
        }
        begins = sorted(self.phases)
        phases = tuple(
            next((name for begin, name in reversed(begins) if begin <= index * width), "forward")
            for index in range(num_points)
        )
        return Curve(phases=phases, columns=columns)


@dataclass(frozen=True)
class Traffic:
    """Calls of one collective in a step, and the elements of the tensors that each rank passes whole."""

    calls: int
    elements: int


def events_of(seen: profile, gzipped: bool) -> tuple[list[dict[str, Any]], bytes]:
    """Return the events of a profile's trace, and with ``gzipped`` its file."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        text = path.read_bytes()
    return json.loads(text)["traceEvents"], gzip.compress(text, 5) if gzipped else b""


def timeline(events: Iterable[dict[str, Any]]) -> Timeline:
    """Return the timeline of a trace with a range for each phase."""
    events = [event for event in events if event.get("ph") == "X"]
    on_gpu = any(event.get("cat") in ON_GPU for event in events)
    ranges = "gpu_user_annotation" if on_gpu else "user_annotation"
    phases: list[tuple[float, str]] = []
    for event in events:
        if event.get("cat") == ranges and event["name"].startswith(PHASE):
            name = event["name"].removeprefix(PHASE)
            phases.append((event["ts"], name))
            if on_gpu and name == "forward":  # Another thread launches the backward, outside of its range.
                phases.append((event["ts"] + event["dur"], "backward"))
    compute, communication = [], []
    for event in events:
        interval = (event["ts"], event["ts"] + event["dur"])
        if on_gpu and event.get("cat") in ON_GPU:
            (communication if event["name"].startswith("nccl") else compute).append(interval)
        elif not on_gpu and event["name"].startswith("gloo:"):
            communication.append(interval)
        elif not on_gpu and event["name"].startswith("aten::"):
            compute.append(interval)
    begin = min((at for at, _ in (*compute, *communication)), default=0.0)

    def seconds(intervals: list[Interval]) -> tuple[Interval, ...]:
        return merged([((low - begin) / 1e6, (high - begin) / 1e6) for low, high in intervals])

    known = tuple(((at - begin) / 1e6, name) for at, name in phases)
    return Timeline(seconds(compute), seconds(communication), known)


def traffic(events: Iterable[dict[str, Any]]) -> dict[str, Traffic]:
    """Return what the trace's collectives were called with, from a profile with shapes.

    The elements are of the larger side: of an all-gather's output and a reduce-scatter's input.
    """
    found: dict[str, Traffic] = {}
    for event in events:
        operator = event.get("name", "")
        if not operator.startswith(DISPATCHER) or "Input Dims" not in event.get("args", {}):
            continue
        name = next((name for part, name in OPERATIONS.items() if part in operator), None)
        if name is not None:
            before = found.get(name, Traffic(0, 0))
            elements = max(_elements(dims) for dims in event["args"]["Input Dims"])
            found[name] = Traffic(before.calls + 1, before.elements + elements)
    return found


def _elements(dims: Any) -> int:
    """Return the elements of a tensor's shape, or of a list of shapes; 0 of what is neither."""
    if not dims:
        return 0
    return sum(map(_elements, dims)) if isinstance(dims[0], list) else math.prod(dims)


def merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the union as sorted intervals that do not touch."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return tuple(found)


def _in_parts(intervals: Iterable[Interval], width: float, num_parts: int) -> list[float]:
    """Return the length of merged intervals inside each part of ``width``."""
    lengths = [0.0] * num_parts
    for begin, end in intervals:
        for part in range(int(begin / width), min(num_parts, int(end / width) + 1)):
            lengths[part] += max(0.0, min(end, (part + 1) * width) - max(begin, part * width))
    return lengths


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of merged intervals."""
    return sum(end - begin for begin, end in intervals)


def common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return the length of the intersection of two lists of merged intervals."""
    length, first, second = 0.0, 0, 0
    while first < len(one) and second < len(other):
        begin = max(one[first][0], other[second][0])
        end = min(one[first][1], other[second][1])
        length += max(0.0, end - begin)
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return length
