"""FlashAttention in PyTorch, tile by tile: the reference, and the implementation without CUDA or Triton.

Shapes as in op.py. Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.
"""

import math

import torch
from torch import Tensor

TILE = 128  # Rows per tile


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output (q's dtype and layout) and log-sum-exp ([b, h, n] in fp32; fp64 for fp64).

    Scratch: about b h (TILE^2 + TILE d) elements.
    """
    b, h, n, _ = q.shape
    wide = wide_of(q.dtype)
    out = torch.empty_like(q)
    lse = torch.empty(b, h, n, dtype=wide, device=q.device)
    for rows in _tiles(n):
        q_tile = q[:, :, rows].to(wide) * scale
        acc = torch.zeros_like(q_tile)
        total = q_tile.new_zeros(q_tile.shape[:-1])
        highest = q_tile.new_full(q_tile.shape[:-1], -math.inf)
        for keys in _tiles(_num_visible(rows, n, k.shape[2], is_causal)):
            scores = q_tile @ _repeated(k[:, :, keys], h).to(wide).mT
            _mask(scores, rows, keys, n, k.shape[2], is_causal)
            new_highest = torch.maximum(highest, scores.amax(-1))
            safe = new_highest.masked_fill(new_highest == -math.inf, 0.0)
            p = torch.exp(scores - safe[..., None])
            shrink = torch.exp(highest - safe)
            total = total * shrink + p.sum(-1)
            acc = acc * shrink[..., None] + p @ _repeated(v[:, :, keys], h).to(wide)
            highest = new_highest
        none = total == 0
        out[:, :, rows] = (acc / total.masked_fill(none, 1.0)[..., None]).to(q.dtype)
        lse[:, :, rows] = (highest + total.log()).masked_fill(none, -math.inf)
    return out, lse


def tiled_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v in their dtypes and layouts (algorithm 2)."""
    h, n, groups = q.shape[1], q.shape[2], k.shape[1]
    wide = wide_of(q.dtype)
    dq = torch.zeros_like(q, dtype=wide)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    delta = (gradient.to(wide) * out.to(wide)).sum(-1)
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    for keys in _tiles(k.shape[2]):
        k_tile, v_tile = _repeated(k[:, :, keys], h).to(wide), _repeated(v[:, :, keys], h).to(wide)
        dk_tile, dv_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for rows in _tiles(n):
            if is_causal and rows.stop - 1 + k.shape[2] - n < keys.start:
                continue
            q_tile, do_tile = q[:, :, rows].to(wide), gradient[:, :, rows].to(wide)
            scores = q_tile @ k_tile.mT * scale
            _mask(scores, rows, keys, n, k.shape[2], is_causal)
            p = torch.exp(scores - lse[:, :, rows, None])
            dv_tile += p.mT @ do_tile
            ds = p * (do_tile @ v_tile.mT - delta[:, :, rows, None])
            dk_tile += ds.mT @ q_tile * scale
            dq[:, :, rows] += ds @ k_tile * scale
        dk[:, :, keys] = _summed(dk_tile, groups).to(k.dtype)
        dv[:, :, keys] = _summed(dv_tile, groups).to(v.dtype)
    return dq.to(q.dtype), dk, dv


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(length: int) -> list[slice]:
    return [slice(first, min(first + TILE, length)) for first in range(0, length, TILE)]


def _num_visible(rows: slice, n: int, m: int, is_causal: bool) -> int:
    """Return how many keys, from the first on, at least one of these rows attends to."""
    return max(0, min(m, rows.stop + m - n)) if is_causal else m


def _mask(scores: Tensor, rows: slice, keys: slice, n: int, m: int, is_causal: bool) -> None:
    """Mask the scores of keys after i + m - n for query i."""
    if is_causal and keys.stop - 1 > rows.start + m - n:
        last = torch.arange(rows.start, rows.stop, device=scores.device)[:, None] + (m - n)
        scores.masked_fill_(torch.arange(keys.start, keys.stop, device=scores.device) > last, -math.inf)


def _repeated(x_bkmd: Tensor, heads: int) -> Tensor:
    group = heads // x_bkmd.shape[1]
    return x_bkmd if group == 1 else x_bkmd.repeat_interleave(group, dim=1)


def _summed(x_bhmd: Tensor, groups: int) -> Tensor:
    return x_bhmd if x_bhmd.shape[1] == groups else x_bhmd.unflatten(1, (groups, -1)).sum(2)
