"""Bandwidth of each level of a GPU's memory: a set that fits into the level is read repeatedly.

On CUDA every multiprocessor reads blocks of 32 KiB: device memory by a set far larger than any cache, each
byte once; L2 by sets of an eighth to half of it, bypassing L1; L1 by 64 KiB. CUDA C++ kernels read shared,
constant and local memory and registers, whose bytes are the operands of multiply-adds. On a CPU PyTorch's sum
reads sets of some sizes, and C in one thread a set of each cache. The sums of what is read are checked before
anything is timed. A level's row also has its size, and the latency of the chase of the nearest set.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.bench.harness.bench import Bench, Build, Part, Point, of_work
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.timing import Lap
from trainfit.bench.kernels import nvcc, repeated_reads
from trainfit.bench.kernels.repeated_reads import BLOCK, Reads
from trainfit.bench.workloads import cpu_caches, pointer_chase
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.errors import InputError
from trainfit.spec.units import GIB, KIB, MIB

BLOCK_BYTES = 4 * BLOCK
MEMORY_BYTES = 2 * GIB
L2_SHARES = (8, 4, 2)
PROGRAMS_EACH = 2  # Programs of a multiprocessor: both always fit at once
CPU_SET_BYTES = {"tiny": (64 * KIB, MIB), "full": (64 * KIB, MIB, 16 * MIB, 256 * MIB)}
L2_TURNS, L1_TURNS, SHARED_TURNS = 2048, 8192, 4096
"""Two to three ms on an H200, which makes refilling the level after the flush negligible."""
STREAM_THREADS, CHAINS, CONSTANT_WORDS, LOCAL_BYTES = 512, 8, 512, 128
REGISTER_TURNS, CONSTANT_TURNS, LOCAL_TURNS = 65536, 64, 4096
"""Of memory_streams.cu."""
CONSTANT_MEMORY_BYTES, LOCAL_MEMORY_BYTES = 64 * KIB, 512 * KIB
"""Constant memory, and local memory of a thread at most: CUDA C++ Programming Guide, compute capabilities,
table of technical specifications (https://docs.nvidia.com/cuda/cuda-c-programming-guide/, 2026-11-27)."""
CHASED = {
    "shared memory": pointer_chase.SHARED, "constant memory": pointer_chase.CONSTANT,
    "local memory": pointer_chase.LOCAL, "registers": pointer_chase.REGISTER,
}  # fmt: skip
"""Level = the memory that is chased; other levels are of global memory, or of a CPU."""
TOLERANCE = 1e-3  # Relative error of a sum of many fp32 between 0 and 1


class Level(NamedTuple):
    """One level: the set that is read, by what, the bytes of all reads, and those of device memory."""

    name: str
    set_bytes: int
    read_by: str
    num_bytes: int
    cold_bytes: int
    build: Build


def rows(bench: Bench, chased: Sequence[BenchRow] = ()) -> Iterator[BenchRow]:
    """Yield a row for each level, from the farthest to the nearest; the data sheet bounds device memory.

    Args:
        chased: rows of ``pointer_chase``, whose latencies the levels' rows repeat.
    """
    # Clocks of caches vary by some per cent within a second: take more samples than elsewhere.
    rule = replace(bench.rule, hide=True, cap_s=3 * bench.rule.cap_s)
    on_gpu = bench.device.type == "cuda"
    sizes = _sizes(bench.device, chased) if on_gpu else cpu_caches.sizes()
    for level in _levels(bench):
        point = _point(level)
        per_s = bench.gpu.memory_bytes_per_s if bench.gpu and level.cold_bytes else None
        rates = of_work(num_bytes=level.num_bytes, peak=per_s)
        part = Part(point, work=Work(cold_read_bytes=level.cold_bytes), rates=rates)
        numbers: dict[str, Cell] = {"size_bytes": sizes[level.name]} if level.name in sizes else {}
        if (near := pointer_chase.nearest(chased, _space(bench, level), level.set_bytes)) is not None:
            numbers |= {name: near.numbers[name] for name in ("latency_ns", "cycles") if name in near.numbers}
        yield from bench.time([part], level.build, rule, numbers=numbers)


def to_chase(bench: Bench) -> list[pointer_chase.Level]:
    """Return the levels' points, and which chases they need."""
    return [
        pointer_chase.Level(_point(level), _space(bench, level), level.set_bytes, level.name == "L1")
        for level in _levels(bench)
    ]


def _levels(bench: Bench) -> Iterator[Level]:
    return _gpu_levels(bench.device) if bench.device.type == "cuda" else _cpu_levels(bench.form)


def _point(level: Level) -> Point:
    return {"level": level.name, "set_kib": level.set_bytes // KIB, "read by": level.read_by}


def _space(bench: Bench, level: Level) -> str:
    """Return which memory's chase has the level's latency."""
    on_gpu = bench.device.type == "cuda"
    return CHASED.get(level.name, pointer_chase.GLOBAL if on_gpu else pointer_chase.CPU_MEMORY)


def _sizes(device: torch.device, chased: Sequence[BenchRow]) -> dict[str, int]:
    """Return bytes of each level, of one multiprocessor where each has its own; of L1 as the chase shows."""
    known: Any = torch.cuda.get_device_properties(device)
    found = {
        "device memory": known.total_memory,
        "L2": known.L2_cache_size,
        "shared memory": known.shared_memory_per_multiprocessor,
        "constant memory": CONSTANT_MEMORY_BYTES,
        "local memory": LOCAL_MEMORY_BYTES,
    }
    registers = getattr(known, "regs_per_multiprocessor", None)
    found |= {"registers": 4 * registers} if registers else {}
    with suppress(InputError):  # Too few sets were chased.
        found["L1"] = pointer_chase.edge("L1", pointer_chase.global_latencies(chased))
    return found


def _cpu_levels(form: str) -> Iterator[Level]:
    """Yield sets of which a CPU's caches hold the small and not the large."""
    for set_bytes in CPU_SET_BYTES[form]:
        build = partial(_summed, set_bytes)
        yield Level("caches and memory", set_bytes, "PyTorch", set_bytes, 0, build)
    for name, set_bytes in cpu_caches.sets(form).items():
        num_bytes = set_bytes * cpu_caches.turns(set_bytes, form)
        yield Level(
            name, set_bytes, "C (one thread)", num_bytes, 0, partial(cpu_caches.build, set_bytes, form)
        )


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
    threads, warps = programs * STREAM_THREADS, programs * STREAM_THREADS // 32
    set_bytes, num_bytes = 4 * CONSTANT_WORDS, warps * CONSTANT_TURNS * 4 * CONSTANT_WORDS
    build = partial(_constant, programs, device)
    yield Level("constant memory", set_bytes, "CUDA C++ (a word a warp)", num_bytes, 0, build)
    set_bytes, num_bytes = STREAM_THREADS * LOCAL_BYTES, threads * LOCAL_TURNS * LOCAL_BYTES
    yield Level("local memory", set_bytes, "CUDA C++", num_bytes, 0, partial(_local, programs, device))
    set_bytes, num_bytes = 4 * CHAINS * STREAM_THREADS, threads * REGISTER_TURNS * CHAINS * 3 * 4
    build = partial(_registers, programs, device)
    yield Level("registers", set_bytes, "CUDA C++ (three operands)", num_bytes, 0, build)


def _read(how: Reads, past_l1: bool, device: torch.device) -> Callable[[Lap], object]:
    x = torch.rand(how.num_blocks * BLOCK, device=device)
    agree(repeated_reads.triton_sums(x, how, past_l1=past_l1), repeated_reads.plain(x, how))
    return lambda lap: repeated_reads.triton_sums(x, how, past_l1=past_l1)


def _shared(blocks: int, device: torch.device) -> Callable[[Lap], object]:
    x = torch.rand(repeated_reads.SHARED_FLOATS, device=device)
    expected = repeated_reads.plain_shared(x, blocks, SHARED_TURNS)
    agree(repeated_reads.shared_sums(x, blocks, SHARED_TURNS), expected)
    return lambda lap: repeated_reads.shared_sums(x, blocks, SHARED_TURNS)


def _constant(blocks: int, device: torch.device) -> Callable[[Lap], object]:
    words = torch.randint(2**31 - 1, (CONSTANT_WORDS,), dtype=torch.int32, device=device)
    sums = torch.empty(blocks * STREAM_THREADS, dtype=torch.int32, device=device)
    counts = ctypes.c_int(blocks), ctypes.c_int(CONSTANT_TURNS)
    run = partial(nvcc.launch, "stream_constant", words, sums, *counts, source="memory_streams")
    run()
    expected = sum(int((words.long() ^ turn).sum()) for turn in range(CONSTANT_TURNS)) % 2**32
    if not bool(((sums.long() % 2**32) == expected).all()):
        raise ArithmeticError("the sums of what was read are wrong")
    return lambda lap: run()


def _local(blocks: int, device: torch.device) -> Callable[[Lap], object]:
    sums = torch.empty(blocks * STREAM_THREADS, device=device)
    counts = ctypes.c_int(blocks), ctypes.c_int(LOCAL_TURNS)
    run = partial(nvcc.launch, "stream_local", sums, ctypes.c_float(0.0), *counts, source="memory_streams")
    run()
    agree(sums, torch.full_like(sums, LOCAL_TURNS * 4 * sum(range(LOCAL_BYTES // 16))))
    return lambda lap: run()


def _registers(blocks: int, device: torch.device) -> Callable[[Lap], object]:
    sums, one = torch.empty(blocks * STREAM_THREADS, device=device), ctypes.c_float(1.0)
    counts = ctypes.c_int(blocks), ctypes.c_int(REGISTER_TURNS)
    run = partial(nvcc.launch, "stream_register", sums, one, one, *counts, source="memory_streams")
    run()
    agree(sums, torch.full_like(sums, sum(range(CHAINS)) + CHAINS * REGISTER_TURNS))
    return lambda lap: run()


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
