"""Times of single operations as a calibration measured them, and the nearest of them for a new shape.

A row is found by operation, dtype and layout, and for attention by head size and mask. Among these the
nearest in size count, each by the rate that it reached; their logarithms are averaged, the nearer the more.
"""

import functools
import math
from collections.abc import Iterable

from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Op
from trainfit.spec.calibration import OpTime

BALANCE_OF = "h200"
"""GPU whose FLOPs a byte say which products are bound by memory."""
NEAREST = 4
CLOSE = 0.15
"""Distance, in logarithms of sizes, within which measured points count alike."""
FAR = math.log(4)
"""Distance above the largest measured size from which operations less alike, but as large, count instead."""
ALIGNED = 8
"""Elements of 16 bits: products with other sizes take slower kernels."""
LIKE = {"float16": "bfloat16", "bfloat16": "float16"}
Point = tuple[tuple[float, ...], float]
"""Logarithms of sizes, and of the rate."""
Key = tuple[object, ...]


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
        return max(_flops(op), op.num_bytes * _flops_per_byte(op.dtype))
    return _flops(op) or float(op.num_bytes)


@functools.cache
def _flops_per_byte(dtype: str) -> float:
    sheet = gpu(BALANCE_OF)
    assert sheet.memory_bytes_per_s is not None
    return sheet.peak_flops_per_s["fp32" if dtype == "float32" else "bf16"] / sheet.memory_bytes_per_s


def keys(op: Op | OpTime) -> Iterable[Key]:
    """Yield what rows of an operation are found by, the most exact first."""
    base, dtypes = _base(op), (op.dtype, LIKE.get(op.dtype))
    if op.shape:
        kind = base if "grouped" in base else "product"
        odd = op.dtype != "float32" and any(length % ALIGNED for length in op.shape[1:])
        for dtype in dtypes:
            yield kind, dtype, op.layout, odd
            yield kind, dtype, odd
            yield kind, dtype
        return
    if op.kernel:
        for dtype in dtypes:
            yield base, op.kernel, dtype, op.head, op.masked
            yield base, op.kernel, dtype, op.masked
        return
    for dtype in dtypes:
        yield op.op if isinstance(op, OpTime) else op.name, dtype, op.layout
        yield base, dtype, op.layout
        if op.name.startswith("triton_") if isinstance(op, Op) else op.op.startswith("triton_"):
            yield ("triton",)
        yield base, dtype, None
    for dtype in dtypes:
        if not _is_list(base):
            yield "elementwise", dtype, op.layout
    yield "list" if _is_list(base) else "elementwise", None, None


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
        self._rate = functools.lru_cache(maxsize=65536)(self._nearest)
        for row in rows:
            point = size_of(row), math.log(work_of(row) / row.seconds)
            for key in dict.fromkeys(keys(row)):
                if key[0] != "elementwise" or _base(row) in ("add", "mul", "sub", "div", "neg"):
                    self._points.setdefault(key, []).append(point)

    def seconds(self, op: Op) -> float | None:
        """Return the expected seconds of one call; None where nothing like it was measured."""
        size, known = size_of(op), [key for key in keys(op) if key in self._points]
        for key in known:
            if op.shape or op.kernel or size[0] <= max(at[0] for at, _ in self._points[key]) + FAR:
                return work_of(op) / math.exp(self._rate(key, size))
        if not known:
            return None
        largest = max(known, key=lambda key: max(at[0] for at, _ in self._points[key]))
        return work_of(op) / math.exp(self._rate(largest, size))

    def _nearest(self, key: Key, size: tuple[float, ...]) -> float:
        """Return the logarithm of the rate at a size, from the nearest points of a key."""
        points = self._points[key]
        if len(points) == 1:
            return points[0][1]
        near = sorted((math.dist(at, size), rate) for at, rate in points)[:NEAREST]
        weights = [1 / (CLOSE + distance) ** 2 for distance, _ in near]
        return sum(w * rate for w, (_, rate) in zip(weights, near, strict=True)) / sum(weights)
