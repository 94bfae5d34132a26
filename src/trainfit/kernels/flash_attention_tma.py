"""FlashAttention on Hopper: who launches the TMA kernels in Triton and those in Gluon.

Shapes as in flash_attention.py. ``fits`` says which tensors the tensor memory accelerator can carry; all others keep to the
plain kernels. ``Tiles`` is one kernel's configuration; the tuning command tries many (flash_attention_tune.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

ROWS = 128
"""Rows of a program that prepares the backward; the padded length is a multiple of it and of every BLOCK_M."""


@dataclass(frozen=True)
class Tiles:
    """Rows of queries and keys of a tile, warps, pipeline stages, and how many heads run at once."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    heads_at_once: int = 8

    def arguments(self, d: int) -> dict[str, Any]:
        """What the launch of a kernel takes."""
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_D": block_d(d),
            "HEADS_AT_ONCE": self.heads_at_once,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


@dataclass(frozen=True)
class Groups:
    """The Gluon forward: groups of 64 query rows (2 or 3), keys of a tile, stages, heads at once, whether groups alternate."""

    groups: int
    block_n: int
    stages: int
    heads_at_once: int = 8
    take_turns: bool = True


@dataclass(frozen=True)
class Backward:
    """The backward's kernels. ``queries`` None: dQ is added up in fp32 by the keys' kernel (not bit for bit repeatable)."""

    keys: Tiles
    queries: Tiles | None = None


@dataclass(frozen=True)
class GroupsBackward:
    """The Gluon backward: stages and heads at once; its tiles follow from the head size (over 32). Adds dQ up in fp32."""

    stages: int
    heads_at_once: int = 8


def block_d(d: int) -> int:
    """Columns of a tile: the next power of two."""
    return max(16, 1 << (d - 1).bit_length())


def fits(*tensors: Tensor, scale: float) -> bool:
    """Whether TMA carries these [b, heads, rows, d] tensors and the kernels hold for ``scale``: 16 bits, d up to 128,
    contiguous heads, everything else on multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled)."""
    return scale > 0 and all(
        x.dtype in (torch.float16, torch.bfloat16) and x.shape[-1] <= 128 and x.stride(-1) == 1 and x.numel() > 0
        and all(stride % 8 == 0 for stride in x.stride()[:-1]) and _first_byte(x) % 16 == 0
        for x in tensors
    )  # fmt: skip


def _first_byte(x: Tensor) -> int:
    """Its address. A fake tensor has none: CUDA's allocator aligns storages to more than is asked here."""
    return int(x.storage_offset()) * x.element_size() if isinstance(x, FakeTensor) else x.data_ptr()


def _descriptor(x: Tensor, rows: int, d: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, block_d(d)])


def _gluon(x: Tensor, rows: int, columns: int) -> Any:
    """Gluon's descriptor of x, [b, heads, rows, d] or [heads, rows] (the latter one head a tile)."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if x.dim() == 2:
        layout: Any = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows], layout)
    types = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, types[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Output (q's dtype and layout) and log-sum-exp ([b, h, n], fp32)."""
    from triton import cdiv

    from trainfit.kernels import flash_attention_tma_triton

    kernels: Any = flash_attention_tma_triton  # a constexpr argument takes a plain value

    b, h, n, d = q.shape
    out, lse = torch.empty_like(q), torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    rows, keys = tiles.block_m, tiles.block_n
    kernels.forward_tma_kernel[(cdiv(n, rows) * b * h,)](
        _descriptor(q, rows, d), _descriptor(k, keys, d), _descriptor(v, keys, d), _descriptor(out, rows, d),
        lse, scale * math.log2(math.e), n, k.shape[2], h, b * h, h // k.shape[1],
        CAUSAL=is_causal, **tiles.arguments(d),
    )  # fmt: skip
    return out, lse


