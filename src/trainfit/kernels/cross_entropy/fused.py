"""Linear cross-entropy in chunks of tokens: cuBLAS for the products, one Triton kernel for the rest.

Shapes: n tokens, c tokens per chunk, e hidden size, v vocabulary.

Per chunk: logits = hidden W^T; one kernel writes c losses and replaces the logits by their gradient; two
products give the gradients of hidden states and, accumulated, of the weight. The backward only scales them.
Where gradients of micro-batches are summed in a kept tensor and one chunk has all tokens, the backward adds
the weight's by the product itself: the sum is rounded once for each micro-batch.

Memory: the gradients, which are saved for backward; one chunk's logits in the dtype of the products (2 c v
bytes in bf16, at most 1.42 times LOGITS_BYTES where these hold MIN_ROWS) and 12 n bytes. A single chunk that
adds to a kept sum has up to e tokens more, whose logits take no more than the weight's gradient, which is not
made. Autocast adds the weight in that dtype and one product of its shape (2 e v bytes each).

Softmax and loss are in fp32 (fp64 for fp64). The weight's gradient is accumulated over chunks in the weight's
dtype, so bf16 rounds once per chunk: relative error of the gradient against fp64 0.27 % with one chunk, 0.32
% with 4 (tests/kernels/cross_entropy/test_losses.py).

Unlike chunked.py, a logit takes 2 bytes instead of 6, label smoothing and z-loss (Chowdhery et al., PaLM,
arXiv:2204.02311, section 5) are supported, and a bias is not.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.kernels.cross_entropy.chunked import Head
from trainfit.kernels.cross_entropy.gradients_in_forward import Gradients, LateProduct, loss_with_gradients
from trainfit.kernels.cross_entropy.terms import Terms, cross_entropy_with_terms
from trainfit.kernels.custom_op import declare, triton_kernels, uses_triton
from trainfit.spec.errors import InputError

LOGITS_BYTES = 2**29
"""About what one chunk's logits take: 2,048 tokens of 131,072 bf16 logits. Each chunk reads and writes the
weight's gradient, so half of it takes longer; on an H100 twice as much is 0 to 4 % faster in the products
(docs/log.md, 2026-11-28).
"""
MIN_ROWS = 128  # A tile of the matrix products
ROW_ALIGNMENT = 16
"""Multiple of the row stride of logits, so that tensor cores can read rows of any vocabulary."""
PLAIN_ROWS = 64  # Rows per step of the PyTorch implementation


def fused_rows(num_tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return the tokens per chunk: the power of two whose logits are the nearest to LOGITS_BYTES, by ratio.

    The chunk's tokens are rows of two products and the summed dimension of the third: on an H100 chunks of
    2,048 take 5 to 10 % less time than of 1,664, the multiple of 128 that LOGITS_BYTES hold of 151,936 logits
    (docs/log.md, 2026-11-28). Logits take at most 1.42 times LOGITS_BYTES. The last chunk has what is left:
    no more chunks than of equal size, and as many bytes of the weight's gradient to read and write.

    Example: 5,000 tokens of 151,936 bf16 logits. LOGITS_BYTES hold 1,767 of them: 2,048, 2,048 and 904.
    """
    held = max(1.0, LOGITS_BYTES / (vocabulary * dtype.itemsize))
    return max(1, min(num_tokens, max(MIN_ROWS, 2 ** round(math.log2(held)))))


def is_one_chunk(num_tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype) -> bool:
    """Return whether one chunk takes all tokens where the weight's gradient is added to a kept sum.

    The logits then wait for the backward, and no gradient of the weight is made. They may take as much as
    that gradient and the logits of a chunk of ``fused_rows``, so it needs no more memory.
    """
    return num_tokens <= fused_rows(num_tokens, vocabulary, dtype) + hidden_size


def fused_linear_cross_entropy(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    terms: Terms | None = None,
    *,
    expected_gradient: Tensor | float = 1.0,
    rows: int | None = None,
) -> Tensor:
    """Return the mean cross-entropy, an fp32 scalar (fp64 for fp64). Registers the operator on first use.

    Args:
        hidden: [n, e], floating point.
        targets: int64 [n]; ``ignore_index`` does not count. If all are ignored, the loss is NaN and the
            gradients 0. Other values outside the vocabulary give NaN, without synchronising with the device.
        expected_gradient: The gradient that the backward will most likely receive.
        rows: Tokens per chunk; None: ``fused_rows``.

    Raises:
        InputError: The head has a bias.
    """
    refuse_bias(head.bias)
    register()
    weight, terms = head.weight, terms or Terms()

    def run(dtype: torch.dtype, needed: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
        n, v = hidden.shape[0], weight.shape[0]
        kept = head.kept if needed[1] and rows is None else None
        if kept is not None and not (kept.dtype == dtype and is_one_chunk(n, hidden.shape[1], v, dtype)):
            kept = None
        c = rows or fused_rows(n, v, dtype) if kept is None else max(1, n)
        count = (targets != terms.ignore_index).sum().to(torch.promote_types(torch.float32, dtype))
        arguments = (expected_gradient / count, head.scale, head.softcap or 0.0, *terms, any(needed))
        gradients = Gradients.of(hidden, weight, None, (needed[0], needed[1] and kept is None, False))
        matrix = weight.to(dtype)
        buffer = logits_buffer(hidden, min(c, n), v, dtype)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)  # fp32 would round once per chunk.
        for first in range(0, n, c):
            part = slice(first, first + c)
            x = hidden[part].to(dtype)
            logits = buffer[: x.shape[0]]
            torch.mm(x, matrix.t(), out=logits)
            total += torch.ops.trainfit.cross_entropy_(logits, targets[part], *arguments).sum()
            gradients.add(part, logits, x, matrix)
            if kept is not None:
                gradients = gradients._replace(late=LateProduct(kept, logits, x))
        return total.div_(count).to(count.dtype), gradients

    return loss_with_gradients(run, hidden, weight, None, expected_gradient)


