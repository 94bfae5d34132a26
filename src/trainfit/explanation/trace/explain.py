"""The use of a GPU from a profiler's trace: busy, with what, and what it waits for.

The window is the marked steps (``profiler.step()``), on the GPU from the first kernel that they launch to the
last; without marks it is the whole trace. The GPU is idle between kernels. Each idle span ends with a kernel:
where it begins as soon as it is launched, nothing was queued, and the GPU has waited for the host.

    launch      |a |b       |c      |d|e
    GPU          [a   ][b]   [c]     [d] [e]
                          ...   .....        idle, waiting for the host
                                        .    idle between queued kernels
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainfit.catalog.load import gpu_of_device
from trainfit.explanation.trace.kernels import COMMUNICATION, COPIES, kind_of_kernel
from trainfit.explanation.trace.read import Spans, Trace
from trainfit.prediction.time.peaks import peak_flops_per_s
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.profile import PRODUCTS, KernelKind, Stretch, SyncPoint, TraceFacts, Utilisation

LATENCY_US = 20.0
"""A kernel that begins so soon after its launch was not queued. An idle span up to this between queued ones
is the GPU's own."""
SYNCS = ("Synchronize", "cudaMemcpy\0", "hipMemcpy\0")
WINDOWS = 400
"""Parts of the window that are searched for launch-bound stretches."""
LAUNCH_BOUND = 0.2
"""Share of a part that the GPU waits for the host, from which it is launch-bound."""
MOST_STRETCHES, MOST_SYNCS = 5, 8
FURTHEST_BACK = 400
"""Host operations that are searched for the one around a launch."""
Array = Any


class Given(NamedTuple):
    """A step's FLOPs that a recipe says, and the peak that they are compared with."""

    flops: float
    peak_flops_per_s: float | None
    dtype: str


class _Window(NamedTuple):
    begin: float
    end: float
    num_steps: int
    step_s: float | None


def explain_trace(
    trace: Trace, path: Path, device: int | None = None, given: Given | None = None, gpu: Gpu | None = None
) -> TraceFacts:
    """Return the use of one GPU in a trace.

    Args:
        device: its number; None: the one with the most kernels.
        given: FLOPs of a step; None: those of the matrix products whose shapes were recorded.
        gpu: the GPU; None: the one that the trace names.

    Raises:
        InputError: no kernels in it.
    """
    chosen = _device(trace, device, path)
    kernels = trace.kernels[chosen]
    begins, durations = (np.asarray(one) for one in (kernels.begins, kernels.durations))
    order = np.argsort(begins, kind="stable")
    launch_of = _launches(trace, kernels)
    window = _window(trace, begins, durations, launch_of)
    inside = order[(begins[order] < window.end) & (begins[order] + durations[order] > window.begin)]
    if not len(inside):
        problem = "no kernel ran in the marked steps"
        raise InputError(problem, "profile with ProfilerActivity.CUDA", file=str(path))
    chosen_kernels = _Kernels(trace, chosen, inside, begins, durations, launch_of, window)
    idle = chosen_kernels.idle()
    num_steps = max(1, window.num_steps)
    name = trace.devices.get(chosen, "")
    kinds = chosen_kernels.kinds()
    facts = TraceFacts(
        file=str(path),
        gpu=name,
        device=chosen,
        num_events=trace.num_events,
        num_bytes=trace.num_bytes,
        num_steps=window.num_steps,
        window_s=(window.end - window.begin) / 1e6,
        step_s=window.step_s,
        num_kernels=len(inside),
        num_unqueued=chosen_kernels.num_unqueued,
        kernel_s=float(np.median(durations[inside])) / 1e6,
        busy_s=chosen_kernels.busy_us / 1e6,
        waits_for_host_s=idle.host_us / 1e6,
        between_kernels_s=idle.latency_us / 1e6,
        other_idle_s=idle.other_us / 1e6,
        communication_s=chosen_kernels.union_us(COMMUNICATION) / 1e6,
        exposed_communication_s=chosen_kernels.exposed_us(COMMUNICATION) / 1e6,
        copies_s=chosen_kernels.union_us(COPIES) / 1e6,
        exposed_copies_s=chosen_kernels.exposed_us(COPIES) / 1e6,
        kinds=kinds,
        stretches=tuple(_stretches(trace, chosen_kernels, idle, window)),
        syncs=tuple(_syncs(trace, window)),
    )
    return facts.model_copy(
        update={"utilisation": _utilisation(trace, facts, window, num_steps, given, gpu or _catalog(name))}
    )


