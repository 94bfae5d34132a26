"""Log-probabilities of given tokens and losses of them, in chunks: all logits never exist at once.

Shapes: n tokens, c tokens per chunk, e hidden size, v vocabulary.

A loss that is a sum over tokens, each a function of its own log-probability (GRPO, PPO, SFT), gets its
gradients in the forward, as the losses of chunked.py do: with d loss / d log p = g the gradient of the logits
is g (one-hot - softmax). Memory: one chunk's logits in the dtype of the products and in fp32 (with a soft cap
twice in fp32, for the derivative of tanh), and the gradients.

With ``fused`` the kernel of fused.py takes the place of PyTorch's operations between the products: a logit
takes the 2 bytes of bf16 alone, and is read three times and written once instead of about ten times.

A loss of sums of log-probabilities (DPO) knows g after all chunks. ``linear_token_logs`` gives it the
log-probabilities with a gradient, and its backward computes each chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.kernels.cross_entropy.chunked import Head, chunk_rows
from trainfit.kernels.cross_entropy.fused import fused_rows, logits_buffer, register
from trainfit.kernels.cross_entropy.gradients_in_forward import Gradients, loss_with_gradients
from trainfit.kernels.cross_entropy.terms import Terms
from trainfit.kernels.custom_op import refuse_second_derivative

TokenLoss = Callable[[Tensor, slice], Tensor]
"""(log-probabilities of a chunk's tokens, fp32 [c]; the chunk) -> their losses, [c]."""


@torch.no_grad()
def token_logs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    rows: int | None = None,
    fused: bool = False,
) -> Tensor:
    """Return the log-probability of each target, fp32 [n], without a gradient.

    Args:
        hidden: [n, e].
        targets: int64 [n], within the vocabulary.
        temperature: divides the logits.
        rows: tokens per chunk; None: ``chunk_rows``, or ``fused_rows``.
        fused: use the kernel of fused.py; without a bias, and with a soft cap at temperature 1 alone.
    """
    return _token_logs(hidden, targets, _chunks(hidden, head, temperature, rows, fused))


def _chunks(hidden: Tensor, head: Head, temperature: float, rows: int | None, fused: bool) -> _Chunks:
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    return (_Fused if fused else _Chunks)(hidden, head, temperature, rows, dtype)


def _token_logs(hidden: Tensor, targets: Tensor, chunks: _Chunks) -> Tensor:
    found = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for part in chunks.parts(len(targets)):
            logits = chunks.logits(hidden[part])
            found[part] = chunks.logs(logits, targets[part])
    return found


def linear_token_loss(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    loss: TokenLoss,
    *,
    temperature: float = 1.0,
    expected_gradient: Tensor | float = 1.0,
    rows: int | None = None,
    fused: bool = False,
) -> Tensor:
    """Return the sum of the tokens' losses, an fp32 scalar.

    Args:
        hidden: [n, e].
        targets: int64 [n], within the vocabulary.
        loss: of each token; called once a chunk, in order, with gradients enabled. A token that does not
            count has the loss 0, whatever its log-probability.
        temperature: divides the logits.
        expected_gradient: the gradient that the backward will most likely receive.
        rows, fused: as of ``token_logs``.
    """

    def run(dtype: torch.dtype, needed: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
        chunks = (_Fused if fused else _Chunks)(hidden, head, temperature, rows, dtype)
        gradients = Gradients.of(hidden, head.weight, head.bias, needed)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for part in chunks.parts(len(targets)):
            x = hidden[part].to(dtype)
            logits = chunks.logits(x)
            logs = chunks.logs(logits, targets[part], keep=any(needed))
            with torch.enable_grad():
                leaf = logs.requires_grad_()
                losses = loss(leaf, part).sum()
            total += losses.detach()
            if any(needed):
                (of_logs,) = torch.autograd.grad(losses, leaf)
                chunks.to_gradient(logits, targets[part], of_logs * expected_gradient)
                gradients.add(part, logits, x, chunks.matrix)
            del logits
        return total.float(), gradients

    return loss_with_gradients(run, hidden, head.weight, head.bias, expected_gradient)


def linear_token_logs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    rows: int | None = None,
    fused: bool = False,
) -> Tensor:
    """Return the log-probability of each target, fp32 [n], with a gradient; arguments as of ``token_logs``.

    Saved for backward: ``hidden`` and the head. Each chunk's logits are computed twice.
    """
    settings = head.scale, head.softcap, temperature, rows, fused
    return _TokenLogs.apply(hidden, head.weight, head.bias, targets, settings)  # pyright: ignore


