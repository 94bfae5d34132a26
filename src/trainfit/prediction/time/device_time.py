"""Seconds of one operation on the GPU: as calibrated, else by its share of the data sheet. No torch here.

The calibrated operation that is nearest in size gives the rate (op_times.py); attention of which none
is near takes attention_time.py's, and another operation without rows the roofline of its kind
(catalog/operation_kinds.toml). A factor for products and one for other operations lead from
operations timed one by one to those of a step. A GPU without a calibration takes another's time, by what both
data sheets allow.
"""

from functools import lru_cache
from typing import Literal

from trainfit.catalog.constants import constants
from trainfit.catalog.load import reference, sustained
from trainfit.catalog.operation_kinds import OTHER, OperationKind, kind_of, operation_kinds
from trainfit.catalog.rates import Rates
from trainfit.ledger.ledger import Op
from trainfit.prediction.machine import Machine
from trainfit.prediction.time.attention_time import compute_share
from trainfit.prediction.time.calibrated import Calibrated, RowKey
from trainfit.prediction.time.op_times import ALIGNED, base_of
from trainfit.prediction.time.peaks import PEAK_DTYPE, peak_flops_per_s
from trainfit.spec.hardware import Gpu
from trainfit.virtual.cuda.op_kinds import CHANNELS_LAST, POINTWISE, UNWRITTEN

DEPTHWISE_FILTERS = 2
"""Filters of a group up to which a convolution of several groups is depthwise."""
NORMALIZATIONS = ("normalization", "normalization-backward")
Part = Literal["products", "attention", "memory"]


def part_of(op: Op) -> Part:
    """Return the part of the step's time that an operation counts for."""
    return "attention" if op.kernel else "products" if op.causal_flops else "memory"


def uses_tensor_cores(op: Op) -> bool:
    """Return whether an operation is a product on tensor cores, which takes a GPU to its power limit.

    Those of recurrent layers wait for one another.
    """
    if (kind_of(base_of(op)) or "").startswith("recurrent"):
        return False
    return part_of(op) == "products" and on_tensor_cores(op)


def on_tensor_cores(op: Op) -> bool:
    """Return whether products in an operation's dtype are computed on tensor cores."""
    return PEAK_DTYPE.get(op.dtype, "fp32") not in ("fp32", "fp64")


def op_s(op: Op, machine: Machine) -> float:
    """Return the seconds that one operation is expected to take, in one layer; the GPU's rates are known."""
    if not op.calls and not op.num_bytes:
        return 0.0
    # The fields that decide it: equal layers and phases share the result.
    same = op._replace(module="", segment=0, group=0, host=(0, 0, 0, 0), wrapped=(0, 0), in_mode=0)
    return _seconds(same, RowKey(machine.row), machine.known)


@lru_cache(maxsize=65536)
def _seconds(op: Op, row: RowKey, known: Calibrated) -> float:
    if op.name.partition(".")[2].partition(".")[0] in UNWRITTEN:
        return 0.0  # It allocates alone: no kernel.
    gpu, launch_s = row.gpu, op.calls * known.rates.kernel_s
    if not op.num_bytes and not op.causal_flops:
        return launch_s
    dtype = PEAK_DTYPE.get(op.dtype, "fp32")
    taken_s = known.times.seconds(op)
    if taken_s is None:
        return _by_share(op, gpu, dtype) + launch_s
    if gpu.name != known.gpu.name:
        taken_s *= max(sustained_s(op, gpu)) / max(sustained_s(op, known.gpu))
    return max(taken_s * _factor(op, known.rates), launch_s)


def _factor(op: Op, rates: Rates) -> float:
    part = part_of(op)
    if part == "products":
        if op.dtype == "float32":
            return rates.products_fp32
        if op.dtype == "float16":
            return rates.products_fp16
        return rates.grouped if "grouped" in op.name else rates.products
    if part == "attention":
        return 1.0
    is_large = op.num_bytes > constants().operations.not_faster_bytes
    memory = max(1.0, rates.memory) if is_large else rates.memory
    return memory * rates.fp8_casts if _casts_to_fp8(op) else memory


FP8_PRODUCTS = ("_scaled_mm", "add_fp8_weight")
"""In the names of compiled kernels that compute the operands; Inductor shortens long names."""


