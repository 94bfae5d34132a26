"""Launchers of FlashAttention's Gluon kernels, which move tiles by Hopper's tensor memory accelerator (TMA).

Shapes as in op.py. ``fits`` selects the tensors that TMA supports; all others take the Triton kernels.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.kernels.flash_attention.triton_launch import ROWS, block_d


@dataclass(frozen=True)
class Groups:
    """Configuration of the forward: groups of 64 rows (2 or 3), keys per tile, stages, heads at once."""

    groups: int
    block_n: int
    stages: int
    heads_at_once: int = 8
    persistent: bool = False
    """Each multiprocessor runs one program with many tiles, instead of one program per tile (two groups)."""


@dataclass(frozen=True)
class GroupsBackward:
    """Configuration of the backward: stages and heads at once; tiles follow from the head size (over 32)."""

    stages: int
    heads_at_once: int


class Layout(NamedTuple):
    """Everything about a tensor that the choice of a kernel depends on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    past_16_bytes: int  # Address modulo 16


def layout(x: Tensor) -> Layout:
    """Return the layout of a tensor; a fake one's storage is aligned, as on CUDA."""
    first_byte = x.storage_offset() * x.element_size() if isinstance(x, FakeTensor) else x.data_ptr()
    return Layout(x.dtype, x.shape, x.stride(), int(first_byte) % 16)


def fits(layouts: tuple[Layout, ...], has_positive_scale: bool) -> bool:
    """Return whether TMA and the kernels support [b, heads, rows, d] tensors like these, and the scale.

    Required: 16 bits, contiguous columns, addresses and other strides in multiples of 16 bytes
    (CUDA driver API, cuTensorMapEncodeTiled).
    """
    return has_positive_scale and all(
        x.dtype in (torch.float16, torch.bfloat16) and x.strides[-1] == 1
        and 0 not in x.shape and all(stride and stride % 8 == 0 for stride in x.strides[:-1])
        and x.past_16_bytes == 0
        for x in layouts
    )  # fmt: skip


def _num_tiles(length: int, size: int) -> int:
    """Return the tiles that hold ``length`` rows; ``size`` may be a stand-in, which has no unary minus."""
    return (length + size - 1) // size


def gluon_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, how: Groups
) -> tuple[Tensor, Tensor]:
    """Return the output (q's dtype and layout) and log-sum-exp ([b, h, n], fp32)."""
    from trainfit.kernels.flash_attention.hopper import forward, launch_cache, schedule

    kernels: Any = forward  # its constexpr parameters take plain values
    (b, h, n, _), (kv_heads, m), columns = q.shape, k.shape[1:3], block_d(q.shape[-1])
    out, lse = torch.empty_like(q), torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    rows = kernels.GROUP_ROWS.value
    programs, shift = _num_tiles(n, how.groups * rows) * b * h, 0
    if how.persistent:
        most: Any = schedule.multiprocessors(q.device)
        if programs > most:
            programs = most
        if is_causal:
            sizes = (how.groups * rows, how.block_n, how.heads_at_once)
            shift = schedule.shift_of(n, m, b * h, *sizes, programs)
    of_rows, of_keys = (1, 1, rows, columns), (1, 1, how.block_n, columns)
    launch_cache.launch(
        kernels.forward_gluon_kernel, (programs,),
        ((q, of_rows), (k, of_keys), (v, of_keys), (out, of_rows)),
        (lse, scale * math.log2(math.e), n, m, h, b * h, h // kv_heads, shift),
        {
            "GROUPS": how.groups, "BLOCK_N": how.block_n, "BLOCK_D": columns, "STAGES": how.stages,
            "CAUSAL": is_causal, "HEADS_AT_ONCE": how.heads_at_once, "PERSISTENT": how.persistent,
        },
    )  # fmt: skip
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float, how: GroupsBackward,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v in their dtypes and layouts.

    Scratch: two fp32 values per row and an fp32 dQ, both padded to whole tiles.
    """
    from trainfit.kernels.flash_attention import triton_backward_passes as passes
    from trainfit.kernels.flash_attention.hopper import backward, launch_cache

    kernels: Any = backward  # its constexpr parameters take plain values
    (b, h, n, _), (kv_heads, m), columns = q.shape, k.shape[1:3], block_d(q.shape[-1])
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    blocks, block = -(-n // ROWS), (1, 1, ROWS, columns)
    sums = torch.empty(b, h, blocks * ROWS, columns, dtype=torch.float32, device=q.device)
    lse_2, delta = torch.empty(2, b, h, blocks * ROWS, dtype=torch.float32, device=q.device)
    launch_cache.launch(
        passes.prepare_tma_kernel, (blocks * b * h,), ((out, block), (gradient, block), (sums, block)),
        (lse, lse_2, delta, n, blocks * ROWS, h), {"BLOCK_M": ROWS, "BLOCK_D": columns}, in_gluon=False,
    )  # fmt: skip
    # Two groups share a tile of dQ: half of the columns each, or half of the rows for head size 64.
    keys, rows = kernels.GROUP_KEYS.value, 128 * kernels.HALF.value // columns
    of_rows, of_keys = (1, 1, rows, columns), (1, 1, keys, columns)
    launch_cache.launch(
        kernels.backward_gluon_kernel, (_num_tiles(m, kernels.GROUPS.value * keys) * b * kv_heads,),
        (
            (q, of_rows), (k, of_keys), (v, of_keys), (gradient, of_rows),
            (lse_2.flatten(0, 1), (1, rows)), (delta.flatten(0, 1), (1, rows)),
            (sums.view(-1, 128), (32, 128)), (dk, of_keys), (dv, of_keys),
        ),
        (sums.shape[2], scale, scale * math.log2(math.e), n, m, h, kv_heads, b * kv_heads),
        {
            "BLOCK_M": rows, "BLOCK_D": columns, "STAGES": how.stages, "CAUSAL": is_causal,
            "HEADS_AT_ONCE": how.heads_at_once,
        },
    )  # fmt: skip
    return scaled(sums, q, scale), dk, dv


def scaled(sums: Tensor, like: Tensor, scale: float) -> Tensor:
    """Return ``sums`` (fp32 [b, h, padded n, columns] in thread order) times ``scale``, as ``like``."""
    from trainfit.kernels.flash_attention import triton_backward_passes as passes
    from trainfit.kernels.flash_attention.hopper import launch_cache

    out, (b, h, n, d), (rows, columns) = torch.empty_like(like), like.shape, sums.shape[2:]
    launch_cache.launch(
        passes.scale_by_thread_kernel, (rows * columns // 4096 * b * h,), (),
        (sums, out, scale, *out.stride()[:3], h, n, rows, d),
        {"BLOCK_M": 8192 // columns, "BLOCK_D": columns},
    )  # fmt: skip
    return out
