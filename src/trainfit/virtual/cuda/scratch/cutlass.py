"""Kernel and workspace of the memory-efficient attention's backward, for compute capability 8.0 and later.

Source: mem_eff_attention/kernel_backward.h (``Params::workspace_size``), kernels/cutlassB.h (the kernels in
order), attention_backward.cu (choice of the kernel, number of key splits).
"""

from typing import NamedTuple

from torch import Tensor

from trainfit.virtual.cuda.scratch.call import ceil_div, round_up
from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits

A100_SHARED_MEMORY = 163 * 1024
"""The 128-wide kernels need more shared memory than capability 8.6, 8.9 and 12.0 have (99 KiB a block)."""
UNBOUNDED = 65536


class Kernel(NamedTuple):
    """An instance of the backward kernel: rows of queries and keys per block, and the largest head size.

    ``large``: needs the shared memory of an A100. ``dropout``: supports dropout.
    """

    queries: int
    keys: int
    max_head_dim: int
    large: bool = False
    dropout: bool = True


HALF_KERNELS = (
    Kernel(64, 64, 32), Kernel(64, 64, 64), Kernel(128, 128, 128, large=True), Kernel(64, 64, 128),
    Kernel(128, 64, UNBOUNDED, large=True), Kernel(64, 64, UNBOUNDED),
)  # fmt: skip
CONSUMER_HALF_KERNELS = (*HALF_KERNELS[:2], Kernel(128, 64, 96, dropout=False), *HALF_KERNELS[2:])
"""With an extra kernel on capability 8.6 and 8.9."""
FLOAT_KERNELS = (
    Kernel(64, 64, 32), Kernel(64, 64, 64), Kernel(128, 64, 128, large=True), Kernel(64, 64, 128),
    Kernel(128, 64, UNBOUNDED, large=True), Kernel(64, 64, UNBOUNDED),
)  # fmt: skip


def choose_kernel(head_dim: int, half: bool, dropout: bool, gpu: GpuTraits) -> Kernel:
    """Return the first kernel that supports the head size and fits the GPU's shared memory."""
    consumer = gpu.compute_capability in ((8, 6), (8, 9))
    kernels = FLOAT_KERNELS if not half else CONSUMER_HALF_KERNELS if consumer else HALF_KERNELS
    return next(
        kernel
        for kernel in kernels
        if head_dim <= kernel.max_head_dim
        and (kernel.dropout or not dropout)
        and (not kernel.large or gpu.shared_memory_bytes >= A100_SHARED_MEMORY)
    )


def backward_workspace(q: Tensor, k: Tensor, v: Tensor, dropout: bool, gpu: GpuTraits) -> int:
    """Return the workspace's bytes: fp32 dq tiles with locks, and dk, dv tiles that exceed the registers."""
    batch, heads, seq_q, head_dim = q.shape
    seq_k, head_dim_v = k.shape[2], v.shape[-1]
    half = q.element_size() == 2
    kernel = choose_kernel(max(head_dim, head_dim_v), half, dropout, gpu)
    in_registers = half and kernel.max_head_dim <= kernel.queries
    splits = ceil_div(seq_k, kernel.keys)
    needs_dk = half and not in_registers
    if needs_dk:
        splits = max(1, min(splits, 200 // (batch * heads)))
    tile = kernel.queries * kernel.keys + 4
    elements = ceil_div(seq_q, kernel.queries) * ceil_div(head_dim, kernel.keys) * tile
    if needs_dk:
        elements += (
            splits * kernel.keys * (round_up(head_dim, kernel.queries) + round_up(head_dim_v, kernel.queries))
        )
    return batch * heads * round_up(elements, 4) * 4
