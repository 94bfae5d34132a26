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

    @property
    def persistent(self) -> bool:
        """True if each multiprocessor runs one program with many tiles, instead of one program per tile."""
        return self.groups == 2


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
    past_16_bytes: int
    """Address modulo 16."""


def layout(x: Tensor) -> Layout:
    """Return the layout of a real or fake tensor."""
    return Layout(x.dtype, x.shape, x.stride(), _first_byte(x) % 16)


def fits(layouts: tuple[Layout, ...], has_positive_scale: bool) -> bool:
    """Return whether TMA and the kernels support [b, heads, rows, d] tensors like these, and the scale.

    Required: 16 bits, d up to 128, contiguous columns, addresses and other strides in multiples of 16 bytes
    (CUDA driver API, cuTensorMapEncodeTiled).
    """
    return has_positive_scale and all(
        x.dtype in (torch.float16, torch.bfloat16) and x.shape[-1] <= 128 and x.strides[-1] == 1
        and 0 not in x.shape and all(stride and stride % 8 == 0 for stride in x.strides[:-1])
        and x.past_16_bytes == 0
        for x in layouts
    )  # fmt: skip


def _first_byte(x: Tensor) -> int:
    """Return the address; of a fake tensor the offset in its storage, which is aligned on CUDA."""
    return int(x.storage_offset()) * x.element_size() if isinstance(x, FakeTensor) else x.data_ptr()


def _num_tiles(length: int, size: int) -> int:
    """Return the tiles that hold ``length`` rows; ``size`` may be a stand-in, which has no unary minus."""
    return (length + size - 1) // size


def gluon_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, how: Groups
) -> tuple[Tensor, Tensor]:
    """Return the output (q's dtype and layout) and log-sum-exp ([b, h, n], fp32)."""
    from trainfit.kernels.flash_attention.hopper import forward, launch_cache, schedule

    kernels: Any = forward  # its constexpr parameters take plain values
    tile: Any = launch_cache.Tile
    (b, h, n, d), (kv_heads, m) = q.shape, k.shape[1:3]
    columns = block_d(d)
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
        (tile(q, of_rows), tile(k, of_keys), tile(v, of_keys), tile(out, of_rows)),
        (lse, scale * math.log2(math.e), n, m, h, b * h, h // kv_heads, shift),
        {
            "GROUPS": how.groups, "BLOCK_N": how.block_n, "BLOCK_D": columns, "STAGES": how.stages,
            "CAUSAL": is_causal, "HEADS_AT_ONCE": how.heads_at_once,
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
    b, h, n, d = q.shape
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    sums = torch.empty(b, h, -(-n // ROWS) * ROWS, block_d(d), dtype=torch.float32, device=q.device)
    lse_2, delta = _prepared(gradient, out, lse, sums)
    _gluon_gradients((q, k, v, gradient, lse_2, delta), (sums, dk, dv), is_causal, scale, how)
    return _scaled(sums, q, scale), dk, dv


def _prepared(gradient: Tensor, out: Tensor, lse: Tensor, dq: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``lse`` in base 2 and delta, [b, h, n padded to whole tiles], and set dQ to zeros."""
    from trainfit.kernels.flash_attention import triton_backward_passes
    from trainfit.kernels.flash_attention.hopper import launch_cache

    tile: Any = launch_cache.Tile
    b, h, n, d = out.shape
    blocks, block = -(-n // ROWS), (1, 1, ROWS, block_d(d))
    lse_2, delta = torch.empty(2, b, h, blocks * ROWS, dtype=torch.float32, device=out.device)
    launch_cache.launch(
        triton_backward_passes.prepare_tma_kernel, (blocks * b * h,),
        (tile(out, block, False), tile(gradient, block, False), tile(dq, block, False)),
        (lse, lse_2, delta, n, blocks * ROWS, h), {"BLOCK_M": ROWS, "BLOCK_D": block_d(d)},
    )  # fmt: skip
    return lse_2, delta


def _scaled(sums: Tensor, like: Tensor, scale: float) -> Tensor:
    """Return ``sums`` (fp32 [b, h, padded n, columns] in thread order) times ``scale``, as ``like``."""
    from trainfit.kernels.flash_attention import triton_backward_passes
    from trainfit.kernels.flash_attention.hopper import launch_cache

    out, (b, h, n, d) = torch.empty_like(like), like.shape
    rows, columns = sums.shape[2:]
    launch_cache.launch(
        triton_backward_passes.scale_by_thread_kernel, (rows * columns // 4096 * b * h,), (),
        (sums, out, scale, *out.stride()[:3], h, n, rows, d), {"BLOCK_M": 8192 // columns,
        "BLOCK_D": columns},
    )  # fmt: skip
    return out


def _gluon_gradients(
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    is_causal: bool,
    scale: float,
    how: GroupsBackward,
) -> None:
    """Compute the unscaled sums of dQ, and dk and dv."""
    from trainfit.kernels.flash_attention.hopper import backward, launch_cache

    kernels: Any = backward  # its constexpr parameters take plain values
    tile: Any = launch_cache.Tile
    (q, k, v, gradient, lse_2, delta), (sums, dk, dv) = inputs, results
    (b, h, n, d), (kv_heads, m) = q.shape, k.shape[1:3]
    columns, keys, half = block_d(d), kernels.GROUP_KEYS.value, kernels.HALF.value
    # Two groups share a tile of dQ: half of the columns each, or half of the rows for head size 64.
    rows = 128 * half // columns
    of_rows, of_keys = (1, 1, rows, columns), (1, 1, keys, columns)
    launch_cache.launch(
        kernels.backward_gluon_kernel, (_num_tiles(m, kernels.GROUPS.value * keys) * b * kv_heads,),
        (
            tile(q, of_rows), tile(k, of_keys), tile(v, of_keys), tile(gradient, of_rows),
            tile(lse_2.flatten(0, 1), (1, rows)), tile(delta.flatten(0, 1), (1, rows)),
            tile(sums.view(-1, 128), (32, 128)), tile(dk, of_keys), tile(dv, of_keys),
        ),
        (sums.shape[2], scale, scale * math.log2(math.e), n, m, h, kv_heads, b * kv_heads),
        {
            "BLOCK_M": rows, "BLOCK_D": columns, "STAGES": how.stages, "CAUSAL": is_causal,
            "HEADS_AT_ONCE": how.heads_at_once,
        },
    )  # fmt: skip
