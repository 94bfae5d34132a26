"""Scratch and outputs of the fused attention kernels on tensors [batch, heads, seq, head_dim].

Sources: aten/src/ATen/native/transformers/cuda/attention.cu, attention_backward.cu, flash_attn/flash_api.cpp,
mem_eff_attention/kernel_forward.h, kernel_backward.h (``Params::workspace_size``), kernels/cutlassB.h;
aten/src/ATen/native/cudnn/MHA.cpp, cudnn-frontend's node/scaled_dot_product_flash_attention.h.
"""

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from trainfit.virtual.cuda.scratch.call import OUTPUTS, SCRATCH, Call, ceil_div, num_bytes, round_up
from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits

FLOAT = 4
SEED = 8
FLASH_ROWS = 128
LSE_ROWS = 32  # The efficient kernel pads logsumexp to this (kAlignLSE)


def head_dim_rounded(head_dim: int) -> int:
    """Return the head size of flash's accumulators: a multiple of 32, above 128 of 64 (flash_api.cpp)."""
    return round_up(head_dim, 32 if head_dim <= 128 else 64)


@SCRATCH.rule("_scaled_dot_product_flash_attention")
def flash_forward(call: Call) -> tuple[int, ...]:
    """Partial outputs if keys are split because too few queries fill the GPU; with dropout the RNG state."""
    q, k = call.args[0], call.args[1]
    if call.arg(3, "dropout_p", 0.0):
        return (2 * SEED,)
    if call.gpu.gfx:
        return ()
    batch, heads, seq_q, head_dim = q.shape
    splits = flash_splits(batch * heads, seq_q, k.shape[2], head_dim, call.gpu.num_sms)
    if splits <= 1:
        return ()
    rows = splits * batch * heads * seq_q
    return rows * FLOAT, rows * head_dim_rounded(head_dim) * FLOAT


def flash_splits(batch_heads: int, seq_q: int, seq_k: int, head_dim: int, num_sms: int) -> int:
    """Return the number of splits of the keys in flash's forward (``num_splits_heuristic``), at most 128."""
    block_keys = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    key_blocks = ceil_div(seq_k, block_keys)
    work, resident = batch_heads * ceil_div(seq_q, 64), num_sms * 2
    if work >= 0.8 * resident:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(128, resident, key_blocks) + 1):
        # Skip splits that leave each part as many key blocks as one split less.
        if splits == 1 or ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1):
            waves = work * splits / resident
            efficiency[splits] = waves / ceil(waves)
    best = max(efficiency.values())
    return next(splits for splits, value in efficiency.items() if value >= 0.85 * best)


@OUTPUTS.rule("_scaled_dot_product_flash_attention")
def flash_outputs(call: Call) -> dict[int, int]:
    """Logsumexp [b, h, s] in fp32, and on the GPU the RNG state (16 bytes) and an unused tensor (8 bytes)."""
    q = call.args[0]
    batch, heads, seq, _ = q.shape
    sizes = {1: batch * heads * seq * FLOAT, 6: 2 * SEED, 7: SEED}
    return by_tensor(call.out, sizes)


@SCRATCH.rule("_scaled_dot_product_flash_attention_backward")
def flash_backward(call: Call) -> tuple[int, ...]:
    """softmax_d and dq in fp32; with grouped heads dk and dv of every query head (``mha_bwd``).

    Also copies of grad_out and out, unless their memory is ordered [batch, seq, heads, head_dim]. AOTriton
    takes softmax_d and delta, both of [batch, heads, seq] in fp32 (``mha_bwd_aot``).
    """
    grad, q, k, _, out = call.args[:5]
    batch, heads, seq_q, head_dim = q.shape
    heads_k, seq_k = k.shape[1], k.shape[2]
    rows = batch * heads * round_up(seq_q, FLASH_ROWS)
    sizes = [num_bytes(t) for t in (grad, out) if not t.transpose(1, 2).is_contiguous()]
    if call.gpu.gfx:
        return (*sizes, *[batch * heads * seq_q * FLOAT] * 2)
    sizes += [rows * FLOAT, rows * head_dim_rounded(head_dim) * FLOAT]
    if torch.are_deterministic_algorithms_enabled():
        sizes[-1] *= ceil_div(call.gpu.num_sms, batch * heads)
    if heads_k != heads:
        sizes += [batch * seq_k * heads * head_dim * q.element_size()] * 2
    return tuple(sizes)


