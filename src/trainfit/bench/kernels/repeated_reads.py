"""Sums of one set read repeatedly, which measure the bandwidth of the memory that holds the set.

Triton reads through L1 or bypasses it; CUDA C++ reads shared memory, which Triton does not expose.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainfit.bench.kernels import nvcc

BLOCK = 8192  # fp32 that a program reads at once: 32 KiB, 8 reads of 16 bytes in flight a thread
WARPS = 8
SHARED_THREADS, SHARED_FLOATS = 1024, 16384
"""Threads of a block of shared_reads.cu, and the fp32 in its shared memory."""


@dataclass(frozen=True)
class Reads:
    """Access pattern: program p reads blocks p, p + step, ... of ``num_blocks``, one in each of ``turns``."""

    num_blocks: int
    programs: int
    step: int
    turns: int

    @property
    def num_bytes(self) -> int:
        return 4 * BLOCK * self.programs * self.turns


def plain(x: Tensor, how: Reads) -> Tensor:
    """Return each program's sum, fp32 [programs]; x [num_blocks x BLOCK]."""
    of_blocks = x.view(how.num_blocks, BLOCK).sum(1)
    programs, turns = (torch.arange(count, device=x.device) for count in (how.programs, how.turns))
    return of_blocks[(programs[:, None] + turns[None] * how.step) % how.num_blocks].sum(1)


def plain_shared(x: Tensor, blocks: int, turns: int) -> Tensor:
    """Return the result of ``shared_sums``: thread t reads four fp32 at 4 t, 4 t + 4 x SHARED_THREADS, ..."""
    return (turns * x.view(-1, SHARED_THREADS, 4).sum((0, 2))).repeat(blocks)


def triton_sums(x: Tensor, how: Reads, *, past_l1: bool) -> Tensor:
    """Compute ``plain`` by reading every block each time; ``past_l1``: L1 keeps none of it."""
    from trainfit.bench.kernels import repeated_reads_triton as kernels

    sums = torch.empty(how.programs, dtype=torch.float32, device=x.device)
    launcher: Any = kernels.repeated_reads_kernel[(how.programs,)]
    launcher(
        x, sums, how.num_blocks, how.step % how.num_blocks, how.turns,
        BLOCK=BLOCK, PAST_L1=past_l1, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return sums


def shared_sums(x: Tensor, blocks: int, turns: int) -> Tensor:
    """Return fp32 [blocks x SHARED_THREADS]: sums of ``turns`` reads of x [SHARED_FLOATS], shared memory."""
    sums = torch.empty(blocks * SHARED_THREADS, dtype=torch.float32, device=x.device)
    nvcc.launch("shared_reads", x, sums, ctypes.c_int(blocks), ctypes.c_int(turns))
    return sums
