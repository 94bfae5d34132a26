"""Latency of each memory by pointer chasing: each address is the value that was loaded last.

One thread follows a random cycle through a set, so no two loads overlap and no prefetcher knows the next one.
Sets of growing size show each level as a step: global memory's are in L1, then in L2, then in device memory.
On a GPU the kernels are CUDA C++ (``cuda/memory_chase.cu``) and read the multiprocessor's cycles and the
GPU's nanoseconds around the loads; on a CPU C reads the system's clock. Registers have no addresses, so
theirs is the time of a multiply-add that needs the result of the one before.
"""

import ctypes
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trainfit.bench.harness.bench import Bench, Part, Point
from trainfit.bench.harness.timing import TOTAL, Lap, Rule, Timing, steadied
from trainfit.bench.kernels import cc, nvcc
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.errors import InputError
from trainfit.spec.units import GIB, KIB, MIB

LINE_BYTES = (
    128  # Between two pointers: a line of a GPU's L1, two of most CPUs', whose prefetchers read pairs
)
WARP = 32
STEPS = 8192
CHECKED_STEPS = 64
WARMED_BYTES = 256 * KIB
"""Largest set that one thread walks before it is timed; larger ones are read by a sum, which fills L2."""
GLOBAL, SHARED, CONSTANT, LOCAL, REGISTER = "global", "shared", "constant", "local", "register"
CPU_MEMORY = "CPU memory"
KIBS = (*(2**n for n in range(3, 8)), 192, 208, 224, 240, 256, 512)
MIBS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 256, 1024)
GLOBAL_BYTES = {
    "tiny": (16 * KIB, MIB, 256 * MIB),
    "full": (*(KIB * size for size in KIBS), *(MIB * size for size in MIBS)),
}
OTHER_BYTES = {
    SHARED: (8 * KIB, 64 * KIB, 192 * KIB), CONSTANT: (KIB, 8 * KIB, 32 * KIB, 64 * KIB),
    LOCAL: (32 * KIB, 512 * KIB), REGISTER: (0,),
}  # fmt: skip
"""Local memory's is that of a whole warp: a thread's words stand between those of the others."""
CPU_BYTES = {"tiny": (16 * KIB, 256 * KIB, 4 * MIB), "full": tuple(2**n * KIB for n in range(3, 21))}
MOST_MISSES = 0.1
"""Share of loads that may come from the next level where a level counts as holding a set."""
IN_L1, IN_L2, BEYOND = 32 * KIB, 4 * MIB, GIB
"""Sets that the level surely holds, on every GPU of the catalog; no level holds the last."""


@dataclass
class Chase:
    """One chase on a device: ``run`` follows ``steps`` pointers from where the last call ended."""

    run: Callable[[int], None]
    place: Callable[[], float]  # Of the pointer that comes next, as an index of the cycle
    expected: Callable[[int], float]  # Place after this many steps from the start
    times: Callable[[], tuple[float, float]]  # Nanoseconds and cycles (0: unknown) of the last call
    found: list[tuple[float, float]] = field(default_factory=list)

    def check(self) -> None:
        """Raise ArithmeticError where the chase does not follow the cycle."""
        self.run(CHECKED_STEPS)
        if self.place() != self.expected(CHECKED_STEPS):
            raise ArithmeticError("the chase did not follow its pointers")


def points(bench: Bench) -> list[tuple[Point, Callable[[], Chase]]]:
    """Return the points of all chases and what builds each."""
    device = bench.device
    if device.type != "cuda":
        return [(_point(CPU_MEMORY, size, "C"), partial(_cpu, size)) for size in CPU_BYTES[bench.form]]
    sets = [(GLOBAL, size) for size in GLOBAL_BYTES[bench.form]]
    sets += [(space, size) for space, sizes in OTHER_BYTES.items() for size in sizes]
    return [(_point(space, size, "CUDA C++"), partial(_gpu, space, size, device)) for space, size in sets]


