"""Bandwidth of each level of a GPU's memory: a set that fits into the level is read repeatedly.

On CUDA every multiprocessor reads blocks of 32 KiB: device memory by a set far larger than any cache, each
byte once; L2 by sets of an eighth to half of it, bypassing L1; L1 by 64 KiB; shared memory by 64 KiB loaded
by a CUDA C++ kernel. On a CPU PyTorch's sum reads sets of some sizes. The sums of what is read are checked
before anything is timed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.bench.harness.bench import Bench, Build, Part, Point, of_work
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.timing import Lap
from trainfit.bench.kernels import repeated_reads
from trainfit.bench.kernels.repeated_reads import BLOCK, Reads
from trainfit.spec.bench import BenchRow
from trainfit.spec.units import GIB, KIB, MIB

BLOCK_BYTES = 4 * BLOCK
MEMORY_BYTES = 2 * GIB
L2_SHARES = (8, 4, 2)
PROGRAMS_EACH = 2  # Programs of a multiprocessor: both always fit at once
CPU_SET_BYTES = {"tiny": (64 * KIB, MIB), "full": (64 * KIB, MIB, 16 * MIB, 256 * MIB)}
L2_TURNS, L1_TURNS, SHARED_TURNS = 2048, 8192, 4096
"""Two to three ms on an H200, which makes refilling the level after the flush negligible."""
TOLERANCE = 1e-3  # Relative error of a sum of many fp32 between 0 and 1


class Level(NamedTuple):
    """One level: the set that is read, by what, the bytes of all reads, and those of device memory."""

    name: str
    set_bytes: int
    read_by: str
    num_bytes: int
    cold_bytes: int
    build: Build


def rows(bench: Bench) -> Iterator[BenchRow]:
    """Yield a row for each level, from the farthest to the nearest; the data sheet bounds device memory."""
    # Clocks of caches vary by some per cent within a second: take more samples than elsewhere.
    rule = replace(bench.rule, hide=True, cap_s=3 * bench.rule.cap_s)
    for level in _gpu_levels(bench.device) if bench.device.type == "cuda" else _cpu_levels(bench.form):
        point: Point = {
            "level": level.name, "set_kib": level.set_bytes // KIB, "read by": level.read_by
        }  # fmt: skip
        per_s = bench.gpu.memory_bytes_per_s if bench.gpu and level.cold_bytes else None
        rates = of_work(num_bytes=level.num_bytes, peak=per_s)
        part = Part(point, work=Work(cold_read_bytes=level.cold_bytes), rates=rates)
        yield from bench.time([part], level.build, rule)


def _cpu_levels(form: str) -> Iterator[Level]:
    """Yield sets of which a CPU's caches hold the small and not the large."""
    for set_bytes in CPU_SET_BYTES[form]:
        build = partial(_summed, set_bytes)
        yield Level("caches and memory", set_bytes, "PyTorch", set_bytes, 0, build)


def _summed(set_bytes: int) -> Callable[[Lap], object]:
    x = torch.rand(set_bytes // 4)
    return lambda lap: x.sum()


def _gpu_levels(device: torch.device) -> Iterator[Level]:
    properties: Any = torch.cuda.get_device_properties(device)
    programs = PROGRAMS_EACH * properties.multi_processor_count
    blocks = MEMORY_BYTES // BLOCK_BYTES
    reads = [("device memory", Reads(blocks, blocks // 4, blocks // 4, 4), True)]
    for share in L2_SHARES:
        some = properties.L2_cache_size // share // BLOCK_BYTES
        reads.append(("L2", Reads(some, programs, stride(some, programs), L2_TURNS), True))
    reads.append(("L1", Reads(2, programs, 1, L1_TURNS), False))
    for name, how, past_l1 in reads:
        set_bytes = how.num_blocks * BLOCK_BYTES
        cold_bytes = set_bytes if name == "device memory" else 0
        build = partial(_read, how, past_l1, device)
        yield Level(name, set_bytes, "Triton", how.num_bytes, cold_bytes, build)
    set_bytes = 4 * repeated_reads.SHARED_FLOATS
    num_bytes = programs * SHARED_TURNS * set_bytes
    yield Level("shared memory", set_bytes, "CUDA C++", num_bytes, 0, partial(_shared, programs, device))


def _read(how: Reads, past_l1: bool, device: torch.device) -> Callable[[Lap], object]:
    x = torch.rand(how.num_blocks * BLOCK, device=device)
    agree(repeated_reads.triton_sums(x, how, past_l1=past_l1), repeated_reads.plain(x, how))
    return lambda lap: repeated_reads.triton_sums(x, how, past_l1=past_l1)


def _shared(blocks: int, device: torch.device) -> Callable[[Lap], object]:
    x = torch.rand(repeated_reads.SHARED_FLOATS, device=device)
    expected = repeated_reads.plain_shared(x, blocks, SHARED_TURNS)
    agree(repeated_reads.shared_sums(x, blocks, SHARED_TURNS), expected)
    return lambda lap: repeated_reads.shared_sums(x, blocks, SHARED_TURNS)


def stride(num_blocks: int, programs: int) -> int:
    """Return the blocks from one read of a program to its next, coprime to ``num_blocks``.

    The fabric between multiprocessors and L2 may merge reads of the same lines that come soon after each
    other (a step of 1 gave an implausible 6,900 bytes a clock on an H200). A step of ``programs`` continues
    where the last turn ended, so a block is read again as late as possible. A set of fewer blocks is read
    whole in each turn; a step near its golden section puts its turns as far apart as possible.
    """
    wanted = programs if programs < num_blocks else round(num_blocks * (math.sqrt(5) - 1) / 2)
    return next(step for step in range(wanted, wanted + num_blocks) if math.gcd(step, num_blocks) == 1)


def agree(sums: Tensor, expected: Tensor) -> None:
    """Raise ArithmeticError where the sums of what was read are wrong."""
    if not torch.allclose(sums, expected, rtol=TOLERANCE, atol=0.0):
        raise ArithmeticError("the sums of what was read are wrong")
