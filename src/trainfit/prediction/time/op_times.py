"""Times of single operations as a calibration measured them, and the nearest of them for a new shape.

A row is found by operation, dtype and layout, and for attention by head size and mask. Among these the
nearest in size count, each by the rate that it reached beyond a fixed time; the logarithms of the seconds
are averaged with weights that grow with nearness. Compiled kernels are the nearer, the more words their names
share.

Rows of elementwise operations and of copies are interchangeable. An operation of another kind
(catalog/operation_kinds.toml) has its own rows or none: ``aten.sort`` in float32 takes the rows of
``aten.sort`` in int64 by their bytes, and ``aten.convolution``, which was not timed, takes its roofline
(device_time.py), never an addition's seconds a byte for its FLOPs.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from trainfit.catalog.constants import OperationConstants, constants
from trainfit.catalog.operation_kinds import kind_of
from trainfit.ledger.ledger import Op
from trainfit.prediction.time.experts import is_looped, num_groups, one_group, padding
from trainfit.prediction.time.peaks import PEAK_DTYPE, peak_flops_per_s
from trainfit.spec.calibration import OpTime
from trainfit.spec.hardware import Gpu

ALIGNED = 8
"""Elements of 16 bits: matrices whose rows in memory have other lengths take slower kernels."""
ROWS = {"nn": (2, 3), "nt": (2, 3), "tn": (1, 2), "tt": (1, 2, 3)}
"""Layout -> which of (batch, m, n, k) are the length of a row in memory, of an input or of the result."""
BITS_16: dict[str, str] = dict.fromkeys(("float16", "bfloat16"), "16 bits")
"""Dtypes whose rows are interchangeable."""
ADDED = "baddbmm"
"""Product that copies what it adds before, unlike ``addmm``, whose kernel adds a bias."""
FAMILIES = dict.fromkeys(("sum", "mean", "amax", "linalg_vector_norm"), "reduction") | dict.fromkeys(
    ("copy", "_to_copy", "clone"), "copy"
)
"""Operations whose rows are interchangeable."""
OWN_PRODUCTS = ("convolution", "recurrent", "recurrent-backward")
"""Kinds that have a product's shape, and rows of their own alone."""
COMPILED = "triton_"
"""What the names of compiled kernels begin with."""
COPIES_AND_ELEMENTWISE = ("aten", "fsdp")
"""Namespaces whose operations are elementwise or copies where no kind names them; FSDP2's are copies."""
Key = tuple[object, ...]


class Traits(NamedTuple):
    """What a compiled kernel's name says: its kind (pointwise, or a reduction) and its operations' words."""

    kind: str
    words: frozenset[str]

    def distance(self, other: "Traits", known: OperationConstants) -> float:
        """Return how unlike two kernels are."""
        alike = len(self.words & other.words) / max(1, len(self.words | other.words))
        return known.unlike * (1 - alike) + known.other_kind * (self.kind != other.kind)


class Point(NamedTuple):
    """A row: logarithms of its sizes, FLOPs or bytes, seconds, and whether launches take these."""

    size: tuple[float, ...]
    work: float
    seconds: float
    is_latency: bool
    is_cached: bool
    """Its bytes stay in the cache, which moves them faster than the memory."""
    traits: Traits | None


def size_of(op: Op | OpTime, known: OperationConstants) -> tuple[float, ...]:
    """Return the logarithms of what distinguishes calls of one operation."""
    if op.shape:
        return tuple(math.log(max(1, length)) for length in op.shape)
    if op.kernel:
        return math.log(max(1, op.seq)), 0.5 * math.log(max(1.0, _flops(op, known)))
    return (math.log(max(1, op.num_bytes)),)


def _flops(op: Op | OpTime, known: OperationConstants) -> float:
    flops = op.flops if isinstance(op, OpTime) else op.causal_flops
    tile = _tile(op, known)
    return flops * (math.ceil(op.seq / tile) * tile / op.seq) ** 2 if tile else flops


def _tile(op: Op | OpTime, known: OperationConstants) -> int:
    """Return the length of an attention kernel's tiles; 0 where its time shows none.

    A single query, of decoding, has many more keys than queries: padding both alike would count 128 x 128
    times its work.
    """
    if not op.kernel or op.seq <= 1:
        return 0
    return known.attention_tiles.get(op.kernel, (0, 0))["backward" in base_of(op)]


def work_of(op: Op | OpTime, gpu: Gpu, known: OperationConstants) -> float:
    """Return the work that a rate of a GPU is of: FLOPs, or bytes where there are none.

    A product that is bound by memory counts the FLOPs of the time that its bytes take.
    """
    if op.shape:
        more = 1.0
        if "grouped_mm" in base_of(op):
            more = padding(op)
        elif op.dtype == "float32":
            more = _waves(op.shape, gpu.num_sms, known.tiles)
        flops_per_byte = peak_flops_per_s(gpu, PEAK_DTYPE.get(op.dtype, "bf16")) / _bytes_per_s(gpu)
        return max(_flops(op, known) * more, op.num_bytes * flops_per_byte)
    return _flops(op, known) or float(op.num_bytes)