def _device(trace: Trace, device: int | None, path: Path) -> int:
    if not trace.kernels:
        problem = "it has no kernels of a GPU"
        raise InputError(problem, "profile with ProfilerActivity.CUDA", file=str(path))
    if device is None:
        return max(trace.kernels, key=lambda number: len(trace.kernels[number]))
    if device not in trace.kernels:
        there = ", ".join(map(str, sorted(trace.kernels)))
        problem = "it has no kernels of this device"
        raise InputError(problem, f"use one of {there}", field="device", value=device, file=str(path))
    return device


def _catalog(name: str) -> Gpu | None:
    try:
        return gpu_of_device(name)
    except InputError:
        return None


def _launches(trace: Trace, kernels: Spans) -> Array:
    """Return the index of each kernel's launch; -1: not recorded."""
    by_number = {number: index for index, number in enumerate(trace.launches.ids) if number > 0}
    return np.fromiter((by_number.get(number, -1) for number in kernels.ids), dtype=np.int64)


def _window(trace: Trace, begins: Array, durations: Array, launch_of: Array) -> _Window:
    """Return the window on the GPU's clock, which is the host's."""
    ends = begins + durations
    steps = sorted(trace.steps, key=lambda one: one.begin_us)
    if not steps:
        return _Window(float(begins.min()), float(ends.max()), 0, None)
    first, last = steps[0].begin_us, max(one.begin_us + one.duration_us for one in steps)
    launched_at = np.asarray(trace.launches.begins)
    known = launch_of >= 0
    at = np.where(known, launched_at[np.maximum(launch_of, 0)] if len(launched_at) else begins, begins)
    inside = (at >= first) & (at < last)
    step_us = float(np.median([one.duration_us for one in steps]))
    if not inside.any():
        return _Window(first, last, len(steps), step_us / 1e6)
    # The GPU runs behind the host: it begins later, and ends with the last kernel or the host's last step.
    # Kernels whose launch was not recorded may be of the step before, which still ran.
    sure = inside & known
    begin = float(begins[sure if sure.any() else inside].min())
    end = max(last, float(ends[inside].max()))
    return _Window(begin, end, len(steps), step_us / 1e6)


class _Idle(NamedTuple):
    """Idle spans of the GPU, in microseconds."""

    begins: Array
    lengths: Array
    waits: Array
    """Whether each waits for the host."""
    kernels: Array
    """The kernel that ends each."""
    host_us: float
    latency_us: float
    other_us: float


