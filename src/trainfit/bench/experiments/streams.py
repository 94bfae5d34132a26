"""``streams``: when a second stream helps, and what a clock without synchronization shows.

Each case is two independent lists of work: in one stream, one list after the other; then the first list in a
side stream while the second is in the current one. ``gain`` is the first time over the second; ``at_most`` is
the gain if the shorter list were hidden completely. Both ways give the same results, which is checked before
anything is timed. A CPU has one stream, so no rows of two.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from trainfit.bench.harness.bench import Bench, Part, Point
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.timing import TOTAL, Lap, Timing
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.units import MIB

COPY_BYTES = {"tiny": MIB // 4, "full": 256 * MIB}
PRODUCT_SIZE = {"tiny": 64, "full": 8192}
SMALL_PRODUCT_SIZE = {"tiny": 32, "full": 4096}
PRODUCTS = {"tiny": 2, "full": 3}
"""Products of 8192: about as long as the copy of pinned memory on an H200 (3 x 1.5 ms and 4.9 ms)."""
MANY = {"tiny": 10, "full": 200}
ROWS, ROW_SIZE = {"tiny": 2, "full": 16}, {"tiny": 256, "full": 131072}
"""Of a softmax with one thread block a row: 16 multiprocessors work, the others idle."""
TOLERANCE = 1e-2
"""Of |difference| / |result|: streams may select different kernels for the same product in bf16."""
Do = Callable[[], object]
Make = Callable[[Bench], tuple[Do, Tensor]]  # Makes one list of work and the tensor of its result


@dataclass(frozen=True)
class Case:
    """Two lists of work, and the tensors that hold their results."""

    first: Do
    second: Do
    results: Sequence[Tensor]


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield the clocks, then copies with products and kernels with kernels; pageable memory last."""
    yield from _clocks(bench)
    for name, make in cases(bench.device).items():
        yield from timed(bench, name, make, in_two=bench.device.type == "cuda")


def cases(device: torch.device) -> dict[str, Callable[[Bench], Case]]:
    """Return the cases by name; those of pinned memory and of CUDA graphs on CUDA only."""
    additions = _pair(_additions)
    kernels = {
        "two products that each fill the GPU": _pair(partial(_products, SMALL_PRODUCT_SIZE)),
        "softmaxes of few rows": _pair(_softmaxes),
        "additions of few numbers": additions,
    }
    if device.type != "cuda":
        return {**kernels, **_copies("pageable")}
    both_ways = {
        "copy to the GPU, then to the host, pinned": _pair(
            partial(_copy, False, True), partial(_copy, True, True)
        )
    }
    graph = {"additions of few numbers, in a CUDA graph": additions}
    return {**_copies("pinned"), **both_ways, **kernels, **graph, **_copies("pageable")}


def _copies(memory: str) -> dict[str, Callable[[Bench], Case]]:
    to_gpu, to_host = (partial(_copy, to_host, memory == "pinned") for to_host in (False, True))
    products = partial(_products, PRODUCT_SIZE)
    return {
        f"copy to the GPU, {memory}, then products": _pair(to_gpu, products),
        f"copy to the host, {memory}, then products": _pair(to_host, products),
        f"products, then copy to the GPU, {memory}": _pair(products, to_gpu),
    }


# -- the cases --


def _pair(first: Make, second: Make | None = None) -> Callable[[Bench], Case]:
    """Return a function that makes a case of two lists, or twice the same list on its own tensors."""

    def make(bench: Bench) -> Case:
        (one, one_out), (other, other_out) = first(bench), (second or first)(bench)
        return Case(one, other, (one_out, other_out))

    return make


def _copy(to_host: bool, pinned: bool, bench: Bench) -> tuple[Do, Tensor]:
    numel = COPY_BYTES[bench.form] // 4
    here, there = torch.empty(numel, pin_memory=pinned), torch.randn(numel, device=bench.device)
    here.copy_(torch.randn(numel, device=bench.device))
    into, source = (here, there) if to_host else (there, here)
    return (lambda: into.copy_(source, non_blocking=pinned)), into


