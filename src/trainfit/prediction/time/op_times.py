"""Times of single operations as a calibration measured them, and the nearest of them for a new shape.

A row is found by operation, dtype and layout, and for attention by head size and mask. Among these the
nearest in size count, each by the rate that it reached beyond a fixed time; the logarithms of the seconds
are averaged, the nearer the more. Compiled kernels are nearer, the more words their names share.

Elementwise operations and copies stand for one another. An operation of another kind
(catalog/operation_kinds.toml) has its own rows or none: ``aten.sort`` in float32 takes the rows of
``aten.sort`` in int64 by their bytes, and ``aten.convolution``, which was not timed, takes its roofline
(device_time.py), never an addition's seconds a byte for its FLOPs.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from trainfit.catalog.load import gpu
from trainfit.catalog.operation_kinds import kind_of
from trainfit.ledger.ledger import Op
from trainfit.prediction.time.experts import is_looped, num_groups, one_group, padding
from trainfit.prediction.time.peaks import PEAK_DTYPE, peak_flops_per_s
from trainfit.spec.calibration import OpTime

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
"""Time of an operation whatever its size, by kind; values with the least error in leave-one-out tests."""
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
OWN_PRODUCTS = ("convolution", "recurrent", "recurrent-backward")
"""Kinds that have a product's shape, and rows of their own alone."""
NUM_SMS = 132
TILES = (
    (256, 128, 1.02), (128, 256, 1.02), (128, 128, 1.0), (128, 64, 0.93), (64, 128, 0.93), (64, 64, 0.8),
    (32, 64, 0.6),
)  # fmt: skip
"""Tiles of fp32 products: rows, columns and relative rate. They lower the leave-one-out error."""
COPIED = 0.8
"""Share of the bandwidth of a copy."""
PARTIAL, LONG = 64, 4096
"""Lengths that are no multiple of the one leave tiles of attention partly empty; in longer
ones than the other they matter little."""
ATTENTION_TILES = {"cudnn": (128, 64), "flash": (128, 128), "efficient": (64, 64)}
"""Tokens of the tiles that an attention kernel computes whole, forward and backward. They predict the rows of
one length from those of the others best; for our kernels none does."""
CACHE_BYTES = 50 * 2**20
"""What stays in the L2 cache of an H100 or H200."""
UNLIKE, OTHER_KIND = 3.0, 1.0
"""Distance of compiled kernels whose names share no word, and of a reduction from another kind of kernel, in
logarithms of sizes. They predict the kernels of one recipe from those of the others best."""
COMPILED = "triton_"
"""What the names of compiled kernels begin with."""
COPIES_AND_ELEMENTWISE = ("aten", "fsdp")
"""Namespaces whose operations are elementwise or copies where no kind names them; FSDP2's are copies."""
Key = tuple[object, ...]


class Traits(NamedTuple):
    """What a compiled kernel's name says: its kind (pointwise, or a reduction) and its operations' words."""

    kind: str
    words: frozenset[str]

    def distance(self, other: "Traits") -> float:
        """Return how unlike two kernels are."""
        alike = len(self.words & other.words) / max(1, len(self.words | other.words))
        return UNLIKE * (1 - alike) + OTHER_KIND * (self.kind != other.kind)


class Point(NamedTuple):
    """A row: logarithms of its sizes, FLOPs or bytes, seconds, and whether launches take these."""

    size: tuple[float, ...]
    work: float
    seconds: float
    is_latency: bool
    is_cached: bool
    """Its bytes stay in the cache, which moves them faster than the memory."""
    traits: Traits | None
    bytes_per_s: float
    """Of the GPU's memory."""

    def scaled(self, work: float, fixed_s: float) -> float:
        """Return the seconds of other work, of which ``fixed_s`` stay."""
        if self.is_latency:
            return self.seconds + max(0.0, work - self.work) / (REACHED * self.bytes_per_s)
        fixed_s = min(fixed_s, 0.9 * self.seconds)
        taken_s = fixed_s + (self.seconds - fixed_s) * work / self.work
        return max(taken_s, work / self.bytes_per_s) if self.is_cached and work > CACHE_BYTES else taken_s

    def distance(self, size: tuple[float, ...], traits: Traits | None) -> float:
        """Return how far the row is from a call."""
        far = math.dist(self.size, size)
        return far if self.traits is None or traits is None else far + self.traits.distance(traits)


def size_of(op: Op | OpTime) -> tuple[float, ...]:
    """Return the logarithms of what distinguishes calls of one operation."""
    if op.shape:
        return tuple(math.log(max(1, length)) for length in op.shape)
    if op.kernel:
        return math.log(max(1, op.seq)), 0.5 * math.log(max(1.0, _flops(op)))
    return (math.log(max(1, op.num_bytes)),)