class _Kernels:
    """The kernels of a GPU in a window, in the order of their begins; clipped to it."""

    def __init__(
        self, trace: Trace, device: int, inside: Array, begins: Array, durations: Array, launch_of: Array,
        window: _Window,
    ):  # fmt: skip
        spans = trace.kernels[device]
        self.window = window
        self.launch_of = launch_of[inside]
        self.begins = np.maximum(begins[inside], window.begin)
        self.ends = np.minimum(begins[inside] + durations[inside], window.end)
        self.durations = durations[inside]
        self.launched_at = np.full(len(inside), np.nan)
        known = self.launch_of >= 0
        launched = np.asarray(trace.launches.begins)
        self.launched_at[known] = launched[self.launch_of[known]]
        names = np.asarray(spans.names)[inside]
        is_copy = np.asarray(trace.copies[device])[inside]
        kinds = {number: kind_of_kernel(trace.names[number]) for number in np.unique(names)}
        self.kind = np.array(
            [COPIES if copy else kinds[number] for number, copy in zip(names, is_copy, strict=True)]
        )
        self.union = _union(self.begins, self.ends)
        self.busy_us = _length(self.union)

    def kinds(self) -> tuple[KernelKind, ...]:
        found = [
            KernelKind(
                name=str(kind),
                seconds=float((self.ends - self.begins)[self.kind == kind].sum()) / 1e6,
                num_kernels=int((self.kind == kind).sum()),
            )
            for kind in np.unique(self.kind)
        ]
        return tuple(sorted(found, key=lambda one: -one.seconds))

    def union_us(self, kind: str) -> float:
        """Return how long kernels of a kind run."""
        mine = self.kind == kind
        return _length(_union(self.begins[mine], self.ends[mine]))

    def exposed_us(self, kind: str) -> float:
        """Return how long kernels of a kind run and no others."""
        others = self.kind != kind
        return self.busy_us - _length(_union(self.begins[others], self.ends[others]))

    @property
    def num_unqueued(self) -> int:
        """The number of kernels that begin as soon as they are launched."""
        return int((self.begins - self.launched_at <= LATENCY_US).sum())

    def idle(self) -> _Idle:
        starts, ends = self.union
        gaps_begin = np.concatenate(([self.window.begin], ends))
        gaps_end = np.concatenate((starts, [self.window.end]))
        lengths = np.maximum(0.0, gaps_end - gaps_begin)
        # Each but the last ends with the kernel that begins a busy span.
        following = np.minimum(np.searchsorted(self.begins, gaps_end), len(self.begins) - 1)
        launched = self.launched_at[following]
        # False where the launch is not known.
        waits = (launched > gaps_begin) | (gaps_end - launched <= LATENCY_US)
        waits[-1] = True  # Nothing more is launched.
        latency = ~waits & (lengths <= LATENCY_US)
        host_us, latency_us = float(lengths[waits].sum()), float(lengths[latency].sum())
        other_us = max(0.0, float(lengths.sum()) - host_us - latency_us)
        return _Idle(gaps_begin, lengths, waits, following, host_us, latency_us, other_us)


def _union(begins: Array, ends: Array) -> tuple[Array, Array]:
    """Return the disjoint spans that sorted spans cover."""
    if not len(begins):
        return np.empty(0), np.empty(0)
    reached = np.maximum.accumulate(ends)
    is_first = np.concatenate(([True], begins[1:] > reached[:-1]))
    firsts = np.flatnonzero(is_first)
    return begins[firsts], reached[np.concatenate((firsts[1:] - 1, [len(begins) - 1]))]


def _length(union: tuple[Array, Array]) -> float:
    return float((union[1] - union[0]).sum())


def _stretches(trace: Trace, kernels: _Kernels, idle: _Idle, window: _Window) -> list[Stretch]:
    """Return the stretches in which the GPU waits longest for the host, the longest wait first."""
    size = (window.end - window.begin) / WINDOWS
    if not size or not idle.host_us:
        return []
    gap_begins, gap_ends = idle.begins[idle.waits], (idle.begins + idle.lengths)[idle.waits]
    edges_us = window.begin + size * np.arange(WINDOWS + 1)
    reached = np.concatenate(([0.0], np.cumsum(gap_ends - gap_begins)))
    known_at = np.stack((gap_begins, gap_ends), axis=1).ravel()
    waited = np.diff(np.interp(edges_us, known_at, np.repeat(reached, 2)[1:-1], left=0.0))
    bound = waited >= LAUNCH_BOUND * size
    # One part that is not bound between two that are belongs to the stretch.
    bound[1:-1] |= bound[:-2] & bound[2:]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], bound.astype(int), [0]))))
    ops = HostOps(trace)
    found: list[Stretch] = []
    runs = sorted(edges.reshape(-1, 2), key=lambda run: -waited[run[0] : run[1]].sum())
    for first, last in runs[:MOST_STRETCHES]:
        begin, end = window.begin + first * size, window.begin + last * size
        inside = (kernels.begins >= begin) & (kernels.begins < end)
        late = kernels.launch_of[idle.kernels[idle.waits][(gap_ends > begin) & (gap_begins < end)]]
        issued = kernels.launched_at[inside & ~np.isnan(kernels.launched_at)]
        found.append(
            Stretch(
                begin_s=(begin - window.begin) / 1e6,
                seconds=(end - begin) / 1e6,
                step=_step_at(trace, float(np.median(issued)) if len(issued) else begin),
                waited_s=float(waited[first:last].sum()) / 1e6,
                num_kernels=int(inside.sum()),
                kernel_s=float(np.median(kernels.durations[inside])) / 1e6 if inside.any() else 0.0,
                op=ops.most_frequent([int(index) for index in late if index >= 0]),
            )
        )
    return found


