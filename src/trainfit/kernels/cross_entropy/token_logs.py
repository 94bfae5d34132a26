"""Log-probabilities of given tokens and losses of them, in chunks: all logits never exist at once.

Shapes: n tokens, c tokens per chunk, e hidden size, v vocabulary.

A loss that is a sum over tokens, each a function of its own log-probability (GRPO, PPO, SFT), gets its
gradients in the forward, as the losses of chunked.py do: with d loss / d log p = g the gradient of the logits
is g (one-hot - softmax). Memory: one chunk's logits in the dtype of the products and in fp32 (with a soft cap
twice in fp32, for the derivative of tanh), and the gradients.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trainfit.kernels.cross_entropy.chunked import Head, chunk_rows
from trainfit.kernels.cross_entropy.gradients_in_forward import Gradients, loss_with_gradients

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
    rows = rows or chunk_rows(hidden.shape[0], hidden.shape[1], head.weight.shape[0])
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    matrix = head.weight.to(dtype)
    found = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    with torch.autocast(device, enabled=False):
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
                right = exponentials.gather(1, columns)
                exponentials.scatter_(1, columns, right - totals)
                exponentials.mul_(-factors / totals)
                if head.softcap is not None:
                    capped = logits.to(torch.float32, copy=True).mul_(head.scale / head.softcap).tanh_()
                    torch.ops.aten.tanh_backward.grad_input(exponentials, capped, grad_input=exponentials)
                    del capped
                logits.copy_(exponentials)
                del exponentials  # Before the products, and before the next chunk's logits.
                gradients.add(part, logits, x, matrix)
            del logits
        return total.float(), gradients

    return loss_with_gradients(run, hidden, head.weight, head.bias, expected_gradient)


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