def _flops(op: Op | OpTime) -> float:
    flops = op.flops if isinstance(op, OpTime) else op.causal_flops
    tile = _tile(op)
    return flops * (math.ceil(op.seq / tile) * tile / op.seq) ** 2 if tile else flops


def _tile(op: Op | OpTime) -> int:
    """Return the length of an attention kernel's tiles; 0 where its time shows none."""
    if not op.kernel or not op.seq:
        return 0
    return ATTENTION_TILES.get(op.kernel, (0, 0))["backward" in base_of(op)]


def work_of(op: Op | OpTime, gpu_name: str) -> float:
    """Return the work that a rate is of: FLOPs, or bytes where there are none.

    A product that is bound by memory counts the FLOPs of the time that its bytes take.
    """
    if op.shape:
        more = 1.0
        if "grouped_mm" in base_of(op):
            more = padding(op)
        elif op.dtype == "float32":
            more = _waves(op.shape)
        return max(_flops(op) * more, op.num_bytes * _flops_per_byte(op.dtype, gpu_name))
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
def _flops_per_byte(dtype: str, gpu_name: str) -> float:
    return peak_flops_per_s(gpu(gpu_name), PEAK_DTYPE.get(dtype, "bf16")) / _bytes_per_s(gpu_name)


@functools.cache
def _bytes_per_s(gpu_name: str) -> float:
    found = gpu(gpu_name).memory_bytes_per_s
    assert found is not None
    return found


def keys(op: Op | OpTime) -> Iterable[Key]:
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
        odd = op.dtype != "float32" and any(length % ALIGNED for length in op.shape[1:])
        yield kind, dtype, op.layout, odd
        yield kind, dtype, odd
        yield kind, dtype
        return
    if op.kernel:
        is_partial = op.seq < LONG and bool(op.seq % PARTIAL)
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
        gpu_name: the catalog's name of that GPU, whose data sheet says which operations are bound by memory.
    """

    def __init__(self, rows: Iterable[OpTime], gpu_name: str):
        self._gpu_name = gpu_name
        self._points: dict[Key, list[Point]] = {}
        self._seconds = functools.lru_cache(maxsize=65536)(self._nearest)
        for row in rows:
            point = _point(row, gpu_name)
            for key in dict.fromkeys(keys(row)):
                if key[0] != "elementwise" or base_of(row) in ("add", "mul", "sub", "div", "neg"):
                    self._points.setdefault(key, []).append(point)

    def seconds(self, op: Op) -> float | None:
        """Return the expected seconds of one call; None where nothing like it was measured."""
        if is_looped(op):
            taken_s = self.seconds(one_group(op))
            return None if taken_s is None else num_groups(op) * taken_s
        size, work = size_of(op), work_of(op, self._gpu_name)
        known = [key for key in keys(op) if key in self._points]
        fixed_s = FIXED_S["product" if op.shape else "attention" if op.kernel else "other"]
        for key in known:
            if op.shape or op.kernel or _is_list(base_of(op)) or size[0] <= self._largest(key) + FAR:
                copied_s = _copied_s(op, self._gpu_name) if base_of(op) == ADDED != key[0] else 0.0
                return self._seconds(key, size, work, fixed_s, _traits(op.name)) + copied_s
        if not known:
            return None
        return self._seconds(max(known, key=self._largest), size, work, fixed_s, _traits(op.name))

    def has(self, op: Op) -> bool:
        """Return whether something like an operation was measured."""
        return any(key in self._points for key in keys(one_group(op) if is_looped(op) else op))

    def _largest(self, key: Key) -> float:
        return max(point.size[0] for point in self._points[key])

    def _nearest(
        self, key: Key, size: tuple[float, ...], work: float, fixed_s: float, traits: Traits | None
    ) -> float:
        """Return the seconds of some work of a size, from the nearest points of a key."""
        points = self._points[key]
        near = sorted(((point.distance(size, traits), point) for point in points), key=_first)[:NEAREST]
        weights = [1 / (CLOSE + distance) ** 2 for distance, _ in near]
        logs = [math.log(point.scaled(work, fixed_s)) for _, point in near]
        return math.exp(sum(w * value for w, value in zip(weights, logs, strict=True)) / sum(weights))


def _copied_s(op: Op, gpu_name: str) -> float:
    batch, m, n, _ = op.shape
    return 2 * batch * m * n * (4 if op.dtype == "float32" else 2) / (COPIED * _bytes_per_s(gpu_name))


def _first(pair: tuple[float, Point]) -> float:
    return pair[0]


def _point(row: OpTime, gpu_name: str) -> Point:
    is_of_bytes = not row.shape and not row.kernel
    return Point(
        size_of(row),
        work_of(row, gpu_name),
        row.seconds,
        is_of_bytes and row.num_bytes < LATENCY * row.seconds * _bytes_per_s(gpu_name),
        is_of_bytes and row.num_bytes < CACHE_BYTES,
        _traits(row.op),
        _bytes_per_s(gpu_name),
    )
