"""``fusion``: RMSNorm and SwiGLU as one elementwise chain, eager, compiled, in Triton and in CUDA C++.

x [n, 2f] -> y [n, f]: h = x weight / sqrt(mean(x^2) + eps), y = silu(h[:, :f]) h[:, f:]; forward, bf16. The
chain is memory-bound: it moves at least x, the weight and y, each once. The first row is a copy of as many
bytes, the bandwidth that this run's memory gives. Each body is checked against fp64 before it is timed.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainfit.bench.harness.bench import Bench, Part, Point
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.profiling import num_on_gpu, profiler
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.timing import Lap
from trainfit.bench.kernels import normed_swiglu
from trainfit.spec.bench import BenchRow, Cell

SHAPES = {"tiny": ((48, 128),), "full": ((32768, 8192), (512, 8192))}
"""Rows and their size 2f; the second is launch-bound."""
CHUNK_ROWS = 4096  # Rows checked at once: fp64 of all would take four times the data
TIMES_EAGER_ERROR = 2.0  # A body's error may be this multiple of the eager chain's error in its dtype
Body = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The chain of x and the weight; fused kernels write into the third tensor, which is full of NaN at first."""
ON_ANY: dict[str, Body] = {
    "eager": lambda x, weight, into: normed_swiglu.plain(x, weight),
    "PyTorch's norm": lambda x, weight, into: normed_swiglu.with_pytorchs_norm(x, weight),
}
ON_CUDA = ("compiled", "Triton", "CUDA C++")


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield for each shape a copy, then every body."""
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    bodies = [*ON_ANY, *(ON_CUDA if bench.device.type == "cuda" else ())]
    for n, size in SHAPES[bench.form]:
        point: Point = {"rows": n, "row size": size}
        copied_per_s: float | None = None
        points: list[Point] = [{**point, "body": name} for name in bodies]
        for row in _copy(bench, {**point, "body": "copy"}, least_bytes(n, size, dtype), points):
            copied_per_s = float(row.numbers["gb_per_s"]) if "gb_per_s" in row.numbers else None
            yield row
        for one in points:
            yield from _row(bench, one, dtype, copied_per_s)


def body(name: str) -> Body:
    """Return the body of this name; a compiled one is compiled anew, for its own shapes."""
    if name == "compiled":
        torch._dynamo.reset()
        chain = torch.compile(normed_swiglu.plain, dynamic=False)
        return lambda x, weight, into: chain(x, weight)
    return {**ON_ANY, "Triton": normed_swiglu.triton_into, "CUDA C++": normed_swiglu.cuda_into}[name]


def least_bytes(n: int, size: int, dtype: torch.dtype) -> int:
    """Return the bytes of x and the weight, read once, and of y, written once."""
    return (n * size + size + n * (size // 2)) * dtype.itemsize


def _copy(bench: Bench, point: Point, num_bytes: int, needed_by: list[Point]) -> Iterator[BenchRow]:
    half = num_bytes // 2

    def build() -> Callable[[Lap], object]:
        source = torch.randint(256, (half,), dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        return lambda lap: target.copy_(source)

    part = Part(point, work=Work(cold_read_bytes=half, write_bytes=half), rates=rates(2 * half, None))
    numbers: dict[str, Cell] = {"moved_bytes": 2 * half, "least_bytes": 2 * half}
    yield from bench.time([part], build, numbers=numbers, needed_by=needed_by)


def _row(bench: Bench, point: Point, dtype: torch.dtype, copied_per_s: float | None) -> Iterator[BenchRow]:
    n, size, name = int(point["rows"]), int(point["row size"]), str(point["body"])
    least = least_bytes(n, size, dtype)
    written = n * (size // 2) * dtype.itemsize
    numbers: dict[str, Cell] = {}

    def build() -> Callable[[Lap], object]:
        chain, given = body(name), inputs(n, size, dtype, bench.device)
        numbers.update(counted(name, lambda: chain(*given), least, bench.device), **checked(chain, *given))
        return lambda lap: chain(*given)

    work = Work(cold_read_bytes=least - written, write_bytes=written)
    part = Part(point, work=work, rates=rates(least, copied_per_s))
    yield from bench.time([part], build, numbers=numbers)


def rates(least: int, copied_per_s: float | None) -> Callable[[float], dict[str, Cell]]:
    """Return the GB/s of the bytes that must move, and that over a copy's."""

    def of(seconds: float) -> dict[str, Cell]:
        per_s = least / seconds / 1e9
        of_copy: dict[str, Cell] = {"of_a_copy": per_s / copied_per_s} if copied_per_s else {}
        return {"gb_per_s": per_s, **of_copy}

    return of


