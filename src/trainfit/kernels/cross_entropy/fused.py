"""Next-token cross-entropy from hidden states, in large chunks of tokens: cuBLAS for the products, one kernel for the rest.

Shapes: n tokens, c tokens of one chunk, e hidden size, v vocabulary.

For each chunk: logits = hidden W^T; one kernel reads them, writes c losses and puts their gradient where they were; two
products make the gradients of the chunk's hidden states and (added up) of the weight. Nothing is computed twice: the
products are the three of 2 n e v FLOPs that the mathematics needs, 26.4 TFLOP for 8,192 tokens, v 131,072, e 4,096.

Memory beside hidden states [n, e], weight [v, e], and their gradients of the same sizes and dtypes, which are the result:
one chunk's logits in the products' dtype, 2 c v bytes for bf16 (at most LOGITS_BYTES unless one token has more), and 12 n
bytes. Under autocast also the weight in the products' dtype and one product of the weight's shape (2 e v bytes each).

Softmax and loss are computed in fp32 (fp64 stays fp64) from logits in the products' dtype, as the usual way does. The
weight's gradient is added up over the chunks in the weight's own dtype: products accumulate in fp32 inside a chunk, bf16 rounds
once a chunk. Errors of the gradient's norm against fp64: 0.27 % with one chunk (as the usual way), 0.32 % with 4
(tests/kernels/test_fused_loss.py). An fp32 sum would cost 4 e v bytes more (2.1 GB of the size above).

Against ``chunked_cross_entropy``: a chunk's logits take 2 bytes where that takes 6, and are read twice and written once;
label smoothing and z-loss (Chowdhery et al., PaLM, arXiv:2204.02311, section 5) are known, a bias is not.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.kernels.cross_entropy.chunked import Head
from trainfit.kernels.cross_entropy.gradients_in_forward import Gradients, LossSum, loss_with_gradients
from trainfit.kernels.cross_entropy.terms import Terms, cross_entropy_with_terms
from trainfit.kernels.custom_op import declare
from trainfit.spec.errors import InputError

LOGITS_BYTES = 2**29
"""Most of one chunk's logits: 2,048 tokens of 131,072 bf16 logits. The weight's gradient is then read and written (4 e v bytes)
once for 6 c e v FLOPs: 0.5 ms beside 9 ms of products on an H200. docs/results/kernels.md has the
times with twice as much (1 % less) and with half (3.5 % more)."""
ALIGNMENT = 128
"""Chunks are multiples of it, a tile of the products."""
ROW_ALIGNMENT = 16
"""Logits' rows begin at multiples of it, so that tensor cores read them whatever the vocabulary is."""
PLAIN_ROWS = 64
"""Rows that the PyTorch body takes at a time."""


