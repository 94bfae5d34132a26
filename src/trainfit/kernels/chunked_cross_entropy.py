"""Next-token cross-entropy from hidden states, a chunk of tokens at a time: all logits are never there together.

Shapes: n tokens, c tokens of one chunk, e hidden size, v vocabulary.

The loss of a chunk and the gradients of its hidden states and of the head's weight are computed together, in the
forward; the backward multiplies them by the gradient that comes in. So the logits of one chunk are made once and
dropped, and the products are those of the usual way: three of 2 n e v FLOPs.

What is there at the highest point, beside hidden states and weight:

- one chunk's logits in the products' dtype and in fp32: 6 bytes a logit for bf16, 4 for fp32, 8 with soft-capping;
- the gradients of all hidden states and of the weight (and bias), in their own dtypes.

Softmax and loss are computed in fp32 (fp64 stays fp64). The weight's gradient is added up over the chunks in the
weight's own dtype: products accumulate in fp32 inside a chunk, and bf16 rounds once a chunk. The gradient is off by
0.31 % of its norm with one chunk (as the usual way is), 0.42 % with 8, 0.65 % with 32, the most there are
(tests/test_chunked_loss.py); an fp32 sum would cost 4 e v bytes more at the step's peak. Under autocast the weight is
fp32 and so is the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainfit.kernels.gradients_in_forward import IGNORED_LABEL, Gradients, LossSum, loss_with_gradients

MIN_ROWS = 1024
"""Fewest tokens of a chunk. With fewer, reading and writing the weight's gradient once a chunk takes as long as the
products: 4 e v bytes at 3.5 TB/s against 2 c e v FLOPs at 700 TFLOP/s are equal at c = 400."""
MAX_CHUNKS = 32
"""More would round the weight's gradient too often."""
ALIGNMENT = 8
"""Chunks are multiples of it, so that each begins where tensor cores can read."""


class Head(NamedTuple):
    """What makes logits of hidden states: ``softcap * tanh(scale * (h W^T + b) / softcap)``."""

    weight: Tensor
    """[v, e]"""
    bias: Tensor | None = None
    """[v]"""
    scale: float = 1.0
    softcap: float | None = None


def chunk_rows(num_tokens: int, hidden_size: int, vocabulary: int) -> int:
    """Tokens of one chunk: a chunk has about as many logits as all tokens have hidden values, within the bounds above.

    Chunks are of equal size up to the alignment, so that the allocator gives each the block of the one before.
    """
    target = max(MIN_ROWS, num_tokens * hidden_size // vocabulary, -(-num_tokens // MAX_CHUNKS))
    num_chunks = max(1, num_tokens // target)
    rows = -(-num_tokens // num_chunks)
    return min(num_tokens, -(-rows // ALIGNMENT) * ALIGNMENT)


def linear_cross_entropy(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    expected_gradient: Tensor | float = 1.0,
    rows: int | None = None,
) -> Tensor:
    """Mean cross-entropy of ``targets`` given ``hidden``, fp32 scalar (fp64 of fp64).

    Args:
        hidden: [n, e], floating.
        targets: int64 [n]; IGNORED_LABEL takes no part. If all are ignored the loss is NaN, as torch's. Any other that is no
            row of the weight makes the loss and its gradients NaN; nothing waits for the device to find it.
        expected_gradient: what the backward is likely to be given; any other gradient is right too.
        rows: tokens of one chunk; None: ``chunk_rows``.
    """
    rows = rows or chunk_rows(hidden.shape[0], hidden.shape[1], head.weight.shape[0])
    settings = _Settings(head.scale, head.softcap, rows, expected_gradient)

    def run(dtype: torch.dtype, needed: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
        return _forward(hidden, head.weight, head.bias, targets, settings, dtype, needed)

    return loss_with_gradients(run, hidden, head.weight, head.bias, expected_gradient)


class _Settings(NamedTuple):
    scale: float
    softcap: float | None
    rows: int
    expected_gradient: Tensor | float


class _Rows(NamedTuple):
    """One chunk's targets, each [c, 1]."""

    places: Tensor
    """int64, all of them columns."""
    ignored: Tensor
    factors: Tensor
    """What the gradient of a token's loss is multiplied by; 0 where it is ignored."""


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: _Settings,
    dtype: torch.dtype,
    needed: tuple[bool, ...],
) -> tuple[Tensor, Gradients]:
    """Loss, and the gradients of hidden states, weight and bias that are ``needed``, else None.

    Args:
        dtype: of the matrix products.
    """
    wide = torch.promote_types(torch.float32, dtype)
    ignored = targets == IGNORED_LABEL
    places = targets.clamp(0, weight.shape[0] - 1)
    count = ignored.logical_not().sum().to(wide)
    # A label that is no column. torch's own loss stops the program there; a device assert would end the use of the GPU.
    count.masked_fill_(((places != targets) & ~ignored).any(), torch.nan)
    factors = torch.where(ignored, 0.0, settings.expected_gradient / count)
    gradients = Gradients.of(hidden, weight, bias, needed)
    matrix = weight.to(dtype)
    loss = LossSum(hidden.device)
    for first in range(0, hidden.shape[0], settings.rows):
        part = slice(first, first + settings.rows)
        x = hidden[part].to(dtype)
        logits = torch.mm(x, matrix.t()) if bias is None else torch.addmm(bias.to(dtype), x, matrix.t())
        rows = _Rows(places[part, None], ignored[part, None], factors[part, None])
        losses, grad = _chunk(logits, rows, settings, wide, wanted=any(needed))
        del logits
        loss.add(losses)
        gradients.add(part, grad, x, matrix)
        del grad
    return loss.mean(count), gradients


def _chunk(
    logits: Tensor, rows: _Rows, settings: _Settings, wide: torch.dtype, *, wanted: bool
) -> tuple[Tensor, Tensor]:
    """The chunk's summed loss, and the gradient of its products [c, v], in the memory of ``logits``.

    Takes ``logits`` over. Where no gradient is ``wanted``, the second result means nothing.
    """
    if settings.scale != 1.0:
        logits.mul_(settings.scale)
    squashed = logits
    if settings.softcap is not None:
        squashed = logits.div_(settings.softcap).tanh_()
        logits = squashed * settings.softcap
    highest = logits.amax(1, keepdim=True)
    shifted = logits.sub_(highest) if logits.dtype == wide else torch.sub(logits, highest.to(wide))
    right = shifted.gather(1, rows.places)
    exponentials = shifted.exp_()
    totals = exponentials.sum(1, keepdim=True)
    loss = (totals.log() - right).masked_fill_(rows.ignored, 0.0).sum()
    if not wanted:
        return loss, logits
    # Softmax less the target's 1, both times the row's total: subtracted in fp32, where it is small.
    exponentials.scatter_(1, rows.places, right.exp() - totals)
    factors = rows.factors / totals * settings.scale
    if settings.softcap is not None:
        exponentials.mul_(factors)
        torch.ops.aten.tanh_backward.grad_input(exponentials, squashed, grad_input=exponentials)
        return loss, logits.copy_(exponentials)
    if logits is exponentials:
        return loss, exponentials.mul_(factors)
    return loss, torch.mul(exponentials, factors, out=logits)
