"""Linear cross-entropy in chunks of tokens, in PyTorch: the logits of all tokens never exist at once.

Shapes: n tokens, c tokens per chunk, e hidden size, v vocabulary.

The forward computes a chunk's loss and gradients together and drops its logits; the backward scales the
gradients. Memory: one chunk's logits in the dtype of the products and in fp32 (6 bytes per logit in bf16, 4
in fp32, 8 with a soft cap), and the gradients, which are saved for backward.

Softmax and loss are in fp32 (fp64 for fp64). The weight's gradient is accumulated over chunks in the weight's
dtype, so bf16 rounds once per chunk: relative error of the gradient 0.31 % with one chunk, 0.42 % with 8,
0.65 % with 32, the maximum (tests/kernels/cross_entropy/test_losses.py). Under autocast the weight and its
gradient are fp32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainfit.kernels.cross_entropy.gradients_in_forward import IGNORED_LABEL, Gradients, loss_with_gradients

MIN_ROWS = 1024
"""Minimum tokens per chunk. Reading and writing the weight's gradient (4 e v bytes at 3.5 TB/s) takes as long
as a product (2 c e v FLOPs at 700 TFLOP/s) at c = 400."""
MAX_CHUNKS = 32  # Limits how often the weight's gradient is rounded
ALIGNMENT = 8  # Multiple of a chunk's tokens that tensor cores need


class Head(NamedTuple):
    """Output layer of a language model: ``softcap * tanh(scale * (h W^T + b) / softcap)``."""

    weight: Tensor  # [v, e]
    bias: Tensor | None = None  # [v]
    scale: float = 1.0
    softcap: float | None = None
    kept: Tensor | None = None  # Where the fused loss adds the weight's gradient, if one chunk has all tokens


def chunk_rows(num_tokens: int, hidden_size: int, vocabulary: int) -> int:
    """Return the tokens per chunk: about n e / v, within the limits above.

    Chunks have equal sizes up to the alignment, so the caching allocator reuses the previous chunk's blocks.
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
    """Return the mean cross-entropy, an fp32 scalar (fp64 for fp64).

    Args:
        hidden: [n, e], floating point.
        targets: int64 [n]; IGNORED_LABEL does not count. If all are ignored, the loss is NaN. Other values
            outside the vocabulary give NaN, without synchronising with the device.
        expected_gradient: The gradient that the backward will most likely receive.
        rows: Tokens per chunk; None: ``chunk_rows``.
    """
    weight, bias = head.weight, head.bias
    rows = rows or chunk_rows(hidden.shape[0], hidden.shape[1], weight.shape[0])

    def run(dtype: torch.dtype, needed: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
        wide = torch.promote_types(torch.float32, dtype)
        ignored = targets == IGNORED_LABEL
        columns = targets.clamp(0, weight.shape[0] - 1)
        count = ignored.logical_not().sum().to(wide)
        # NaN for a label outside the vocabulary: F.cross_entropy's device assert would make the GPU unusable.
        count.masked_fill_(((columns != targets) & ~ignored).any(), torch.nan)
        factors = torch.where(ignored, 0.0, expected_gradient / count)
        gradients = Gradients.of(hidden, weight, bias, needed)
        matrix = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)  # fp32 would round once per chunk.
        for first in range(0, hidden.shape[0], rows):
            part = slice(first, first + rows)
            x = hidden[part].to(dtype)
            logits = torch.mm(x, matrix.t()) if bias is None else torch.addmm(bias.to(dtype), x, matrix.t())
            labels = Labels(columns[part, None], ignored[part, None], factors[part, None])
            losses, grad = chunk_loss(logits, labels, head, wide, wants_gradient=any(needed))
            del logits
            total += losses
            gradients.add(part, grad, x, matrix)
            del grad
        return total.div_(count).to(count.dtype), gradients

    return loss_with_gradients(run, hidden, weight, bias, expected_gradient)


class Labels(NamedTuple):
    """One chunk's targets, each [c, 1]."""

    columns: Tensor  # int64, clamped to the vocabulary
    ignored: Tensor
    factors: Tensor  # Factors of the tokens' gradients; 0 where ignored


def chunk_loss(
    logits: Tensor, labels: Labels, head: Head, wide: torch.dtype, *, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the chunk's summed loss and the gradient of its logits [c, v], which overwrites ``logits``.

    Without ``wants_gradient`` the second result is undefined.
    """
    if head.scale != 1.0:
        logits.mul_(head.scale)
    squashed = logits
    if head.softcap is not None:
        squashed = logits.div_(head.softcap).tanh_()
        logits = squashed * head.softcap
    highest = logits.amax(1, keepdim=True)
    shifted = logits.sub_(highest) if logits.dtype == wide else torch.sub(logits, highest.to(wide))
    right = shifted.gather(1, labels.columns)
    exponentials = shifted.exp_()
    totals = exponentials.sum(1, keepdim=True)
    loss = (totals.log() - right).masked_fill_(labels.ignored, 0.0).sum()
    if not wants_gradient:
        return loss, logits
    # (softmax - one-hot) times the row's sum; in fp32, because the difference may be small.
    exponentials.scatter_(1, labels.columns, right.exp() - totals)
    factors = labels.factors / totals * head.scale
    if head.softcap is not None:
        exponentials.mul_(factors)
        torch.ops.aten.tanh_backward.grad_input(exponentials, squashed, grad_input=exponentials)
        return loss, logits.copy_(exponentials)
    if logits is exponentials:
        return loss, exponentials.mul_(factors)
    return loss, torch.mul(exponentials, factors, out=logits)