def gluon_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, how: Groups
) -> tuple[Tensor, Tensor]:
    """As ``forward``, with warps that only load and groups of warps that only compute."""
    from triton import cdiv

    from trainfit.kernels import flash_attention_gluon

    kernels: Any = flash_attention_gluon  # a constexpr argument takes a plain value

    b, h, n, d = q.shape
    out, lse = torch.empty_like(q), torch.empty(b, h, n, dtype=torch.float32, device=q.device)

    rows = kernels.GROUP_ROWS.value
    kernels.forward_gluon_kernel[(cdiv(n, how.groups * rows) * b * h,)](
        _gluon(q, rows, block_d(d)), _gluon(k, how.block_n, block_d(d)), _gluon(v, how.block_n, block_d(d)),
        _gluon(out, rows, block_d(d)), lse,
        scale * math.log2(math.e), n, k.shape[2], h, b * h, h // k.shape[1],
        GROUPS=how.groups, BLOCK_N=how.block_n, BLOCK_D=block_d(d), STAGES=how.stages, CAUSAL=is_causal,
        HEADS_AT_ONCE=how.heads_at_once, TAKE_TURNS=how.take_turns, num_warps=4,
    )  # fmt: skip
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float,
    how: Backward | GroupsBackward,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, in their dtypes and layouts.

    Beside them: two fp32 numbers a row and, where dQ is added up, an fp32 dQ.
    """
    summed = isinstance(how, GroupsBackward) or how.queries is None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dq = torch.empty_like(q, dtype=torch.float32 if summed else q.dtype)
    lse_2, delta = _prepared(gradient, out, lse, dq, summed)
    inputs = (q, k, v, gradient, lse_2, delta)
    if isinstance(how, GroupsBackward):
        _gluon_gradients(inputs, (dq, dk, dv), is_causal, scale, how)
    else:
        _tma_gradients(inputs, (dq, dk, dv), is_causal, scale, how)
    return (dq.mul_(scale).to(q.dtype) if summed else dq), dk, dv


def _prepared(gradient: Tensor, out: Tensor, lse: Tensor, dq: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    """``lse`` in base 2 and delta, [b, h, n rounded up to whole tiles]; zeros in a dQ that is added up."""
    from trainfit.kernels import flash_attention_tma_triton

    kernels: Any = flash_attention_tma_triton  # a constexpr argument takes a plain value

    b, h, n, d = out.shape
    blocks = -(-n // ROWS)
    lse_2, delta = torch.empty(2, b, h, blocks * ROWS, dtype=torch.float32, device=out.device)
    kernels.prepare_tma_kernel[(blocks, b * h)](
        _descriptor(out, ROWS, d), _descriptor(gradient, ROWS, d), _descriptor(dq, ROWS, d), lse, lse_2, delta,
        n, blocks * ROWS, h, BLOCK_M=ROWS, BLOCK_D=block_d(d), WITH_DQ=summed,
    )  # fmt: skip
    return lse_2, delta


def _tma_gradients(
    inputs: tuple[Tensor, ...], results: tuple[Tensor, ...], is_causal: bool, scale: float, how: Backward
) -> None:
    """Fills dq (its unscaled sums without ``how.queries``), dk and dv."""
    from triton import cdiv

    from trainfit.kernels import flash_attention_tma_triton

    kernels: Any = flash_attention_tma_triton  # a constexpr argument takes a plain value

    (q, k, v, gradient, lse_2, delta), (dq, dk, dv) = inputs, results
    (b, h, n, d), (kv_heads, m) = q.shape, k.shape[1:3]

    def carried(tiles: Tiles) -> list[Any]:
        rows, keys = tiles.block_m, tiles.block_n
        return [_descriptor(q, rows, d), _descriptor(k, keys, d), _descriptor(v, keys, d),
                _descriptor(gradient, rows, d), lse_2, delta, _descriptor(dq, rows, d)]  # fmt: skip

    tiles, sizes = how.keys, (scale, scale * math.log2(math.e), n, m, lse_2.shape[-1], h)
    kernels.key_gradient_tma_kernel[(cdiv(m, tiles.block_n) * b * kv_heads,)](
        *carried(tiles), _descriptor(dk, tiles.block_n, d), _descriptor(dv, tiles.block_n, d), *sizes, kv_heads,
        b * kv_heads, CAUSAL=is_causal, WITH_DQ=how.queries is None, **tiles.arguments(d),
    )  # fmt: skip
    if how.queries is not None:
        tiles = how.queries
        kernels.query_gradient_tma_kernel[(cdiv(n, tiles.block_m) * b * h,)](
            *carried(tiles), *sizes, b * h, h // kv_heads, CAUSAL=is_causal, **tiles.arguments(d)
        )


def _gluon_gradients(
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    is_causal: bool,
    scale: float,
    how: GroupsBackward,
) -> None:
    """Fills dq (its unscaled sums), dk and dv."""
    from triton import cdiv

    from trainfit.kernels import flash_attention_backward_gluon

    kernels: Any = flash_attention_backward_gluon  # a constexpr argument takes a plain value

    (q, k, v, gradient, lse_2, delta), (dq, dk, dv) = inputs, results
    (b, h, n, d), (kv_heads, m) = q.shape, k.shape[1:3]
    columns, keys, half = block_d(d), kernels.GROUP_KEYS.value, kernels.HALF.value
    rows = (
        128 * half // columns
    )  # a tile's part of dQ is two halves: of columns, or with a small head of rows
    kernels.backward_gluon_kernel[(cdiv(m, kernels.GROUPS.value * keys) * b * kv_heads,)](
        _gluon(q, rows, columns), _gluon(k, keys, columns), _gluon(v, keys, columns), _gluon(gradient, rows, columns),
        _gluon(lse_2.flatten(0, 1), rows, 0), _gluon(delta.flatten(0, 1), rows, 0), _gluon(dq, half, half),
        _gluon(dk, keys, columns), _gluon(dv, keys, columns), scale, scale * math.log2(math.e), n, m, h, kv_heads,
        b * kv_heads, BLOCK_M=rows, BLOCK_D=columns, STAGES=how.stages, CAUSAL=is_causal,
        HEADS_AT_ONCE=how.heads_at_once, num_warps=4,
    )  # fmt: skip