@SCRATCH.rule("_scaled_dot_product_efficient_attention")
def efficient_forward(call: Call) -> tuple[int, ...]:
    """An fp32 output for 16-bit inputs of head size over 128 (kNeedsOutputAccumulatorBuffer)."""
    q, v = call.args[0], call.args[2]
    batch, heads, seq, _ = q.shape
    if call.gpu.gfx:
        return ()
    if q.element_size() == 2 and v.shape[-1] > 128:
        return (batch * heads * seq * v.shape[-1] * FLOAT,)
    return ()


@OUTPUTS.rule("_scaled_dot_product_efficient_attention")
def efficient_outputs(call: Call) -> dict[int, int]:
    """Optional logsumexp [b, h, s rounded up to 32] in fp32; seed and offset are host tensors."""
    batch, heads, seq, _ = call.args[0].shape
    wanted = call.arg(4, "compute_log_sumexp", False)
    lse = batch * heads * round_up(seq, LSE_ROWS) * FLOAT if wanted else 0
    return by_tensor(call.out, {1: lse, 2: 0, 3: 0})


@SCRATCH.rule("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(call: Call) -> tuple[int, ...]:
    """Delta, the kernel's workspace, and a copy of grad_out unless ordered [batch, seq, heads, head_dim]."""
    grad, q, k, v = call.args[:4]
    dropout = call.args[9]
    batch, heads, seq_q, _ = q.shape
    copies = () if grad.transpose(1, 2).is_contiguous() else (num_bytes(grad),)
    delta = batch * heads * seq_q * FLOAT
    if call.gpu.gfx:
        return (*copies, delta)
    working = (delta, backward_workspace(q, k, v, bool(dropout), call.gpu))
    if q.element_size() == 4:
        # Before the kernel: grad * out, its sum over the head, and that in another layout.
        before = (batch * heads * seq_q * v.shape[-1] * FLOAT, delta, delta if heads > 1 and seq_q > 1 else 0)
        working = max(working, before, key=sum)
    return (*copies, *working)


@OUTPUTS.rule("_scaled_dot_product_cudnn_attention")
def cudnn_outputs(call: Call) -> dict[int, int]:
    """Optional logsumexp [b, h, s] in fp32; seed and offset, 8 bytes each (``_cudnn_attention_forward``)."""
    batch, heads, seq, _ = call.args[0].shape
    wanted = call.arg(4, "compute_log_sumexp", False)
    return by_tensor(call.out, {1: batch * heads * seq * FLOAT if wanted else 0, 6: SEED, 7: SEED})


@SCRATCH.rule("_scaled_dot_product_cudnn_attention")
def cudnn_forward(call: Call) -> tuple[int, ...]:
    """A workspace of one allocator block, measured on an H200 (torch 2.11, cuDNN 9)."""
    return (1,)


@SCRATCH.rule("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(call: Call) -> tuple[int, ...]:
    """One workspace, and a copy of grad_out whose last stride is not 1.

    The workspace has dq and the row sums of grad * out in fp32 (cudnn-frontend
    ``get_fe_workspace_size_node``, cuDNN 9); with grouped heads also dk and dv of every query head, assumed
    in the inputs' dtype.
    """
    grad, q, k, v = call.args[:4]
    batch, heads, seq_q, head_dim = q.shape
    heads_k, seq_k = k.shape[1], k.shape[2]
    workspace = batch * heads * seq_q * (head_dim + 1) * FLOAT
    if heads_k != heads:
        workspace += batch * heads * seq_k * (head_dim + v.shape[-1]) * q.element_size()
    workspace += 1  # One more block, as in the forward.
    return (workspace,) if grad.stride(-1) == 1 else (num_bytes(grad), workspace)


def by_tensor(out: tuple[object, ...], sizes: dict[int, int]) -> dict[int, int]:
    """Convert sizes by position in the output to sizes by position among its tensors."""
    position, found = 0, {}
    for index, value in enumerate(out):
        if isinstance(value, Tensor):
            if index in sizes:
                found[position] = sizes[index]
            position += 1
    return found


A100_SHARED_MEMORY = 163 * 1024
"""The 128-wide kernels need more shared memory than capability 8.6, 8.9 and 12.0 have (99 KiB a block)."""
UNBOUNDED = 65536


class Kernel(NamedTuple):
    """Rows of queries and keys per block of a backward kernel, and its largest head size.

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