def _products(sizes: Mapping[str, int], bench: Bench, count: int | None = None) -> tuple[Do, Tensor]:
    """Return ``count`` times the same product, and its result."""
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    shape = (sizes[bench.form], sizes[bench.form])
    a, b = (torch.randn(shape, device=bench.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    count = count or PRODUCTS[bench.form]
    return (lambda: [torch.mm(a, b, out=out) for _ in range(count)]), out


def _softmaxes(bench: Bench) -> tuple[Do, Tensor]:
    """Return many kernels that each use a part of the GPU, for much longer than a launch takes."""
    x = torch.randn(ROWS[bench.form], ROW_SIZE[bench.form], device=bench.device)
    out = torch.empty_like(x)
    return (lambda: [torch.softmax(x, -1, out=out) for _ in range(MANY[bench.form])]), out


def _additions(bench: Bench) -> tuple[Do, Tensor]:
    """Return many kernels that end before the host has issued the next."""
    x = torch.randn(1024, device=bench.device)
    out = torch.empty_like(x)
    return (lambda: [torch.add(x, 1, out=out) for _ in range(MANY[bench.form])]), out


# -- one stream and two --


def one_stream(case: Case) -> Callable[[Lap], object]:
    """Return a run of the lists one after the other, as laps ``first`` and ``second``."""

    def do(lap: Lap) -> None:
        lap("first")
        case.first()
        lap("second")
        case.second()

    return do


def two_streams(case: Case, device: torch.device) -> Callable[[Lap], object]:
    """Return a run with the first list in a side stream, ordered with the work before and after."""
    streams: Any = torch.get_device_module(device)
    side = streams.Stream()

    def do(lap: Lap) -> None:
        current = streams.current_stream()
        side.wait_stream(current)
        with streams.stream(side):
            case.first()
        case.second()
        current.wait_stream(side)

    return do


def in_a_graph(do: Callable[[Lap], object]) -> Callable[[Lap], object]:
    """Return a run of the same kernels as one CUDA graph; it has no laps."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        do(lambda name: None)
    return lambda lap: graph.replay()


def timed(bench: Bench, name: str, make: Callable[[Bench], Case], *, in_two: bool) -> Iterator[BenchRow]:
    """Yield a row of one stream, and ``in_two`` one of two; results are checked both ways in any case."""
    rule = replace(bench.rule, flush=False)
    one: Point = {"case": name, "streams": "one"}
    two: Point = {"case": name, "streams": "two"}
    graphed = name.endswith("graph")
    held: list[Case] = []

    def build_one() -> Callable[[Lap], object]:
        held.append(make(bench))
        check(held[0], bench.device)
        do = one_stream(held[0])
        return in_a_graph(do) if graphed else do

    def build_two() -> Callable[[Lap], object]:
        do = two_streams(held[0], bench.device)
        return in_a_graph(do) if graphed else do

    def rows(timing: Timing) -> Iterator[BenchRow]:
        yield bench.row(Part(one), timing, {})
        alone = {lap: median(samples) for lap, samples in timing.laps.items()}
        longer = max(alone.get("first", 0.0), alone.get("second", 0.0))

        def gained(seconds: float) -> dict[str, Cell]:
            at_most: dict[str, Cell] = {"at_most": alone[TOTAL] / longer} if longer else {}
            return {"gain": alone[TOTAL] / seconds, **at_most} if alone else {}

        if in_two:
            yield from bench.time([Part(two, rates=gained)], build_two, rule)

    yield from bench.series([one, two] if in_two else [one], build_one, rule, rows)


def check(case: Case, device: torch.device) -> None:
    """Run it both ways."""
    runs = (one_stream(case), two_streams(case, device))
    found = []
    for do in runs:
        for result in case.results:
            result.fill_(float("nan"))
        synchronize(device)
        do(lambda name: None)
        synchronize(device)
        found.append([result.clone() for result in case.results])
    apart = [
        float((one - other).float().norm() / one.float().norm()) for one, other in zip(*found, strict=True)
    ]
    if not all(distance < TOLERANCE for distance in apart):
        raise ArithmeticError("one stream and two leave different results")


# -- clocks --


def _clocks(bench: Bench) -> Iterator[BenchRow]:
    """Yield the same product by the host's clock, without and with synchronization, and by the device's."""
    size = PRODUCT_SIZE[bench.form]
    work = Work(2.0 * size**3, "bf16" if bench.device.type == "cuda" else "fp32")
    rule = replace(bench.rule, flush=False, max_samples=20)
    host, device = "the host's clock", "the device's events"
    for title, on_host, synchronised in (
        (f"{host}, not synchronised", True, False),
        (f"{host}, synchronised", True, True),
        (device, False, False),
    ):  # fmt: skip
        build = partial(_product_once, bench, synchronised)
        part = Part({"one product timed by": title, "size": size}, work=work)
        yield from bench.time([part], build, rule, on_host=on_host)


def _product_once(bench: Bench, synchronised: bool) -> Callable[[Lap], object]:
    product, _ = _products(PRODUCT_SIZE, bench, 1)
    product()
    synchronize(bench.device)

    def do(lap: Lap) -> None:
        product()
        if synchronised:
            synchronize(bench.device)

    return do


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all issued work."""
    streams: Any = torch.get_device_module(device)
    streams.synchronize()


EXPERIMENT = Experiment(
    title="When a second stream helps",
    question="When do two streams overlap work, and what does an unsynchronized clock show?",
    run=run,
    limit_s=90,
    columns=(
        Column("gain", note="time in one stream over time in two"),
        Column("at_most", note="the gain if the shorter list were hidden completely"),
    ),
    plots=(
        Plot(
            x=("case",), y="gain", where={"streams": ("two",)}, bound="at_most", bound_label="at most",
            is_bar=True, is_horizontal=True, text=".2f", title="Gain of a second stream",
            y_label="time in one stream over time in two",
        ),
    ),
)  # fmt: skip
