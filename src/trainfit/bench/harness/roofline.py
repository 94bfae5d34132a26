"""The least time that a device's data sheet allows: a shorter one was not measured right."""

from dataclasses import dataclass

from trainfit.spec.hardware import Gpu, PeakDtype

SLACK = 0.92
"""A time below this share is impossible. Clocks go above those that data sheets assume: an H200's tensor peak is 132 multiprocessors x
4096 FLOPs at 1830 MHz, its highest clock 1980 MHz."""


@dataclass(frozen=True)
class Work:
    """What has to be done, at the very least.

    flops: multiplications and additions of ``dtype`` operands; cold_read_bytes: distinct bytes that are read and were not in the
    cache; write_bytes: distinct bytes written.
    """

    flops: float = 0.0
    dtype: PeakDtype = "fp32"
    cold_read_bytes: float = 0.0
    write_bytes: float = 0.0


def least_seconds(work: Work, gpu: Gpu, cache_bytes: int) -> float | None:
    """The longer of arithmetic and memory time at the data sheet's peaks; None where it names neither.

    What is written may still lie in the cache of ``cache_bytes`` when the clock stops, so only the rest must have left it.
    """
    peak = gpu.peak_flops_per_s.get(work.dtype)
    bounds = [work.flops / peak] if peak else []
    if gpu.memory_bytes_per_s:
        moved = work.cold_read_bytes + max(0.0, work.write_bytes - cache_bytes)
        bounds.append(moved / gpu.memory_bytes_per_s)
    return max(bounds) if bounds else None


def is_impossible(seconds: float, least_s: float | None) -> bool:
    """Whether ``seconds`` is less than the data sheet allows."""
    return least_s is not None and seconds < SLACK * least_s
