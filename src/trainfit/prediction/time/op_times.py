"""Times of single operations as a calibration measured them, and the nearest of them for a new shape.

A row is found by operation, dtype and layout, and for attention by head size and mask. Among these the
nearest in size count, each by the rate that it reached beyond a fixed time; the logarithms of the seconds
are averaged, the nearer the more.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Op
from trainfit.prediction.time.experts import is_looped, num_groups, one_group, padding
from trainfit.spec.calibration import OpTime

SHEET = "h200"
"""GPU whose data sheet says which operations are bound by memory, and which by launches."""
NEAREST = 4
CLOSE = 0.15
"""Distance, in logarithms of sizes, within which measured points count alike."""
FAR = math.log(4)
"""Distance above the largest measured size from which operations less alike, but as large, count instead; not
of operations on lists, whose rates are those of one tensor's chunks."""
ALIGNED = 8
"""Elements of 16 bits: products with other sizes take slower kernels."""
BITS_16: dict[str, str] = dict.fromkeys(("float16", "bfloat16"), "16 bits")
"""Dtypes whose rows stand for one another."""
FIXED_S = {"product": 4e-6, "attention": 6e-6, "other": 2.5e-6}
"""Part of an operation's time that its size does not change. Each predicts rows from the others best."""
ADDED = "baddbmm"
"""Product that copies what it adds before, unlike ``addmm``, whose kernel adds a bias."""
LATENCY = 0.03
"""Share of the bandwidth below which an operation takes its time to launch kernels, whatever its size."""
REACHED = 0.59
"""Share of the bandwidth of bytes beyond those of such an operation."""
FAMILIES = dict.fromkeys(("sum", "mean", "amax", "linalg_vector_norm"), "reduction") | dict.fromkeys(
    ("copy", "_to_copy", "clone"), "copy"
)
"""Operations that stand for one another."""
NUM_SMS = 132
TILES = (
    (256, 128, 1.02), (128, 256, 1.02), (128, 128, 1.0), (128, 64, 0.93), (64, 128, 0.93), (64, 64, 0.8),
    (32, 64, 0.6),
)  # fmt: skip
"""Rows, columns and relative rate of the tiles of fp32 products. They predict rows from the others better."""
COPIED = 0.8
"""Share of the bandwidth of a copy."""
Key = tuple[object, ...]


class Point(NamedTuple):
    """A row: logarithms of its sizes, FLOPs or bytes, seconds, and whether launches take these."""

    size: tuple[float, ...]
    work: float
    seconds: float
    is_latency: bool

    def scaled(self, work: float, fixed_s: float) -> float:
        """Return the seconds of other work, of which ``fixed_s`` stay."""
        if self.is_latency:
            return self.seconds + max(0.0, work - self.work) / (REACHED * _bytes_per_s())
        fixed_s = min(fixed_s, 0.9 * self.seconds)
        return fixed_s + (self.seconds - fixed_s) * work / self.work


def size_of(op: Op | OpTime) -> tuple[float, ...]:
    """Return the logarithms of what distinguishes calls of one operation."""
    if op.shape:
        return tuple(math.log(max(1, length)) for length in op.shape)
    if op.kernel:
        return math.log(max(1, op.seq)), 0.5 * math.log(max(1.0, _flops(op)))
    return (math.log(max(1, op.num_bytes)),)


def _flops(op: Op | OpTime) -> float:
    return op.flops if isinstance(op, OpTime) else op.causal_flops


def work_of(op: Op | OpTime) -> float:
    """Return the work that a rate is of: FLOPs, or bytes where there are none.

    A product that is bound by memory counts the FLOPs of the time that its bytes take.
    """
    if op.shape:
        more = 1.0
        if "grouped_mm" in _base(op):
            more = padding(op)
        elif op.dtype == "float32":
            more = _waves(op.shape)
        return max(_flops(op) * more, op.num_bytes * _flops_per_byte(op.dtype))
    return _flops(op) or float(op.num_bytes)


@functools.lru_cache(maxsize=65536)
def _waves(shape: tuple[int, ...]) -> float:
    """Return how much longer a product in fp32 takes as its last tiles leave multiprocessors idle.

    Its time is between that of the whole waves of the best tile, and that of the FLOPs alone.
    """
    batch, m, n, _ = shape
    done = min(
        math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / NUM_SMS)
        * NUM_SMS
        * rows
        * columns
        / rate
        for rows, columns, rate in TILES
    )
    return math.sqrt(max(1.0, done / max(1, batch * m * n)))


@functools.cache
def _flops_per_byte(dtype: str) -> float:
    peak = "fp32" if dtype == "float32" else "fp8" if dtype.startswith("float8") else "bf16"
    return gpu(SHEET).peak_flops_per_s[peak] / _bytes_per_s()