def logits_buffer(like: Tensor, rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Return memory for logits whose rows tensor cores can read, uninitialised [rows, vocabulary]."""
    columns = -(-vocabulary // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return like.new_empty(rows, columns, dtype=dtype)[:, :vocabulary]


def refuse_bias(bias: Tensor | None) -> None:
    """Raise InputError if the output layer has a bias."""
    if bias is not None:
        raise InputError("the output layer has a bias", "use loss: chunked", field="loss", value="fused")


def plain_linear_cross_entropy(
    hidden: Tensor, head: Head, targets: Tensor, terms: Terms | None = None
) -> Tensor:
    """Compute the loss from all logits at once, with autograd's gradients: the reference."""
    logits = F.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return cross_entropy_with_terms(logits, targets, terms or Terms())


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.cross_entropy_``, which returns the losses [c] of logits [c, v] in fp32.

    With ``wants_gradient`` it overwrites the logits with ``factor``, one number or [c], times the gradient of
    the losses. ``torch.ops.trainfit.token_losses`` returns the losses alone.
    """
    declare("cross_entropy_", _run, _fake, mutates=("logits",))
    declare("token_losses", _losses, _fake)


def _run(
    logits: Tensor, targets: Tensor, factor: Tensor, scale: float, softcap: float,
    label_smoothing: float, z_loss: float, ignore_index: int, wants_gradient: bool,
) -> Tensor:  # fmt: skip
    run = triton_cross_entropy if uses_triton(logits) else plain_cross_entropy
    terms = Terms(label_smoothing, z_loss, ignore_index)
    return run(logits, targets, factor, scale, softcap, terms, wants_gradient)


def _losses(logits: Tensor, targets: Tensor, scale: float, softcap: float) -> Tensor:
    return _run(logits, targets, targets, scale, softcap, *Terms(), False)


def _fake(logits: Tensor, targets: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))


def triton_cross_entropy(
    logits: Tensor, targets: Tensor, factor: Tensor, scale: float, softcap: float, terms: Terms,
    wants_gradient: bool, *, block: int = 2048, num_warps: int = 8,
) -> Tensor:  # fmt: skip
    """Compute ``plain_cross_entropy`` in one kernel."""
    c, v = logits.shape
    assert logits.stride(1) == 1, "the kernel takes contiguous rows"
    losses = torch.empty(c, dtype=torch.float32, device=logits.device)
    if c:
        triton_kernels("kernels.cross_entropy.triton").cross_entropy_kernel[(c,)](
            logits, targets.contiguous(), factor, losses, logits.stride(0), _row_stride(factor), v,
            terms.ignore_index, scale, softcap, terms.label_smoothing, terms.z_loss,
            SOFTCAP=softcap > 0, SMOOTHING=terms.label_smoothing > 0, Z_LOSS=terms.z_loss > 0,
            GRADIENT=wants_gradient, BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return losses


def _row_stride(factor: Tensor) -> int:
    return factor.stride(0) if factor.dim() else 0


def plain_cross_entropy(
    logits: Tensor, targets: Tensor, factor: Tensor, scale: float, softcap: float, terms: Terms,
    wants_gradient: bool,
) -> Tensor:  # fmt: skip
    """Compute the operator in PyTorch, PLAIN_ROWS rows at a time."""
    losses = _fake(logits, targets)
    for first in range(0, logits.shape[0], PLAIN_ROWS):
        part = slice(first, first + PLAIN_ROWS)
        y, t = logits[part], targets[part, None]
        x = y.to(losses.dtype) * scale
        slope = None
        if softcap:
            squashed = torch.tanh(x / softcap)
            x, slope = softcap * squashed, 1 - squashed.square()
        ignored = t == terms.ignore_index
        invalid = ((t < 0) | (t >= x.shape[1])) & ~ignored
        columns = t.masked_fill(ignored | invalid, 0)
        highest = x.amax(1, keepdim=True)
        x = x.sub_(highest)  # Before small terms are added, which large logits would absorb.
        rest = x.exp().sum(1, keepdim=True).log_()
        lse = highest + rest
        smoothing = terms.label_smoothing
        row_losses = rest - (1 - smoothing) * x.gather(1, columns)
        if smoothing:
            row_losses -= smoothing * x.mean(1, keepdim=True)
        if terms.z_loss:
            row_losses += terms.z_loss * lse.square()
        losses[part] = row_losses.masked_fill_(invalid, torch.nan).masked_fill_(ignored, 0.0)[:, 0]
        if wants_gradient:
            g = torch.exp(x - rest)
            if terms.z_loss:
                g *= 1 + 2 * terms.z_loss * lse
            g -= smoothing / x.shape[1]
            g.scatter_add_(1, columns, torch.full_like(lse, smoothing - 1))
            g = g if slope is None else g * slope
            rate = factor[part, None] if factor.dim() else factor
            g = (g * (rate * scale)).masked_fill_(invalid, torch.nan)
            y.copy_(g.masked_fill_(ignored, 0.0))
    return losses
