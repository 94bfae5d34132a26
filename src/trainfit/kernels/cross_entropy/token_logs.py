"""Log-probabilities of given tokens and losses of them, in chunks: all logits never exist at once.

Shapes: n tokens, c tokens per chunk, e hidden size, v vocabulary.

A loss that is a sum over tokens, each a function of its own log-probability (GRPO, PPO, SFT), gets its
gradients in the forward, as the losses of chunked.py do: with d loss / d log p = g the gradient of the logits
is g (one-hot - softmax). Memory: one chunk's logits in the dtype of the products and in fp32 (with a soft cap
twice in fp32, for the derivative of tanh), and the gradients.

A loss of sums of log-probabilities (DPO) knows g after all chunks. ``linear_token_logs`` gives it the
log-probabilities with a gradient, and its backward computes each chunk's logits again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.kernels.cross_entropy.chunked import Head, chunk_rows
from trainfit.kernels.cross_entropy.gradients_in_forward import Gradients, loss_with_gradients
from trainfit.kernels.custom_op import refuse_second_derivative

TokenLoss = Callable[[Tensor, slice], Tensor]
"""(log-probabilities of a chunk's tokens, fp32 [c]; the chunk) -> their losses, [c]."""


@torch.no_grad()
def token_logs(
    hidden: Tensor, head: Head, targets: Tensor, *, temperature: float = 1.0, rows: int | None = None
) -> Tensor:
    """Return the log-probability of each target, fp32 [n], without a gradient.

    Args:
        hidden: [n, e].
        targets: int64 [n], within the vocabulary.
        temperature: divides the logits.
        rows: tokens per chunk; None: ``chunk_rows``.
    """
    return _token_logs(hidden, head, targets, temperature, rows, _dtype_of_products(hidden, head))


def _dtype_of_products(hidden: Tensor, head: Head) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype


def _token_logs(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, rows: int | None, dtype: torch.dtype
) -> Tensor:
    rows = rows or chunk_rows(hidden.shape[0], hidden.shape[1], head.weight.shape[0])
    matrix = head.weight.to(dtype)
    found = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for first in range(0, len(targets), rows):
            part = slice(first, first + rows)
            logits = _logits(hidden[part].to(dtype), matrix, head)
            found[part] = _softmax(logits, targets[part, None], head, temperature)[0]
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
) -> Tensor:
    """Return the sum of the tokens' losses, an fp32 scalar.

    Args:
        hidden: [n, e].
        targets: int64 [n], within the vocabulary.
        loss: of each token; called once a chunk, in order, with gradients enabled. A token that does not
            count has the loss 0, whatever its log-probability.
        temperature: divides the logits.
        expected_gradient: the gradient that the backward will most likely receive.
        rows: tokens per chunk; None: ``chunk_rows``.
    """
    rows = rows or chunk_rows(hidden.shape[0], hidden.shape[1], head.weight.shape[0])

    def run(dtype: torch.dtype, needed: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
        gradients = Gradients.of(hidden, head.weight, head.bias, needed)
        matrix = head.weight.to(dtype)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for first in range(0, len(targets), rows):
            part = slice(first, first + rows)
            columns = targets[part, None]
            x = hidden[part].to(dtype)
            logits = _logits(x, matrix, head)
            logs, exponentials, totals = _softmax(logits, columns, head, temperature)
            with torch.enable_grad():
                leaf = logs.requires_grad_()
                losses = loss(leaf, part).sum()
            total += losses.detach()
            if any(needed):
                (of_logs,) = torch.autograd.grad(losses, leaf)
                factors = of_logs[:, None] * (expected_gradient * head.scale / temperature)
                _to_gradient(logits, exponentials, totals, columns, factors, head)
                del exponentials  # Before the products, and before the next chunk's logits.
                gradients.add(part, logits, x, matrix)
            del logits
        return total.float(), gradients

    return loss_with_gradients(run, hidden, head.weight, head.bias, expected_gradient)


def linear_token_logs(
    hidden: Tensor, head: Head, targets: Tensor, *, temperature: float = 1.0, rows: int | None = None
) -> Tensor:
    """Return the log-probability of each target, fp32 [n], with a gradient; arguments as of ``token_logs``.

    Saved for backward: ``hidden`` and the head. Each chunk's logits are computed twice.
    """
    settings = head.scale, head.softcap, temperature, rows
    return _TokenLogs.apply(hidden, head.weight, head.bias, targets, settings)  # pyright: ignore


class _TokenLogs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: Any
    ) -> Tensor:
        scale, softcap, temperature, rows = settings
        head = Head(weight, bias, scale, softcap)
        ctx.dtype, ctx.settings = _dtype_of_products(hidden, head), settings
        ctx.save_for_backward(hidden, weight, bias, targets)
        return _token_logs(hidden, head, targets, temperature, rows, ctx.dtype)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        hidden, weight, bias, targets = ctx.saved_tensors
        scale, softcap, temperature, rows = ctx.settings
        head, again = Head(weight, bias, scale, softcap), _Again()
        rows = rows or chunk_rows(hidden.shape[0], hidden.shape[1], weight.shape[0])
        gradients = Gradients.of(hidden, weight, bias, ctx.needs_input_grad[:3])
        matrix = weight.to(ctx.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(targets), rows):
                part = slice(first, first + rows)
                columns = targets[part, None]
                x = hidden[part].to(ctx.dtype)
                logits = again(x, matrix, head)
                _, exponentials, totals = _softmax(logits, columns, head, temperature)
                factors = grad[part, None] * (scale / temperature)
                _to_gradient(logits, exponentials, totals, columns, factors, head)
                del exponentials
                gradients.add(part, logits, x, matrix)
                del logits
        return (*gradients, None, None)


class _Again(nn.Module):
    """A chunk's logits in the backward. A module, by which the virtual GPU sees that they are recomputed."""

    def forward(self, x: Tensor, matrix: Tensor, head: Head) -> Tensor:
        return _logits(x, matrix, head)


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


def _logits(x: Tensor, matrix: Tensor, head: Head) -> Tensor:
    """Return a chunk's products, before scale and soft cap."""
    if head.bias is None:
        return torch.mm(x, matrix.t())
    return torch.addmm(head.bias.to(x.dtype), x, matrix.t())


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