def fused_rows(num_tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Tokens of one chunk: the fewest equal chunks whose logits stay within LOGITS_BYTES, up to the alignment."""
    most = max(1, LOGITS_BYTES // (vocabulary * dtype.itemsize) // ALIGNMENT) * ALIGNMENT
    num_chunks = max(1, -(-num_tokens // most))
    rows = -(-num_tokens // num_chunks)
    return max(1, min(num_tokens, -(-rows // ALIGNMENT) * ALIGNMENT))


def fused_linear_cross_entropy(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    terms: Terms | None = None,
    *,
    expected_gradient: Tensor | float = 1.0,
    rows: int | None = None,
) -> Tensor:
    """Mean cross-entropy of ``targets`` given ``hidden``, fp32 scalar (fp64 of fp64). Registers the operation on first use.

    Args:
        hidden: [n, e], floating.
        targets: int64 [n]; ``ignore_index`` takes no part. If all are ignored the loss is NaN, as torch's, its gradients 0.
            Any other that is no row of the weight makes the loss NaN, and the gradients that it has a part in; nothing waits for
            the device to find it.
        expected_gradient: what the backward is likely to be given; any other gradient is right too.
        rows: tokens of one chunk; None: ``fused_rows``.

    Raises:
        InputError: the head has a bias.
    """
    refuse_bias(head.bias)
    register()
    settings = _Settings(head.scale, head.softcap or 0.0, rows, expected_gradient, terms or Terms())

    def run(dtype: torch.dtype, needed: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
        return _forward(hidden, head.weight, targets, settings, dtype, needed)

    return loss_with_gradients(run, hidden, head.weight, None, expected_gradient)


def refuse_bias(bias: Tensor | None) -> None:
    """Nothing, if there is none.

    Raises:
        InputError: there is one.
    """
    if bias is not None:
        raise InputError("the output layer has a bias", "use loss: chunked", field="loss", value="fused")


def plain_linear_cross_entropy(
    hidden: Tensor, head: Head, targets: Tensor, terms: Terms | None = None
) -> Tensor:
    """The definition: all logits at once, gradients by autograd. The reference."""
    logits = F.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return cross_entropy_with_terms(logits, targets, terms or Terms())


class _Settings(NamedTuple):
    scale: float
    softcap: float
    """0: none."""
    rows: int | None
    expected_gradient: Tensor | float
    terms: Terms


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    settings: _Settings,
    dtype: torch.dtype,
    needed: tuple[bool, ...],
) -> tuple[Tensor, Gradients]:
    """Loss, and the gradients of hidden states and weight that are ``needed``, else None.

    Args:
        dtype: of the matrix products.
    """
    n, v = hidden.shape[0], weight.shape[0]
    rows = settings.rows or fused_rows(n, v, dtype)
    count = (targets != settings.terms.ignore_index).sum().to(torch.promote_types(torch.float32, dtype))
    factor = settings.expected_gradient / count
    gradients = Gradients.of(hidden, weight, None, needed)
    matrix = weight.to(dtype)
    buffer = hidden.new_empty(min(rows, n), -(-v // ROW_ALIGNMENT) * ROW_ALIGNMENT, dtype=dtype)[:, :v]
    loss = LossSum(hidden.device)
    for first in range(0, n, rows):
        part = slice(first, first + rows)
        x = hidden[part].to(dtype)
        logits = buffer[: x.shape[0]]
        torch.mm(x, matrix.t(), out=logits)
        loss.add(
            torch.ops.trainfit.cross_entropy_(
                logits, targets[part], factor, settings.scale, settings.softcap, *settings.terms, any(needed)
            ).sum()
        )
        gradients.add(part, logits, x, matrix)
    return loss.mean(count), gradients


# -- the operation ----------------------------------------------------------------------------------------------------


@cache
def register() -> None:
    """Make ``torch.ops.trainfit.cross_entropy_``; a second call does nothing.

    Logits [c, v] (rows contiguous), targets int64 [c], factor: scalar; gives c losses in fp32 (fp64 of fp64) and, where a gradient
    is wanted, leaves ``factor`` times the losses' gradient in the logits' place.
    """
    declare("cross_entropy_", _run, _fake, mutates=("logits",))


def _run(
    logits: Tensor, targets: Tensor, factor: Tensor, scale: float, softcap: float,
    label_smoothing: float, z_loss: float, ignore_index: int, wants_gradient: bool,
) -> Tensor:  # fmt: skip
    run = triton_cross_entropy if logits.is_cuda and logits.dtype != torch.float64 else plain_cross_entropy
    terms = Terms(label_smoothing, z_loss, ignore_index)
    return run(logits, targets, factor, scale, softcap, terms, wants_gradient)


def _fake(logits: Tensor, targets: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))


def triton_cross_entropy(
    logits: Tensor, targets: Tensor, factor: Tensor, scale: float, softcap: float, terms: Terms, wants_gradient: bool,
    *, block: int = 2048, num_warps: int = 8,
) -> Tensor:  # fmt: skip
    """As ``plain_cross_entropy``, one kernel."""
    from trainfit.kernels.cross_entropy import fused_triton as fused_cross_entropy_triton

    kernels: Any = fused_cross_entropy_triton  # a constexpr argument takes a plain value
    c, v = logits.shape
    assert logits.stride(1) == 1, "the kernel takes contiguous rows"
    losses = torch.empty(c, dtype=torch.float32, device=logits.device)
    if c:
        kernels.cross_entropy_kernel[(c,)](
            logits, targets.contiguous(), factor, losses, logits.stride(0), v, terms.ignore_index,
            scale, softcap, terms.label_smoothing, terms.z_loss,
            SOFTCAP=softcap > 0, SMOOTHING=terms.label_smoothing > 0, Z_LOSS=terms.z_loss > 0,
            GRADIENT=wants_gradient, BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return losses


def plain_cross_entropy(
    logits: Tensor, targets: Tensor, factor: Tensor, scale: float, softcap: float, terms: Terms, wants_gradient: bool
) -> Tensor:  # fmt: skip
    """The operation in PyTorch, some rows at a time."""
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
        places = t.masked_fill(ignored | invalid, 0)
        highest = x.amax(1, keepdim=True)
        x = x.sub_(highest)  # Large from large, before anything small is added: the loss is kept.
        rest = x.exp().sum(1, keepdim=True).log_()
        lse = highest + rest
        row_losses = _row_losses(x, places, rest, lse, terms).masked_fill_(invalid, torch.nan)
        losses[part] = row_losses.masked_fill_(ignored, 0.0)[:, 0]
        if wants_gradient:
            smoothing = terms.label_smoothing
            g = torch.exp(x - rest)
            if terms.z_loss:
                g *= 1 + 2 * terms.z_loss * lse
            g -= smoothing / x.shape[1]
            g.scatter_add_(1, places, torch.full_like(lse, smoothing - 1))
            g = g if slope is None else g * slope
            g = (g * (factor * scale)).masked_fill_(invalid, torch.nan)
            y.copy_(g.masked_fill_(ignored, 0.0))
    return losses


def _row_losses(x: Tensor, places: Tensor, rest: Tensor, lse: Tensor, terms: Terms) -> Tensor:
    """Return each row's loss [c, 1], from logits less their highest and the logarithm of their exponentials' sum."""
    losses = rest - (1 - terms.label_smoothing) * x.gather(1, places)
    if terms.label_smoothing:
        losses -= terms.label_smoothing * x.mean(1, keepdim=True)
    if terms.z_loss:
        losses += terms.z_loss * lse.square()
    return losses