def _casts_to_fp8(op: Op) -> bool:
    """Return whether an operation is a compiled kernel that casts a product's input to fp8."""
    return op.name.startswith("triton_") and any(product in op.name for product in FP8_PRODUCTS)


def _by_share(op: Op, gpu: Gpu, dtype: str) -> float:
    """Return the roofline of an operation without rows, at the shares of its kind."""
    (compute_s, move_s), (compute, move) = least_s(op, gpu), _share_ratios(op, gpu)
    compute_s, move_s = compute_s / compute, move_s / move
    shares = constants().shares
    if op.kernel:
        return max(compute_s / compute_share(op, gpu), move_s / shares.unknown)
    if dtype == "fp8":
        return max(compute_s / shares.fp8, move_s / shares.unknown)
    kind = operation_kinds()[roofline_kind(op)]
    if kind.units == "cuda" and dtype != "fp64":
        # Without the GPU's share of its peak, which was compared for tensor cores alone.
        compute_s = op.causal_flops / peak_flops_per_s(gpu, "fp32")
    pass_s = move_s / kind.memory
    waited_s = op.shape[0] * kind.position_s if op.shape else 0.0
    compute_s *= _padded(op, kind) / kind.compute
    return max(compute_s, kind.passes * pass_s, waited_s) + kind.copies * pass_s


def roofline_kind(op: Op) -> str:
    """Return the kind whose shares an operation without rows takes."""
    base = base_of(op)
    kind = kind_of(base) if op.name.startswith("aten.") else None
    if kind == "convolution" and op.shape:
        groups, _, num_filters, _ = op.shape
        is_last = op.layout == CHANNELS_LAST
        if groups > 1 and num_filters <= DEPTHWISE_FILTERS:
            return "depthwise" if is_last else "depthwise-channels-first"
        if is_last:
            return kind
        return "channels-first-pointwise" if op.layout == POINTWISE else "channels-first"
    if kind in NORMALIZATIONS:
        if "group" in base and op.layout == CHANNELS_LAST:
            return kind.replace("normalization", "group-normalization-channels-last")
        if "batch" in base and op.dtype == "bfloat16":
            return kind.replace("normalization", "normalization-bf16")
    return kind or ("product" if op.shape else OTHER)


def _padded(op: Op, kind: OperationKind) -> float:
    """Return how much more a kernel of tensor cores computes than its FLOPs: of few filters."""
    if kind.units == "cuda" or not op.shape or kind_of(base_of(op)) != "convolution":
        return 1.0
    return max(1.0, constants().shares.tile_filters / op.shape[2])


def least_s(op: Op, gpu: Gpu) -> tuple[float, float]:
    """Return the seconds at the data sheet's rates: to compute, and to move its bytes."""
    assert gpu.memory_bytes_per_s is not None
    peak = peak_flops_per_s(gpu, PEAK_DTYPE.get(op.dtype, "fp32"))
    return op.causal_flops / peak, op.num_bytes / gpu.memory_bytes_per_s


def sustained_s(op: Op, gpu: Gpu) -> tuple[float, float]:
    """Return the seconds at the rates that the GPU sustains: to compute, and to move the bytes."""
    (compute_s, move_s), (compute, move) = least_s(op, gpu), _shares(op, gpu)
    return compute_s / compute, move_s / move


def _shares(op: Op, gpu: Gpu) -> tuple[float, float]:
    """Return the shares of the peak and of the bandwidth; a GPU without own ones has its reference's."""
    shares = sustained(gpu)
    if PEAK_DTYPE.get(op.dtype, "fp32") in ("fp32", "fp64"):  # No tensor cores: nothing was compared.
        return sustained(reference(gpu)).products, shares.memory
    return (shares.mma if _uses_mma(op) else shares.products), shares.memory


def _uses_mma(op: Op) -> bool:
    """Return whether a 16-bit kernel has Ampere's tensor-core instructions, on every later GPU as well."""
    if kind_of(base_of(op)) == "convolution":
        return False
    return op.kernel in ("flash", "efficient") or any(length % ALIGNED for length in op.shape[1:])


def _share_ratios(op: Op, gpu: Gpu) -> tuple[float, float]:
    """Return what the GPU sustains over what its reference does."""
    (compute, move), (known_compute, known_move) = _shares(op, gpu), _shares(op, reference(gpu))
    return compute / known_compute, move / known_move
