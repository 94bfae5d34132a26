"""Attention of one new token a sequence over its cached keys and values.

Shapes: b sequences, h query heads, k key-value heads (h = g k), m positions that the cache holds, d head_dim;
q [b, h, d], keys and values [b, k, m, d], lengths int32 [b]: positions that are filled, the new token's
included. No gradient: generation only.

A step of decoding reads the whole cache once and computes little with it, so the kernel splits long
sequences over programs, which read their parts at the same time (Flash-Decoding, Dao et al., 2023). Memory:
the result, and with several parts an fp32 result and a logarithm of each.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare
from trainfit.kernels.dry_launch import dry_launcher
from trainfit.spec.errors import InputError

BLOCK = 64
"""Positions that a program reads at a time."""
PROGRAMS = 264
"""Programs that fill a large GPU: two for each of its 132 multiprocessors."""
FEWEST_ROWS = 16
"""Rows of a product on tensor cores; a key-value head with fewer query heads pads them."""


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    window: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    """Return attention of the newest token of each sequence, [b, h, d], with scores over sqrt(d).

    Registers the operator on first use.

    Args:
        window: newest positions that are read; 0: all.
        slopes: fp32 [h], ALiBi's; None: no bias.

    Raises:
        InputError: shapes or dtypes that do not match.
    """
    b, h, d = q.shape if q.dim() == 3 else (0, 0, 0)
    fits = keys.dim() == 4 and keys.shape == values.shape and (keys.shape[0], keys.shape[3]) == (b, d)
    same = q.dtype == keys.dtype == values.dtype
    if not fits or not same or h % keys.shape[1] or lengths.shape != (b,):
        given = ", ".join(f"{list(x.shape)} {x.dtype}" for x in (q, keys, values, lengths))
        raise InputError(
            f"decode_attention takes [b, h, d], [b, k, m, d] twice and [b], not {given}", "reshape them"
        )
    register()
    return torch.ops.trainfit.decode_attention(q, keys, values, lengths, window, slopes)


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.decode_attention``."""
    declare("decode_attention", reference, _fake, triton=triton_decode, dry_run=_dry_run)


def reference(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, window: int, slopes: Tensor | None
) -> Tensor:
    """Compute all scores [b, h, m], softmax in fp32."""
    b, h, d = q.shape
    k, m = keys.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.view(b, k, h // k, d).to(wide)
    scores = grouped @ keys.to(wide).transpose(2, 3) / math.sqrt(d)
    distance = lengths[:, None] - 1 - torch.arange(m, device=q.device)
    if slopes is not None:
        scores -= slopes.view(k, h // k, 1).to(wide) * distance[:, None, None]
    masked = distance < 0
    if window:
        masked |= distance >= window
    weights = scores.masked_fill(masked[:, None, None], float("-inf")).softmax(dim=-1)
    return (weights.nan_to_num() @ values.to(wide)).to(q.dtype).view(b, h, d)


def num_parts(b: int, k: int, m: int) -> int:
    """Return into how many parts a sequence is split: enough to fill a GPU, each of at least four blocks."""
    return max(1, min(math.ceil(PROGRAMS / max(1, b * k)), m // (4 * BLOCK)))


def triton_decode(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, window: int, slopes: Tensor | None
) -> Tensor:
    """Compute ``reference`` by parts of each sequence, in one kernel or two."""
    b, h, d = q.shape
    k, m = keys.shape[1:3]
    parts = num_parts(b, k, m)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lengths, slopes = lengths.contiguous(), None if slopes is None else slopes.contiguous()
    if not b:
        return out
    from trainfit.kernels.decode_attention import triton as module  # Triton need not be installed.

    kernels: Any = module
    if parts == 1:
        partial, logs = out.view(b, h, 1, d), out
    else:
        partial = torch.empty(b, h, parts, d, dtype=torch.float32, device=q.device)
        logs = torch.empty(b, h, parts, dtype=torch.float32, device=q.device)
    block_d = max(16, 1 << (d - 1).bit_length())
    kernels.decode_kernel[(b * k, parts)](
        q, keys, values, lengths, q if slopes is None else slopes, partial, logs, k, h // k, d, m, window,
        1 / math.sqrt(d), *q.stride(), *keys.stride(), *values.stride(), *partial.stride(),
        PARTS=parts, GROUP=max(FEWEST_ROWS, 1 << (h // k - 1).bit_length()), BLOCK=BLOCK, BLOCK_D=block_d,
        HAS_SLOPES=slopes is not None, num_warps=4,
    )  # fmt: skip
    if parts > 1:
        kernels.combine_kernel[(b * h,)](
            partial, logs, out, d, PARTS=parts, BLOCK_PARTS=1 << (parts - 1).bit_length(), BLOCK_D=block_d
        )
    return out


def _dry_run(*arguments: Any, capability: tuple[int, int]) -> Tensor:
    """Allocate and free what a GPU does: the parts' results."""
    return dry_launcher(triton_decode)(*arguments)


def _fake(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, window: int, slopes: Tensor | None
) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