@functools.cache
def _bytes_per_s() -> float:
    sheet = gpu(SHEET).memory_bytes_per_s
    assert sheet is not None
    return sheet


def keys(op: Op | OpTime) -> Iterable[Key]:
    """Yield what rows of an operation are found by, the most exact first."""
    base, dtype = _base(op), BITS_16.get(op.dtype, op.dtype)
    if base == ADDED:
        yield base, dtype, op.layout
        if isinstance(op, OpTime):
            return
    if op.shape:
        kind = base if "grouped" in base else "product"
        odd = op.dtype != "float32" and any(length % ALIGNED for length in op.shape[1:])
        yield kind, dtype, op.layout, odd
        yield kind, dtype, odd
        yield kind, dtype
        return
    if op.kernel:
        yield base, op.kernel, dtype, op.head, op.masked
        yield base, op.kernel, dtype, op.masked
        return
    name = op.op if isinstance(op, OpTime) else op.name
    yield name, dtype, op.layout
    yield base, dtype, op.layout
    if name.startswith("triton_"):
        kind = name.split("_")[1]  # Pointwise, or a reduction in one or several passes.
        if _is_of_fp8(name):
            yield "triton, fp8", kind
            if isinstance(op, OpTime):
                return
        yield "triton", kind
        yield ("triton",)
    yield base, dtype, None
    if base in FAMILIES:
        yield FAMILIES[base], dtype, op.layout
    if not _is_list(base):
        yield "elementwise", dtype, op.layout
    yield "list" if _is_list(base) else "elementwise", None, None


def _is_of_fp8(kernel: str) -> bool:
    """Return whether a compiled kernel rounds to fp8, also by columns, or finds the scale for it."""
    return "_scaled_mm" in kernel or {"abs", "max"} <= {*kernel.split("_")}


def _is_list(base: str) -> bool:
    return base.startswith(("_foreach", "_fused", "_amp_foreach"))


def _base(op: Op | OpTime) -> str:
    name = op.op if isinstance(op, OpTime) else op.name
    parts = name.split(".")
    return parts[1].rstrip("_") if len(parts) > 1 else name


class OpTimes:
    """Rows of a calibration by key; ``seconds`` is of the calibrated GPU itself."""

    def __init__(self, rows: Iterable[OpTime]):
        self._points: dict[Key, list[Point]] = {}
        self._seconds = functools.lru_cache(maxsize=65536)(self._nearest)
        for row in rows:
            point = Point(size_of(row), work_of(row), row.seconds, _is_latency(row))
            for key in dict.fromkeys(keys(row)):
                if key[0] != "elementwise" or _base(row) in ("add", "mul", "sub", "div", "neg"):
                    self._points.setdefault(key, []).append(point)

    def seconds(self, op: Op) -> float | None:
        """Return the expected seconds of one call; None where nothing like it was measured."""
        if is_looped(op):
            taken_s = self.seconds(one_group(op))
            return None if taken_s is None else num_groups(op) * taken_s
        size, known = size_of(op), [key for key in keys(op) if key in self._points]
        fixed_s = FIXED_S["product" if op.shape else "attention" if op.kernel else "other"]
        for key in known:
            if op.shape or op.kernel or _is_list(_base(op)) or size[0] <= self._largest(key) + FAR:
                copied_s = _copied_s(op) if _base(op) == ADDED != key[0] else 0.0
                return self._seconds(key, size, work_of(op), fixed_s) + copied_s
        if not known:
            return None
        return self._seconds(max(known, key=self._largest), size, work_of(op), fixed_s)

    def _largest(self, key: Key) -> float:
        return max(point.size[0] for point in self._points[key])

    def _nearest(self, key: Key, size: tuple[float, ...], work: float, fixed_s: float) -> float:
        """Return the seconds of some work of a size, from the nearest points of a key."""
        points = self._points[key]
        near = sorted((math.dist(point.size, size), point) for point in points)[:NEAREST]
        weights = [1 / (CLOSE + distance) ** 2 for distance, _ in near]
        logs = [math.log(point.scaled(work, fixed_s)) for _, point in near]
        return math.exp(sum(w * value for w, value in zip(weights, logs, strict=True)) / sum(weights))


def _copied_s(op: Op) -> float:
    batch, m, n, _ = op.shape
    return 2 * batch * m * n * (4 if op.dtype == "float32" else 2) / (COPIED * _bytes_per_s())


def _is_latency(row: OpTime) -> bool:
    if row.shape or row.kernel:
        return False
    return row.num_bytes < LATENCY * row.seconds * _bytes_per_s()
