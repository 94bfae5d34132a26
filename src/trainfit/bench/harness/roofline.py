"""The least time that a device's data sheet allows; a shorter measured time is wrong."""

from dataclasses import dataclass

from trainfit.spec.hardware import Gpu, PeakDtype

SLACK = 0.92
"""A time below this share of the least is impossible. Clocks exceed those of data sheets: an H200's peak
assumes 1830 MHz (132 multiprocessors x 4096 FLOPs), its highest clock is 1980 MHz."""


@dataclass(frozen=True)
class Work:
    """The least work of a run."""

    flops: float = 0.0  # Multiplications and additions of dtype operands
    dtype: PeakDtype = "fp32"
    cold_read_bytes: float = 0.0  # Distinct bytes that are read and were not in the cache
    write_bytes: float = 0.0  # Distinct bytes written


def least_seconds(work: Work, gpu: Gpu, cache_bytes: int) -> float:
    """Return the longer of arithmetic and memory time at the data sheet's peaks; 0 where it has neither.

    Written bytes may still be in the cache of ``cache_bytes`` when the clock stops; only the rest must have
    left it.
    """
    peak = gpu.peak_flops_per_s.get(work.dtype)
    moved = work.cold_read_bytes + max(0.0, work.write_bytes - cache_bytes)
    memory_s = moved / gpu.memory_bytes_per_s if gpu.memory_bytes_per_s else 0.0
    return max(work.flops / peak if peak else 0.0, memory_s)