def inputs(n: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x and weight, and a y full of NaN, which shows what a kernel leaves out."""
    x = 3 * torch.randn(n, size, device=device, dtype=dtype)
    weight = 1 + torch.randn(size, device=device, dtype=dtype) / 4
    return x, weight, torch.full((n, size // 2), float("nan"), device=device, dtype=dtype)


def checked(chain: Body, x: Tensor, weight: Tensor, into: Tensor) -> dict[str, Cell]:
    """Return the body's error against fp64, |y - exact| / |exact|."""
    y = chain(x, weight, into)
    off = eager_off = whole = 0.0
    for some, got in zip(x.split(CHUNK_ROWS), y.split(CHUNK_ROWS), strict=True):
        exact = normed_swiglu.plain(some.double(), weight.double())
        off += float((got - exact).square().sum())
        eager_off += float((normed_swiglu.plain(some, weight) - exact).square().sum())
        whole += float(exact.square().sum())
    error, eager = (off / whole) ** 0.5, (eager_off / whole) ** 0.5
    if y.dtype != x.dtype or not error <= TIMES_EAGER_ERROR * eager:
        raise ArithmeticError(f"error {error:.3g} against fp64 where the eager chain has {eager:.3g}")
    return {"relative_error": error}


def counted(name: str, run: Callable[[], object], least: int, device: torch.device) -> dict[str, Cell]:
    """Return ``launches``, and ``moved_bytes``: what the kernels read and write, each tensor once.

    They are counted for PyTorch's operations and compiled kernels; a fused kernel moves the chain's own
    tensors. The first run of a compiled chain must happen here.
    """
    count = {"compiled": compiled_bytes, "Triton": lambda run: least, "CUDA C++": lambda run: least}
    moved = count.get(name, moved_bytes)(run)
    number = launches(run, device)
    known: dict[str, Cell] = {} if number is None else {"launches": number}
    return {**known, "moved_bytes": moved, "least_bytes": least}


class MovedBytes(TorchDispatchMode):
    """Add up what each PyTorch operation reads and writes: each tensor once; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.num_bytes += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return out


def moved_bytes(run: Callable[[], object]) -> int:
    """Return the bytes that the PyTorch operations of ``run`` read and write."""
    with MovedBytes() as moved:
        run()
    return moved.num_bytes


def compiled_bytes(first_run: Callable[[], object]) -> int:
    """Return the bytes that the kernels compiled by ``first_run`` read and write, as Inductor counts them.

    Inductor counts only where its log of metrics is on, and compiles only what is in no cache."""
    from torch._inductor import compile_fx, config, metrics

    log = compile_fx.inductor_metrics_log
    before, level = metrics.num_bytes_accessed, log.level
    log.setLevel(logging.INFO)
    try:
        with config.patch(fx_graph_cache=False):
            first_run()
    finally:
        log.setLevel(level)
    counted = metrics.num_bytes_accessed - before
    if counted == 0:
        raise RuntimeError("the compiler counted no bytes: nothing was compiled anew")
    return counted


def launches(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the kernels and copies that ``run`` starts on a GPU; None where the profiler sees none."""
    if device.type != "cuda":
        return None
    run()
    torch.cuda.synchronize(device)
    with profiler(device) as profile:
        run()
        torch.cuda.synchronize(device)
    return num_on_gpu(profile.events() or ()) or None


EXPERIMENT = Experiment(
    title="One elementwise chain, four ways",
    question="What does fusing an elementwise chain gain: eager, compiled, Triton, CUDA C++?",
    run=run,
    limit_s=60,
    columns=(
        Column("gb_per_s", "GB/s", note="of the least bytes, so a body that moves more is slower"),
        Column("of_a_copy", format=".1%", note="GB/s over those of a copy of as many bytes"),
        Column("launches"),
        Column("moved_bytes", note="what the kernels read and write, each tensor once"),
        Column("least_bytes", note="x, the weight and y, each once"),
        Column("relative_error", note="against fp64"),
    ),
    plots=(
        Plot(
            x=("body",), y="gb_per_s", series="rows", is_bar=True, is_horizontal=True, text=",.0f",
            title="RMSNorm and SwiGLU by number of rows: bandwidth of the least bytes", y_label="GB/s",
        ),
    ),
)  # fmt: skip