@functools.lru_cache(maxsize=65536)
def _waves(shape: tuple[int, ...], num_sms: int | None, tiles: tuple[tuple[int, int, float], ...]) -> float:
    """Return how much longer a product in fp32 takes as its last tiles leave multiprocessors idle.

    Its time is between that of the whole waves of the best tile, and that of the FLOPs alone. Of a GPU whose
    multiprocessors are not known it is that of the FLOPs.
    """
    if num_sms is None:
        return 1.0
    batch, m, n, _ = shape
    done = min(
        math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / num_sms)
        * num_sms
        * rows
        * columns
        / rate
        for rows, columns, rate in tiles
    )
    return math.sqrt(max(1.0, done / max(1, batch * m * n)))


def _bytes_per_s(gpu: Gpu) -> float:
    assert gpu.memory_bytes_per_s is not None
    return gpu.memory_bytes_per_s


def keys(op: Op | OpTime, known: OperationConstants) -> Iterable[Key]:
    """Yield what rows of an operation are found by, the most exact first."""
    base, dtype = base_of(op), BITS_16.get(op.dtype, op.dtype)
    if kind_of(base) in OWN_PRODUCTS:
        yield base, dtype, op.layout
        yield base, dtype
        return
    if base == ADDED:
        yield base, dtype, op.layout
        if isinstance(op, OpTime):
            return
    if op.shape:
        kind = base if "grouped" in base else "product"
        odd = op.dtype != "float32" and any(op.shape[of] % ALIGNED for of in ROWS.get(op.layout, (1, 2, 3)))
        yield kind, dtype, op.layout, odd
        yield kind, dtype, odd
        yield kind, dtype
        return
    if op.kernel:
        is_partial = op.seq < known.long and bool(op.seq % known.partial)
        yield base, op.kernel, dtype, op.head, op.masked, is_partial
        yield base, op.kernel, dtype, op.head, op.masked
        yield base, op.kernel, dtype, op.masked
        return
    name = op.op if isinstance(op, OpTime) else op.name
    yield name, dtype, op.layout
    yield base, dtype, op.layout
    if name.startswith(COMPILED):
        yield (COMPILED,)
        return
    yield base, dtype, None
    if base in FAMILIES:
        yield FAMILIES[base], dtype, op.layout
    if (op.flops if isinstance(op, OpTime) else op.causal_flops) or not is_elementwise(name):
        yield base, None, None
        return
    if not _is_list(base):
        yield "elementwise", dtype, op.layout
    yield "list" if _is_list(base) else "elementwise", None, None


def is_elementwise(name: str) -> bool:
    """Return whether an operation's time follows from its bytes as an addition's does; copies too."""
    namespace, _, rest = name.partition(".")
    return namespace in COPIES_AND_ELEMENTWISE and kind_of(rest.partition(".")[0].rstrip("_")) is None


def _traits(name: str) -> Traits | None:
    """Return a compiled kernel's traits; None: another operation."""
    if not name.startswith(COMPILED):
        return None
    kind, *words = name.removeprefix(COMPILED).split("_")
    return Traits(kind, frozenset(word for word in words if word and not word.isdigit()))


def _is_list(base: str) -> bool:
    return base.startswith(("_foreach", "_fused", "_amp_foreach"))


def base_of(op: Op | OpTime) -> str:
    """Return an operation's name without namespace, overload and trailing underscore."""
    name = op.op if isinstance(op, OpTime) else op.name
    parts = name.split(".")
    return parts[1].rstrip("_") if len(parts) > 1 else name