def _step_at(trace: Trace, at: float) -> int | None:
    found = [one.number for one in trace.steps if one.begin_us <= at < one.begin_us + one.duration_us]
    return found[0] if found else None


class HostOps:
    """Host operations by track, to find the one around a launch."""

    def __init__(self, trace: Trace):
        self._trace = trace
        self._tracks: dict[int, tuple[Array, Array, Array]] = {}
        tracks = np.asarray(trace.ops.tracks)
        begins, durations = (np.asarray(one) for one in (trace.ops.begins, trace.ops.durations))
        names = np.asarray(trace.ops.names)
        for track in np.unique(tracks):
            mine = np.flatnonzero(tracks == track)
            mine = mine[np.argsort(begins[mine], kind="stable")]
            self._tracks[int(track)] = begins[mine], begins[mine] + durations[mine], names[mine]

    def around(self, launch: int) -> str:
        """Return the innermost host operation around a launch; empty: none."""
        launches = self._trace.launches
        known, at = self._tracks.get(launches.tracks[launch]), launches.begins[launch]
        if known is None:
            return ""
        begins, ends, names = known
        last = int(np.searchsorted(begins, at, side="right")) - 1
        for index in range(last, max(-1, last - FURTHEST_BACK), -1):
            if ends[index] >= at:
                return self._trace.names[names[index]]
        return ""

    def most_frequent(self, launches: Sequence[int]) -> str:
        """Return the operation around most of some launches."""
        step = max(1, len(launches) // 2000)
        found = Counter(self.around(launch) for launch in launches[::step])
        found.pop("", None)
        return found.most_common(1)[0][0] if found else ""


def _syncs(trace: Trace, window: _Window) -> list[SyncPoint]:
    """Return the calls that wait for the GPU, by the host operation around them, the longest first."""
    is_sync = [any(word in f"{name}\0" for word in SYNCS) for name in trace.names]
    launches, ops = trace.launches, HostOps(trace)
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for index, name in enumerate(launches.names):
        if not is_sync[name]:
            continue
        begin = launches.begins[index]
        # The profiler's own wait is after the last step.
        if trace.steps and not any(s.begin_us <= begin < s.begin_us + s.duration_us for s in trace.steps):
            continue
        if begin > window.end:
            continue
        key = trace.names[name], ops.around(index)
        count, seconds = found.get(key, (0, 0.0))
        found[key] = count + 1, seconds + launches.durations[index] / 1e6
    points = [
        SyncPoint(call=call, op=op, num_calls=count, seconds=seconds)
        for (call, op), (count, seconds) in found.items()
    ]
    return sorted(points, key=lambda one: -one.seconds)[:MOST_SYNCS]


def _utilisation(
    trace: Trace, facts: TraceFacts, window: _Window, num_steps: int, given: Given | None, gpu: Gpu | None
) -> Utilisation | None:
    if given is not None:
        flops, dtype = given.flops, given.dtype
    else:
        at, each = (np.asarray(one) for one in (trace.flops_at, trace.flops))
        if trace.steps:
            first = min(one.begin_us for one in trace.steps)
            each = each[(at >= first) & (at < window.end)]
        flops = float(each.sum()) / num_steps
        dtype = max(trace.dtypes, key=lambda name: trace.dtypes[name]) if trace.dtypes else "bf16"
    peak = given.peak_flops_per_s if given and given.peak_flops_per_s else None
    if peak is None and gpu is not None and gpu.peak_flops_per_s:
        peak = peak_flops_per_s(gpu, dtype)
    if not flops or not peak:
        return None
    products_s = facts.seconds_of(*PRODUCTS) / num_steps
    return Utilisation(
        flops=flops,
        flops_are="matrix products by their shapes" if given is None else "the recipe's model FLOPs",
        peak_flops_per_s=peak,
        dtype=dtype,
        mfu=flops / (facts.window_s / num_steps) / peak,
        products_rate=flops / products_s / peak if products_s else 0.0,
    )
