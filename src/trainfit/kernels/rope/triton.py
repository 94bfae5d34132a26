"""Rotary position embedding in Triton. A program rotates all heads of one position of one sequence."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotate_heads(
    X, OUT, num_heads, head_stride, column_stride, out_head_stride, out_column_stride, cos, sin, half, more,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_MORE: tl.constexpr,
):  # fmt: skip
    pairs = tl.arange(0, BLOCK_D)[None, :]
    for start in range(0, num_heads, BLOCK_H):
        heads = (start + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)  # times a stride of up to n d
        inside = (heads < num_heads) & (pairs < half)
        at, out = X + heads * head_stride, OUT + heads * out_head_stride
        first = tl.load(at + pairs * column_stride, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(at + (pairs + half) * column_stride, mask=inside, other=0.0).to(tl.float32)
        dtype = OUT.dtype.element_ty
        tl.store(out + pairs * out_column_stride, (first * cos - second * sin).to(dtype), mask=inside)
        tl.store(
            out + (pairs + half) * out_column_stride, (second * cos + first * sin).to(dtype), mask=inside
        )
        if BLOCK_MORE > 0:
            rest = tl.arange(0, BLOCK_MORE)[None, :]
            inside_rest = (heads < num_heads) & (rest < more)
            kept = tl.load(at + (rest + 2 * half) * column_stride, mask=inside_rest, other=0.0)
            tl.store(out + (rest + 2 * half) * out_column_stride, kept, mask=inside_rest)


@triton.jit
def rotate_kernel(
    Q, K, Q_OUT, K_OUT, COS, SIN, n, half, more, q_heads, k_heads, sign,
    qb, qh, qn, qd, kb, kh, kn, kd, qob, qoh, qon, qod, kob, koh, kon, kod, cb, cn, cd, sb, sn, sd,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_MORE: tl.constexpr,
):  # fmt: skip
    """Rotate pairs (x_i, x_{i + half}) by their angle, or with ``sign`` -1 back.

    Strides are given per tensor in the order batch, head, position, column.
    """
    b = (tl.program_id(0) // n).to(tl.int64)
    i = (tl.program_id(0) % n).to(tl.int64)
    pairs = tl.arange(0, BLOCK_D)
    inside = pairs < half
    cos = tl.load(COS + b * cb + i * cn + pairs * cd, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(SIN + b * sb + i * sn + pairs * sd, mask=inside, other=0.0).to(tl.float32)[None, :] * sign
    _rotate_heads(
        Q + b * qb + i * qn, Q_OUT + b * qob + i * qon, q_heads, qh, qd, qoh, qod, cos, sin, half, more,
        BLOCK_H, BLOCK_D, BLOCK_MORE,
    )  # fmt: skip
    _rotate_heads(
        K + b * kb + i * kn, K_OUT + b * kob + i * kon, k_heads, kh, kd, koh, kod, cos, sin, half, more,
        BLOCK_H, BLOCK_D, BLOCK_MORE,
    )  # fmt: skip


@triton.jit
def _copy_heads(
    X, OUT, num_heads, head_stride, column_stride, out_head_stride, out_column_stride, half,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, 2 * BLOCK_D)[None, :]
    for start in range(0, num_heads, BLOCK_H):
        heads = (start + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
        inside = (heads < num_heads) & (columns < 2 * half)
        x = tl.load(X + heads * head_stride + columns * column_stride, mask=inside, other=0.0)
        tl.store(OUT + heads * out_head_stride + columns * out_column_stride, x, mask=inside)


@triton.jit
def split_kernel(
    Q, K, V, Q_OUT, K_OUT, V_OUT, COS, SIN, n, half, q_heads, k_heads, sign,
    qb, qn, qh, qd, kb, kn, kh, kd, vb, vn, vh, vd,
    qob, qon, qoh, qod, kob, kon, koh, kod, vob, von, voh, vod, cb, cn, cd, sb, sn, sd,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotate Q and K, whose heads are rotated whole, as ``rotate_kernel``, and copy V.

    Strides are given per tensor in the order batch, position, head, column.
    """
    b = (tl.program_id(0) // n).to(tl.int64)
    i = (tl.program_id(0) % n).to(tl.int64)
    pairs = tl.arange(0, BLOCK_D)
    inside = pairs < half
    cos = tl.load(COS + b * cb + i * cn + pairs * cd, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(SIN + b * sb + i * sn + pairs * sd, mask=inside, other=0.0).to(tl.float32)[None, :] * sign
    _rotate_heads(
        Q + b * qb + i * qn, Q_OUT + b * qob + i * qon, q_heads, qh, qd, qoh, qod, cos, sin, half, 0,
        BLOCK_H, BLOCK_D, 0,
    )  # fmt: skip
    _rotate_heads(
        K + b * kb + i * kn, K_OUT + b * kob + i * kon, k_heads, kh, kd, koh, kod, cos, sin, half, 0,
        BLOCK_H, BLOCK_D, 0,
    )  # fmt: skip
    _copy_heads(
        V + b * vb + i * vn, V_OUT + b * vob + i * von, k_heads, vh, vd, voh, vod, half, BLOCK_H, BLOCK_D
    )