class _TokenLogs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: Any
    ) -> Tensor:
        scale, softcap, *others = settings
        chunks = _chunks(hidden, Head(weight, bias, scale, softcap), *others)
        ctx.dtype, ctx.settings = chunks.dtype, settings
        ctx.save_for_backward(hidden, weight, bias, targets)
        return _token_logs(hidden, targets, chunks)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        hidden, weight, bias, targets = ctx.saved_tensors
        scale, softcap, temperature, rows, fused = ctx.settings
        head, again = Head(weight, bias, scale, softcap), _Again()
        chunks = (_Fused if fused else _Chunks)(hidden, head, temperature, rows, ctx.dtype)
        gradients = Gradients.of(hidden, weight, bias, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks.parts(len(targets)):
                x = hidden[part].to(ctx.dtype)
                logits = again(x, chunks)
                chunks.to_gradient(logits, targets[part], grad[part])
                gradients.add(part, logits, x, chunks.matrix)
                del logits
        return gradients.hidden, gradients.weight, gradients.bias, None, None


class _Again(nn.Module):
    """A chunk's logits in the backward. A module, by which the virtual GPU sees that they are recomputed."""

    def forward(self, x: Tensor, chunks: _Chunks) -> Tensor:
        return chunks.logits(x)


class _Chunks:
    """Logits of chunks of tokens, the tokens' log-probabilities and the logits' gradient, in PyTorch.

    Attributes:
        matrix: the head's weight in ``dtype``, that of the products.
    """

    def __init__(self, hidden: Tensor, head: Head, temperature: float, rows: int | None, dtype: torch.dtype):
        self.head, self.temperature, self.dtype = head, temperature, dtype
        self.matrix = head.weight.to(dtype)
        self.rows = rows or self._rows(hidden.shape[0], hidden.shape[1], len(head.weight))
        self._kept: tuple[Tensor, Tensor] | None = None

    def _rows(self, num_tokens: int, hidden_size: int, vocabulary: int) -> int:
        return chunk_rows(num_tokens, hidden_size, vocabulary)

    def parts(self, num_tokens: int) -> list[slice]:
        """Return the chunks, in order."""
        return [slice(first, first + self.rows) for first in range(0, num_tokens, self.rows)]

    def logits(self, x: Tensor) -> Tensor:
        """Return a chunk's products [c, v], before scale and soft cap; ``x``: [c, e]."""
        x, bias = x.to(self.dtype), self.head.bias
        if bias is None:
            return torch.mm(x, self.matrix.t())
        return torch.addmm(bias.to(self.dtype), x, self.matrix.t())

    def logs(self, logits: Tensor, targets: Tensor, *, keep: bool = False) -> Tensor:
        """Return the targets' log-probabilities, fp32 [c]; ``keep`` what ``to_gradient`` needs too."""
        logs, *kept = _softmax(logits, targets[:, None], self.head, self.temperature)
        self._kept = (kept[0], kept[1]) if keep else None
        return logs

    def to_gradient(self, logits: Tensor, targets: Tensor, of_logs: Tensor) -> None:
        """Overwrite ``logits`` by their gradient; ``of_logs``: that of the log-probabilities, [c]."""
        columns = targets[:, None]
        if self._kept is None:
            self.logs(logits, targets, keep=True)
        assert self._kept is not None
        exponentials, totals = self._kept
        self._kept = None  # Freed before the products, and before the next chunk's logits.
        factors = of_logs[:, None] * (self.head.scale / self.temperature)
        _to_gradient(logits, exponentials, totals, columns, factors, self.head)


class _Fused(_Chunks):
    """The same with the kernel of fused.py: none of the logits are in fp32."""

    def __init__(self, hidden: Tensor, head: Head, temperature: float, rows: int | None, dtype: torch.dtype):
        assert head.bias is None
        assert head.softcap is None or temperature == 1.0
        register()
        super().__init__(hidden, head, temperature, rows, dtype)
        self._scaled = head.scale / temperature, head.softcap or 0.0
        self._buffer = logits_buffer(hidden, min(self.rows, len(hidden)), len(head.weight), dtype)

    def _rows(self, num_tokens: int, hidden_size: int, vocabulary: int) -> int:
        return fused_rows(num_tokens, vocabulary, self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        return torch.mm(x.to(self.dtype), self.matrix.t(), out=self._buffer[: len(x)])

    def logs(self, logits: Tensor, targets: Tensor, *, keep: bool = False) -> Tensor:
        return torch.ops.trainfit.token_losses(logits, targets, *self._scaled).neg()

    def to_gradient(self, logits: Tensor, targets: Tensor, of_logs: Tensor) -> None:
        torch.ops.trainfit.cross_entropy_(logits, targets, -of_logs, *self._scaled, *Terms(), True)


def _to_gradient(
    logits: Tensor, exponentials: Tensor, totals: Tensor, columns: Tensor, factors: Tensor, head: Head
) -> None:
    """Overwrite a chunk's ``logits`` by their gradient, and ``exponentials`` meanwhile.

    Args:
        factors: gradient of each token's log-probability, over the temperature and times the scale, [c, 1].
    """
    right = exponentials.gather(1, columns)
    exponentials.scatter_(1, columns, right - totals)
    exponentials.mul_(-factors / totals)
    if head.softcap is not None:
        capped = logits.to(torch.float32, copy=True).mul_(head.scale / head.softcap).tanh_()
        torch.ops.aten.tanh_backward.grad_input(exponentials, capped, grad_input=exponentials)
        del capped
    logits.copy_(exponentials)


def _softmax(
    logits: Tensor, columns: Tensor, head: Head, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of columns [c], exponentials [c, v] and their sums [c, 1], in fp32."""
    scaled = logits.to(torch.float32, copy=True)  # Of fp32 products, too: their values are needed again.
    factor = head.scale if head.softcap is not None else head.scale / temperature
    if factor != 1.0:
        scaled.mul_(factor)
    if head.softcap is not None:
        scaled.div_(head.softcap).tanh_().mul_(head.softcap / temperature)
    scaled.sub_(scaled.amax(1, keepdim=True))
    right = scaled.gather(1, columns)
    exponentials = scaled.exp_()
    totals = exponentials.sum(1, keepdim=True)
    return (right - totals.log())[:, 0], exponentials, totals
