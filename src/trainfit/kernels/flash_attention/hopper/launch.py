"""FlashAttention on Hopper: who launches the kernels in Gluon, whose tiles come and go by TMA.

Shapes as in flash_attention.py. ``fits`` says which tensors the tensor memory accelerator can carry; all others keep to the
kernels in Triton. ``Groups`` and ``GroupsBackward`` are configurations; the tuning command tries many
(benchmarks/kernels/attention_tune.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.kernels.flash_attention.triton_launch import ROWS, block_d


@dataclass(frozen=True)
class Groups:
    """The Gluon forward: groups of 64 query rows (2 or 3), keys of a tile, stages, heads at once."""

    groups: int
    block_n: int
    stages: int
    heads_at_once: int = 8

    @property
    def persistent(self) -> bool:
        """A program each multiprocessor, with many tiles one after the other, else a program each tile."""
        return self.groups == 2


@dataclass(frozen=True)
class GroupsBackward:
    """The Gluon backward: stages and heads at once; its tiles follow from the head size (over 32). Adds dQ up in fp32."""

    stages: int
    heads_at_once: int


class Layout(NamedTuple):
    """All that the choice of a kernel asks of a tensor. Equal layouts, equal choices."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    past_16_bytes: int
    """Its address, modulo 16."""


def layout(x: Tensor) -> Layout:
    """Of a real or fake tensor."""
    return Layout(x.dtype, x.shape, x.stride(), _first_byte(x) % 16)


def fits(layouts: tuple[Layout, ...], has_positive_scale: bool) -> bool:
    """Whether TMA carries these [b, heads, rows, d] tensors and the kernels hold for the scale: 16 bits, d up to 128,
    contiguous heads, everything else on multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled)."""
    return has_positive_scale and all(
        x.dtype in (torch.float16, torch.bfloat16) and x.shape[-1] <= 128 and x.strides[-1] == 1 and 0 not in x.shape
        and all(stride and stride % 8 == 0 for stride in x.strides[:-1]) and x.past_16_bytes == 0
        for x in layouts
    )  # fmt: skip


def _first_byte(x: Tensor) -> int:
    """Its address. A fake tensor has none: CUDA's allocator aligns storages to more than is asked here."""
    return int(x.storage_offset()) * x.element_size() if isinstance(x, FakeTensor) else x.data_ptr()


def _whole(length: int, size: int) -> int:
    """Tiles of ``size`` that hold so many rows. (``size`` may be a dry run's stand-in, which has no minus sign.)"""
    return (length + size - 1) // size


