"""Bandwidth of each level of a GPU's memory: a set that fits into the level is read again and again, nothing is written.

On CUDA every multiprocessor reads, in blocks of 32 KiB: device memory by a set far larger than any cache, each byte once; L2 by sets of an eighth
to half of it, all read by all, past L1; L1 by 64 KiB, which each multiprocessor comes to have for itself; shared memory by 64 KiB that
a kernel in CUDA C++ puts there. On a CPU PyTorch's sum reads sets of some sizes. What is read is added up, and the sums are checked before anything is timed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainfit.bench.harness.bench import Bench, Part, Point, of_work
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.timing import Lap
from trainfit.bench.kernels import repeated_reads
from trainfit.bench.kernels.repeated_reads import BLOCK, Reads
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.units import GIB, KIB, MIB

BLOCK_BYTES = 4 * BLOCK
MEMORY_BYTES = 2 * GIB
L2_SHARES = (8, 4, 2)
PROGRAMS_EACH = 2
"""Of a multiprocessor: both always fit at once, so none waits for another."""
CPU_SET_BYTES = {"tiny": (64 * KIB, MIB), "full": (64 * KIB, MIB, 16 * MIB, 256 * MIB)}
L2_TURNS, L1_TURNS, SHARED_TURNS = 2048, 8192, 4096
"""Two to three ms on an H200, beside which filling the level anew after the flush is nothing."""
TOLERANCE = 1e-3
"""Of a sum of many fp32 between 0 and 1."""


def rows(bench: Bench) -> Iterator[BenchRow]:
    """A row for each level, from the farthest to the nearest."""
    if bench.device.type != "cuda":
        for set_bytes in CPU_SET_BYTES[bench.form]:
            yield from _summed(bench, set_bytes)
        return
    properties: Any = torch.cuda.get_device_properties(bench.device)
    programs = PROGRAMS_EACH * properties.multi_processor_count
    blocks = MEMORY_BYTES // BLOCK_BYTES
    yield from _read(bench, "device memory", Reads(blocks, blocks // 4, blocks // 4, 4), past_l1=True)
    for share in L2_SHARES:
        some = properties.L2_cache_size // share // BLOCK_BYTES
        yield from _read(bench, "L2", Reads(some, programs, stride(some, programs), L2_TURNS), past_l1=True)
    yield from _read(bench, "L1", Reads(2, programs, 1, L1_TURNS), past_l1=False)
    yield from _shared(bench, programs)


def stride(num_blocks: int, programs: int) -> int:
    """Blocks from one read of a program to its next: coprime to ``num_blocks``, so that each program comes to all of them.

    What lies between multiprocessors and L2 may answer reads of the same lines that come soon after each other with one read of L2 (a
    step of 1, with which a program reads next what its neighbour reads now, gave 6,900 bytes a clock on an H200). In each turn the
    programs read as many blocks in a row, so a step of that many goes on where the last turn ended, and a block is read again as
    late as the set allows: after about ``num_blocks / programs`` turns. A set of fewer blocks is read whole in each turn; there a
    step of about the golden section of the set puts its turns as far apart as possible.
    """
    wanted = programs if programs < num_blocks else round(num_blocks * (math.sqrt(5) - 1) / 2)
    return next(step for step in range(wanted, wanted + num_blocks) if math.gcd(step, num_blocks) == 1)


def _read(bench: Bench, level: str, how: Reads, *, past_l1: bool) -> Iterator[BenchRow]:
    def build() -> Callable[[Lap], object]:
        x = torch.rand(how.num_blocks * BLOCK, device=bench.device)
        agree(repeated_reads.triton_sums(x, how, past_l1=past_l1), repeated_reads.plain(x, how))
        return lambda lap: repeated_reads.triton_sums(x, how, past_l1=past_l1)

    once = how.num_blocks * BLOCK_BYTES if level == "device memory" else 0
    yield from _row(bench, _point(level, how.num_blocks * BLOCK_BYTES, "Triton"), build, how.num_bytes, once)


def _summed(bench: Bench, set_bytes: int) -> Iterator[BenchRow]:
    """A CPU's caches hold the small sets and not the large."""

    def build() -> Callable[[Lap], object]:
        x = torch.rand(set_bytes // 4)
        return lambda lap: x.sum()

    yield from _row(bench, _point("caches and memory", set_bytes, "PyTorch"), build, set_bytes, 0)


def _shared(bench: Bench, blocks: int) -> Iterator[BenchRow]:
    set_bytes = 4 * repeated_reads.SHARED_FLOATS

    def build() -> Callable[[Lap], object]:
        x = torch.rand(repeated_reads.SHARED_FLOATS, device=bench.device)
        expected = repeated_reads.plain_shared(x, blocks, SHARED_TURNS)
        agree(repeated_reads.shared_sums(x, blocks, SHARED_TURNS), expected)
        return lambda lap: repeated_reads.shared_sums(x, blocks, SHARED_TURNS)

    point = _point("shared memory", set_bytes, "CUDA C++")
    yield from _row(bench, point, build, blocks * SHARED_TURNS * set_bytes, 0)


def _point(level: str, set_bytes: int, by: str) -> Point:
    return {"level": level, "set_kib": set_bytes // KIB, "read by": by}


def _row(
    bench: Bench, point: Point, build: Callable[[], Callable[[Lap], object]], num_bytes: int, cold_bytes: int
) -> Iterator[BenchRow]:
    """One level; the data sheet bounds it where ``cold_bytes`` come from the device's memory."""
    per_s = bench.gpu.memory_bytes_per_s if bench.gpu and cold_bytes else None

    def rates(seconds: float) -> dict[str, Cell]:
        of_sheet = {"of_data_sheet": num_bytes / seconds / per_s} if per_s else {}
        return {**of_work(num_bytes=num_bytes)(seconds), **of_sheet}

    part = Part(point, work=Work(cold_read_bytes=cold_bytes), rates=rates)
    # The clocks of the caches wander by some per cent within a second: more samples than elsewhere.
    yield from bench.time([part], build, replace(bench.rule, hide=True, cap_s=3 * bench.rule.cap_s))


def agree(sums: Tensor, expected: Tensor) -> None:
    """Raise where a sum is not what was to be read.

    Raises:
        ArithmeticError: it is not.
    """
    if not torch.allclose(sums, expected, rtol=TOLERANCE, atol=0.0):
        raise ArithmeticError("the sums of what was read are wrong")