class OpTimes:
    """Rows of a calibration by key; ``seconds`` is of the calibrated GPU itself.

    Args:
        gpu: that GPU, whose data sheet says which operations are bound by memory.
    """

    def __init__(self, rows: Iterable[OpTime], gpu: Gpu, known: OperationConstants | None = None):
        self._gpu, self._known = gpu, known or constants().operations
        self._bytes_per_s = _bytes_per_s(self._gpu)
        self._cached_bytes = self._gpu.cached_bytes or self._gpu.l2_cache_bytes or 0
        """Not known of a GPU: no row counts as one of the cache."""
        self._points: dict[Key, list[Point]] = {}
        self._seconds = functools.lru_cache(maxsize=65536)(self._nearest)
        for row in rows:
            point = self._point(row)
            for key in dict.fromkeys(keys(row, self._known)):
                if key[0] != "elementwise" or base_of(row) in ("add", "mul", "sub", "div", "neg"):
                    self._points.setdefault(key, []).append(point)

    def seconds(self, op: Op) -> float | None:
        """Return the expected seconds of one call; None where nothing like it was measured."""
        if is_looped(op):
            taken_s = self.seconds(one_group(op))
            return None if taken_s is None else num_groups(op) * taken_s
        size, work = size_of(op, self._known), work_of(op, self._gpu, self._known)
        known = [key for key in keys(op, self._known) if key in self._points]
        fixed = self._known.fixed_s
        fixed_s = fixed.product if op.shape else fixed.attention if op.kernel else fixed.other
        is_any_size = op.shape or op.kernel or _is_list(base_of(op))
        for key in known:
            if is_any_size or size[0] <= self._largest(key) + self._known.far:
                copied_s = self._copied_s(op) if base_of(op) == ADDED != key[0] else 0.0
                near = self._no_longer(key, size) if op.kernel else size
                return self._seconds(key, near, work, fixed_s, _traits(op.name)) + copied_s
        if not known:
            return None
        return self._seconds(max(known, key=self._largest), size, work, fixed_s, _traits(op.name))

    def has(self, op: Op) -> bool:
        """Return whether something like an operation was measured."""
        return any(key in self._points for key in keys(one_group(op) if is_looped(op) else op, self._known))

    def _no_longer(self, key: Key, size: tuple[float, ...]) -> tuple[float, ...]:
        """Return attention's size; of a length beyond all rows that of as many sequences of the longest.

        Attention's rate grows with the length and levels off. From 262,144 tokens rows of 1,024 and of 8,192
        are about as far, and would weigh about the same. FLOPs grow with the square of the length, and a size
        has half their logarithm.
        """
        beyond = max(0.0, size[0] - max(point.size[0] for point in self._points[key]))
        return size[0] - beyond, size[1] - beyond

    def _largest(self, key: Key) -> float:
        return max(point.size[0] for point in self._points[key])

    def _nearest(
        self, key: Key, size: tuple[float, ...], work: float, fixed_s: float, traits: Traits | None
    ) -> float:
        """Return the seconds of some work of a size, from the nearest points of a key.

        Example: a multiplication of 512 MiB in bf16 was not timed, additions of 256 and of 1,024 MiB were,
        at 70 and 270 us. Its keys lead from ``aten.mul.Tensor`` over ``mul`` to ``elementwise``, which the
        additions are rows of. 2.5 us of each row are fixed, the rest grows with the bytes:

            by the smaller row   2.5 + (70 - 2.5) * 512 / 256    = 137.5 us
            by the larger row    2.5 + (270 - 2.5) * 512 / 1024  = 136.3 us

        Both are a factor of two away, so they weigh the same: the mean of the logarithms is 136.9 us. A row
        of half the distance would have about four times the weight.
        """
        points, known = self._points[key], self._known
        distances = ((self._distance(point, size, traits), point) for point in points)
        near = sorted(distances, key=_first)[: known.nearest]
        weights = [1 / (known.close + distance) ** 2 for distance, _ in near]
        logs = [math.log(self._scaled_s(point, work, fixed_s)) for _, point in near]
        return math.exp(sum(w * value for w, value in zip(weights, logs, strict=True)) / sum(weights))

    def _scaled_s(self, point: Point, work: float, fixed_s: float) -> float:
        """Return the seconds of other work than a row's, of which ``fixed_s`` stay."""
        if point.is_latency:
            reached = self._known.reached * self._bytes_per_s
            return point.seconds + max(0.0, work - point.work) / reached
        fixed_s = min(fixed_s, 0.9 * point.seconds)
        taken_s = fixed_s + (point.seconds - fixed_s) * work / point.work
        leaves_cache = point.is_cached and work > self._cached_bytes
        return max(taken_s, work / self._bytes_per_s) if leaves_cache else taken_s

    def _distance(self, point: Point, size: tuple[float, ...], traits: Traits | None) -> float:
        """Return how far a row is from a call."""
        far = math.dist(point.size, size)
        if point.traits is None or traits is None:
            return far
        return far + point.traits.distance(traits, self._known)

    def _copied_s(self, op: Op) -> float:
        batch, m, n, _ = op.shape
        moved = 2 * batch * m * n * (4 if op.dtype == "float32" else 2)
        return moved / (self._known.copied * self._bytes_per_s)

    def _point(self, row: OpTime) -> Point:
        is_of_bytes = not row.shape and not row.kernel
        known = self._known
        return Point(
            size_of(row, known),
            work_of(row, self._gpu, known),
            row.seconds,
            is_of_bytes and row.num_bytes < known.latency * row.seconds * self._bytes_per_s,
            is_of_bytes and row.num_bytes < self._cached_bytes,
            _traits(row.op),
        )


def _first(pair: tuple[float, Point]) -> float:
    return pair[0]