def gluon_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, how: Groups
) -> tuple[Tensor, Tensor]:
    """Output (q's dtype and layout) and log-sum-exp ([b, h, n], fp32).

    Some warps only load, and groups of warps only compute.
    """
    from trainfit.kernels.flash_attention.hopper import forward as flash_attention_gluon
    from trainfit.kernels.flash_attention.hopper import launch_cache as repeated_launch_triton
    from trainfit.kernels.flash_attention.hopper import schedule as flash_attention_schedule

    kernels: Any = flash_attention_gluon  # a constexpr argument takes a plain value
    tile: Any = repeated_launch_triton.Tile
    (b, h, n, d), (kv_heads, m) = q.shape, k.shape[1:3]
    columns = block_d(d)
    out, lse = torch.empty_like(q), torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    rows = kernels.GROUP_ROWS.value
    programs, shift = _whole(n, how.groups * rows) * b * h, 0
    if how.persistent:
        most: Any = flash_attention_schedule.multiprocessors(q.device)
        if programs > most:
            programs = most
        if is_causal:
            sizes = (how.groups * rows, how.block_n, how.heads_at_once)
            shift = flash_attention_schedule.shift_of(n, m, b * h, *sizes, programs)
    of_rows, of_keys = (1, 1, rows, columns), (1, 1, how.block_n, columns)
    repeated_launch_triton.launch(
        kernels.forward_gluon_kernel, (programs,),
        (tile(q, of_rows), tile(k, of_keys), tile(v, of_keys), tile(out, of_rows)),
        (lse, scale * math.log2(math.e), n, m, h, b * h, h // kv_heads, shift),
        {
            "GROUPS": how.groups, "BLOCK_N": how.block_n, "BLOCK_D": columns, "STAGES": how.stages, "CAUSAL": is_causal,
            "HEADS_AT_ONCE": how.heads_at_once,
        },
    )  # fmt: skip
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float,
    how: GroupsBackward,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, in their dtypes and layouts.

    Beside them: two fp32 numbers a row and an fp32 dQ, both of whole tiles.
    """
    b, h, n, d = q.shape
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    sums = torch.empty(b, h, -(-n // ROWS) * ROWS, block_d(d), dtype=torch.float32, device=q.device)
    lse_2, delta = _prepared(gradient, out, lse, sums)
    _gluon_gradients((q, k, v, gradient, lse_2, delta), (sums, dk, dv), is_causal, scale, how)
    return _scaled(sums, q, scale), dk, dv


def _prepared(gradient: Tensor, out: Tensor, lse: Tensor, dq: Tensor) -> tuple[Tensor, Tensor]:
    """``lse`` in base 2 and delta, [b, h, n rounded up to whole tiles]; zeros in dQ."""
    from trainfit.kernels.flash_attention import triton_prepare as flash_attention_prepare_triton
    from trainfit.kernels.flash_attention.hopper import launch_cache as repeated_launch_triton

    tile: Any = repeated_launch_triton.Tile
    b, h, n, d = out.shape
    blocks, block = -(-n // ROWS), (1, 1, ROWS, block_d(d))
    lse_2, delta = torch.empty(2, b, h, blocks * ROWS, dtype=torch.float32, device=out.device)
    repeated_launch_triton.launch(
        flash_attention_prepare_triton.prepare_tma_kernel, (blocks * b * h,),
        (tile(out, block, False), tile(gradient, block, False), tile(dq, block, False)),
        (lse, lse_2, delta, n, blocks * ROWS, h), {"BLOCK_M": ROWS, "BLOCK_D": block_d(d)},
    )  # fmt: skip
    return lse_2, delta


def _scaled(sums: Tensor, like: Tensor, scale: float) -> Tensor:
    """``sums`` ([b, h, padded rows, columns], fp32, in the threads' order) times ``scale``, as a tensor like ``like``."""
    from trainfit.kernels.flash_attention import triton_scale as flash_attention_scale_triton
    from trainfit.kernels.flash_attention.hopper import launch_cache as repeated_launch_triton

    made, (b, h, n, d) = torch.empty_like(like), like.shape
    rows, columns = sums.shape[2:]
    repeated_launch_triton.launch(
        flash_attention_scale_triton.scale_by_thread_kernel, (rows * columns // 4096 * b * h,), (),
        (sums, made, scale, *made.stride()[:3], h, n, rows, d), {"BLOCK_M": 8192 // columns, "BLOCK_D": columns},
    )  # fmt: skip
    return made


def _gluon_gradients(
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    is_causal: bool,
    scale: float,
    how: GroupsBackward,
) -> None:
    """Fills dQ's unscaled sums, dk and dv."""
    from trainfit.kernels.flash_attention.hopper import backward as flash_attention_backward_gluon
    from trainfit.kernels.flash_attention.hopper import launch_cache as repeated_launch_triton

    kernels: Any = flash_attention_backward_gluon  # a constexpr argument takes a plain value
    tile: Any = repeated_launch_triton.Tile
    (q, k, v, gradient, lse_2, delta), (sums, dk, dv) = inputs, results
    (b, h, n, d), (kv_heads, m) = q.shape, k.shape[1:3]
    columns, keys, half = block_d(d), kernels.GROUP_KEYS.value, kernels.HALF.value
    # A tile's part of dQ is two halves: of columns, or with a small head of rows.
    rows = 128 * half // columns
    of_rows, of_keys = (1, 1, rows, columns), (1, 1, keys, columns)
    repeated_launch_triton.launch(
        kernels.backward_gluon_kernel, (_whole(m, kernels.GROUPS.value * keys) * b * kv_heads,),
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
