"""Attention's rate: the share of the dense peak that its kernel reached where it was measured. No torch here.

The rates are those of the catalog's attention.toml: by kernel, dtype, head size and length, with a mask given
as a tensor or without, forward and backward apart. A GPU without its own takes the shares of the one that its
column ``attention_rates_of`` names.
"""

from functools import cache
from typing import get_args

from trainfit.catalog.attention import AttentionRate, Dtype, Kernel, attention_runs, nearest_rate
from trainfit.catalog.constants import constants
from trainfit.catalog.load import attention_gpu
from trainfit.ledger.ledger import Ledger, Op
from trainfit.prediction.time.op_times import OpTimes
from trainfit.spec.hardware import Gpu

DTYPES: dict[str, Dtype] = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}
FAR_BEHIND = 3.0
"""Multiple of the fastest kernel's time above which one is far behind (PyTorch's efficient one in bf16)."""
TRAINFITS: tuple[Kernel, ...] = ("gluon", "passes", "plain")


def compute_share(op: Op, gpu: Gpu) -> float:
    """Return the share of its dtype's peak that attention reaches where memory does not bound it."""
    head = _computed_head(op)
    rate = _rate(gpu.attention_rates_of, op.kernel, op.dtype, head, op.seq, op.masked)
    if rate is None:
        known = constants().shares
        is_masked = _masked_in_16_bits(op.masked, op.dtype)
        return known.attention_masked if is_masked else known.attention_unmeasured
    peak = attention_gpu(gpu).peak_flops_per_s[rate.dtype]
    return rate.flops_per_s(backward="backward" in op.name) / peak * op.head / head


def assumptions(ledger: Ledger, gpu: Gpu, times: OpTimes | None = None) -> tuple[str, ...]:
    """Return the origin of the rates of the steady step's attention, one line a kernel.

    Args:
        times: operations of the GPU's calibration; those that it has need no line.
    """
    ops = {
        (op.kernel, op.dtype, _computed_head(op), op.head, op.seq, op.masked)
        for op in ledger.steady_ops
        if op.kernel and (times is None or times.seconds(op) is None)
    }
    return tuple(dict.fromkeys(_origin(gpu, *measured) for measured in sorted(ops)))


def far_behind(ledger: Ledger, gpu: Gpu) -> tuple[str, ...]:
    """Return a line for each kernel of the steady step that another is measured far ahead of.

    Masked attention is left out, which some kernels do not take.
    """
    ops = {
        (op.kernel, op.dtype, _computed_head(op), op.head, op.seq)
        for op in ledger.steady_ops
        if op.kernel and not op.masked and "backward" in op.name
    }
    found: dict[str, None] = {}
    for kernel, dtype, computed, head, seq in sorted(ops):
        rates = [
            rate
            for one in get_args(Kernel)
            if (rate := _rate(gpu.attention_rates_of, one, dtype, computed, seq, False)) is not None
        ]
        own = next((rate for rate in rates if rate.kernel == kernel), None)
        if own is None:
            continue
        equal = [rate for rate in rates if (rate.head, rate.seq) == (own.head, own.seq)]
        fastest = min(equal, key=lambda rate: rate.seconds_of_an_element)
        times = own.seconds_of_an_element / fastest.seconds_of_an_element
        if times > FAR_BEHIND:
            remedy = "triton" if fastest.kernel in TRAINFITS else "sdpa"
            found[
                f"attention in {dtype} with heads of {head} takes about {times:.0f} times as long by the "
                f"{kernel} kernel as by {fastest.kernel}, as measured on {gpu.attention_rates_of}: use "
                f"attention: {remedy}"
            ] = None
    return tuple(found)


def _origin(gpu: Gpu, kernel: str, dtype: str, computed: int, head: int, seq: int, masked: bool) -> str:
    of = f"attention's time, {kernel} kernel, {dtype}, heads of {head} at {seq}"
    of += ", with a mask:" if masked else ":"
    rate = _rate(gpu.attention_rates_of, kernel, dtype, computed, seq, masked)
    if rate is None and _masked_in_16_bits(masked, dtype):
        share = constants().shares.attention_masked
        return f"{of} {share:.0%} of the peak, where ten measured steps with cuDNN need 20% to 33%"
    if rate is None:
        share = constants().shares.attention_unmeasured
        return f"{of} nothing is measured; taken as {share:.0%} of the peak"
    at = f"as measured on {gpu.attention_rates_of} with heads of {rate.head} at {rate.seq}"
    if (rate.head, rate.seq) != (head, seq):
        at += ", the nearest measured"
    if computed != head:
        at += f" (it computes heads of {computed})"
    if masked and not rate.masked:
        at += ", without a mask"
    return f"{of} {at}" + ("" if gpu.name == gpu.attention_rates_of else ", at the same share of the peak")


def _masked_in_16_bits(masked: bool, dtype: str) -> bool:
    return masked and DTYPES.get(dtype) == "bf16"


def _computed_head(op: Op) -> int:
    """Our Triton kernels compute columns of a power of two (kernels/flash_attention/triton_launch.py)."""
    return max(16, 1 << (op.head - 1).bit_length()) if op.kernel in ("plain", "passes") else op.head


@cache
def _rate(gpu: str, kernel: str, dtype: str, head: int, seq: int, masked: bool) -> AttentionRate | None:
    """Return the nearest measured rate; for an unmeasured mask in fp32 that without one, in 16 bits None."""
    if dtype not in DTYPES:
        return None
    for with_mask in (True, False) if masked and not _masked_in_16_bits(masked, dtype) else (masked,):
        rate = nearest_rate(
            attention_runs(), gpu=gpu, kernel=kernel, dtype=DTYPES[dtype], head=head, seq=seq,
            masked=with_mask,
        )  # fmt: skip
        if rate is not None:
            return rate
    return None