def _point(space: str, set_bytes: int, chased_by: str) -> Point:
    return {"chase": space, "set_kib": set_bytes // KIB, "chased by": chased_by}


class Level(NamedTuple):
    """A level of memory that repeats the latency of the chase of its memory whose set is nearest in size."""

    point: Point
    space: str
    set_bytes: int
    needs_edges: bool = False  # Its size is what all sets of global memory show


def rows(bench: Bench, levels: Sequence[Level] = ()) -> Iterator[BenchRow]:
    """Yield the latency of each set; on a GPU then the sizes of L1 and L2 that they show.

    Args:
        levels: where one is selected, the chases that it needs run too.
    """
    rule = replace(bench.rule, warmup=1, max_samples=20, spread=0.05, flush=False)
    edges: list[Point] = [{"size of": level} for level in ("L1", "L2")] if bench.device.type == "cuda" else []
    latencies: dict[int, float] = {}
    every = points(bench)
    nearest_of = [nearest_point([point for point, _ in every], *level[1:3]) for level in levels]
    for point, build in every:
        chases: list[Chase] = []
        is_global = point["chase"] == GLOBAL
        needed_by = [*(edges if is_global else ())]
        needed_by += [
            level.point
            for level, near in zip(levels, nearest_of, strict=True)
            if near == point or (level.needs_edges and is_global)
        ]
        of = partial(_of_loads, bench, rule, point, chases)
        for row in bench.series([point], partial(_timed, build, chases), rule, of, needed_by=needed_by):
            latencies |= global_latencies([row])
            yield row
    for point in edges:
        yield from bench.find(
            point, lambda point=point: {"size_bytes": edge(str(point["size of"]), latencies)}
        )


def global_latencies(found: Sequence[BenchRow]) -> dict[int, float]:
    """Return the latency of each set of global memory, by its bytes."""
    return {
        int(row.point["set_kib"]) * KIB: float(row.numbers["latency_ns"])
        for row in found
        if row.point.get("chase") == GLOBAL and "latency_ns" in row.numbers
    }


def _timed(build: Callable[[], Chase], chases: list[Chase]) -> Callable[[Lap], object]:
    chase = build()
    chase.check()
    chases.append(chase)

    def run(lap: Lap) -> None:
        chase.run(STEPS)
        chase.found.append(chase.times())

    return run


def _of_loads(
    bench: Bench, rule: Rule, point: Point, chases: Sequence[Chase], timing: Timing
) -> Iterator[BenchRow]:
    """Yield the row of one load: the times around the loads, not those of the warm-up and the launch."""
    found = [chases[-1].found[run] for run in timing.runs]
    cycles = statistics.median([cycles for _, cycles in found]) / STEPS if found else 0.0
    if found:
        laps = {TOTAL: [ns / 1e9 / STEPS for ns, _ in found]}
        timing = steadied(Timing(laps=laps, runs=timing.runs, discarded=timing.discarded), rule)

    def rates(seconds: float) -> dict[str, Cell]:
        return {"latency_ns": 1e9 * seconds, **({"cycles": cycles} if cycles else {})}

    yield bench.row(Part(point, rates=rates), timing, {})


def edge(level: str, latencies: Mapping[int, float]) -> int:
    """Return the bytes of the largest set that L1 or L2 holds."""
    near, far = {"L1": (IN_L1, IN_L2), "L2": (IN_L2, BEYOND)}[level]
    if near not in latencies or far not in latencies:
        raise InputError("the sets inside and beyond the level were not measured", "use the full form")
    return largest_within(latencies, latencies[near], latencies[far])


def largest_within(latencies: Mapping[int, float], near: float, far: float) -> int:
    """Return the largest set up to which a level holds each one.

    A level holds a set where the mean latency is that of at most ``MOST_MISSES`` of the loads going to the
    next level.

    Args:
        near: latency of a load from the level.
        far: latency of a load from the next level.
    """
    limit, largest = near + MOST_MISSES * (far - near), 0
    for size, latency in sorted(latencies.items()):
        if latency > limit:
            break
        largest = size
    return largest


def random_cycle(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return an order of ``count`` entries, int64, and for each entry the one that follows it."""
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(count, generator=generator, device=device)
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    return order, following


def _pointers(set_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return lines, int64 [lines, words], whose first words are addresses of the next; and their order."""
    order, following = random_cycle(set_bytes // LINE_BYTES, device)
    lines = torch.zeros(len(order), LINE_BYTES // 8, dtype=torch.int64, device=device)
    lines[:, 0] = lines.data_ptr() + LINE_BYTES * following
    return lines, order


def _gpu(space: str, set_bytes: int, device: torch.device) -> Chase:
    build = {GLOBAL: _global, REGISTER: _register}.get(space)
    return build(set_bytes, device) if build is not None else _words(space, set_bytes, device)


def _times_of(out: Tensor) -> Callable[[], tuple[float, float]]:
    def times() -> tuple[float, float]:
        cycles, ns = out.tolist()
        return ns, cycles

    return times


def _global(set_bytes: int, device: torch.device) -> Chase:
    lines, order = _pointers(set_bytes, device)
    place = lines.data_ptr() + LINE_BYTES * order[:1]
    out = torch.zeros(2, dtype=torch.int64, device=device)
    warm = len(order) if set_bytes <= WARMED_BYTES else 0

    def run(steps: int) -> None:
        lines.sum()
        counts = (ctypes.c_int(warm), ctypes.c_int(steps))
        nvcc.launch("chase_global", place, *counts, out, source="memory_chase")

    return Chase(
        run,
        lambda: (int(place) - lines.data_ptr()) // LINE_BYTES,
        lambda steps: int(order[(warm + steps) % len(order)]),
        _times_of(out),
    )


def _words(space: str, set_bytes: int, device: torch.device) -> Chase:
    """Chase bytes of 32-bit words in shared, constant or local memory."""
    words = set_bytes // 4 // (WARP if space == LOCAL else 1)
    order, following = random_cycle(words, device)
    cycle, place = (4 * following).int(), (4 * order[:1]).int()
    out = torch.zeros(2, dtype=torch.int64, device=device)
    warm = min(words, STEPS)

    def run(steps: int) -> None:
        counts = (ctypes.c_int(warm), ctypes.c_int(steps))
        nvcc.launch(f"chase_{space}", cycle, ctypes.c_int(words), place, *counts, out, source="memory_chase")

    return Chase(
        run, lambda: int(place) // 4, lambda steps: int(order[(warm + steps) % words]), _times_of(out)
    )


def _register(set_bytes: int, device: torch.device) -> Chase:
    """Chain multiply-adds that each add 1."""
    place = torch.zeros(1, device=device)
    out = torch.zeros(2, dtype=torch.int64, device=device)

    def run(steps: int) -> None:
        place.zero_()
        one = ctypes.c_float(1.0)
        nvcc.launch("chase_register", place, one, one, ctypes.c_int(steps), out, source="memory_chase")

    return Chase(run, lambda: float(place), float, _times_of(out))


def _cpu(set_bytes: int) -> Chase:
    lines, order = _pointers(set_bytes, torch.device("cpu"))
    place = ctypes.c_void_p(lines.data_ptr() + LINE_BYTES * int(order[0]))
    function = cc.library("memory").chase
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
    # A walk through a set beyond the caches would leave none of it there.
    warm = len(order) if set_bytes <= 32 * MIB else 0
    seconds: list[float] = []

    def run(steps: int) -> None:
        assert lines.numel()  # The set lives as long as its chase.
        seconds[:] = [function(ctypes.byref(place), warm, steps)]

    def index() -> int:
        assert place.value is not None
        return (place.value - lines.data_ptr()) // LINE_BYTES

    return Chase(
        run, index, lambda steps: int(order[(warm + steps) % len(order)]), lambda: (1e9 * seconds[0], 0.0)
    )


def nearest(found: Sequence[BenchRow], space: str, set_bytes: int) -> BenchRow | None:
    """Return the chase of this memory whose set is nearest in size; None: none has a latency."""
    known = [row for row in found if "latency_ns" in row.numbers]
    point = nearest_point([row.point for row in known], space, set_bytes)
    return next((row for row in known if row.point == point), None)


def nearest_point(some: Sequence[Point], space: str, set_bytes: int) -> Point | None:
    """Return the point of this memory whose set is nearest in size, by ratio; None: there is none."""

    def distance(point: Point) -> float:
        return abs(math.log((int(point["set_kib"]) + 1) / (set_bytes / KIB + 1)))

    return min((point for point in some if point.get("chase") == space), key=distance, default=None)
