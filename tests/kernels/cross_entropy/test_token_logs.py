"""Log-probabilities of tokens and losses of them, against whole logits and autograd."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainfit.kernels.cross_entropy.chunked import Head
from trainfit.kernels.cross_entropy.token_logs import linear_token_logs, linear_token_loss, token_logs

N, E, V = 37, 16, 50
HEADS = {
    "plain": (None, 1.0, None), "scale": (None, 0.3, None), "bias and scale": (True, 0.3, None),
    "soft cap": (None, 1.0, 5.0),
}  # fmt: skip


def tensors(name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Head, Tensor]:
    generator = torch.Generator().manual_seed(0)
    bias, scale, softcap = HEADS[name]

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    head = Head(made(V, E), made(V) if bias else None, scale, softcap)
    return made(N, E), head, torch.randint(V, (N,), generator=generator)


def whole_logs(hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> Tensor:
    logits = hidden @ head.weight.t()
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return (logits / temperature).log_softmax(1).gather(1, targets[:, None])[:, 0]


def clipped(old: Tensor, advantages: Tensor) -> Callable[[Tensor, slice], Tensor]:
    """A loss that is not linear in the log-probability, with a clip."""

    def loss(logs: Tensor, part: slice) -> Tensor:
        ratio = (logs - old[part]).exp()
        a = advantages[part]
        return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)

    return loss


CASES = [(name, temperature, False) for name in HEADS for temperature in (1.0, 0.7)]
FUSED = [("plain", 1.0, True), ("plain", 0.7, True), ("scale", 0.7, True), ("soft cap", 1.0, True)]


@pytest.mark.parametrize("rows", [None, 8, 37])
@pytest.mark.parametrize(("name", "temperature", "fused"), CASES + FUSED)
def test_loss_and_gradients_are_those_of_whole_logits(
    name: str, temperature: float, fused: bool, rows: int | None
) -> None:
    hidden, head, targets = tensors(name, torch.float32)
    weights = [hidden, head.weight, *([head.bias] if head.bias is not None else [])]
    expected_logs = whole_logs(hidden, head, targets, temperature)
    noise = torch.Generator().manual_seed(3)
    old = expected_logs.detach() + 0.2 * torch.randn(N, generator=noise)
    loss = clipped(old, torch.randn(N, generator=noise) * (torch.arange(N) % 5 > 0))
    expected = loss(expected_logs, slice(0, N)).sum()
    gradients = torch.autograd.grad(2 * expected, weights)
    found = linear_token_loss(hidden, head, targets, loss, temperature=temperature, rows=rows, fused=fused)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(torch.autograd.grad(2 * found, weights), gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    logs = token_logs(hidden, head, targets, temperature=temperature, rows=rows, fused=fused)
    torch.testing.assert_close(logs, expected_logs, atol=1e-5, rtol=1e-5)
    assert not logs.requires_grad


@pytest.mark.parametrize(("name", "temperature", "fused"), CASES + FUSED)
def test_gradients_of_log_probabilities_are_those_of_whole_logits(
    name: str, temperature: float, fused: bool
) -> None:
    hidden, head, targets = tensors(name, torch.float32)
    weights = [hidden, head.weight, *([head.bias] if head.bias is not None else [])]
    factors = torch.randn(N, generator=torch.Generator().manual_seed(4))
    found = linear_token_logs(hidden, head, targets, temperature=temperature, rows=8, fused=fused)
    expected = whole_logs(hidden, head, targets, temperature)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad((factors * expected).sum(), weights)
    for one, other in zip(torch.autograd.grad((factors * found).sum(), weights), gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, targets = tensors("plain", torch.float32)
    frozen = Head(head.weight.detach())
    found = linear_token_loss(hidden, frozen, targets, lambda logs, part: -logs)
    (gradient,) = torch.autograd.grad(found, [hidden])
    (expected,) = torch.autograd.grad(-whole_logs(hidden, frozen, targets, 1.0).sum(), [hidden])
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)


def test_tokens_that_do_not_count_have_no_gradient() -> None:
    hidden, head, targets = tensors("plain", torch.float32)
    counted = torch.arange(N) < 10
    found = linear_token_loss(
        hidden, head, targets, lambda logs, part: torch.where(counted[part], -logs, 0.0)
    )
    (gradient,) = torch.autograd.grad(found, [hidden])
    assert gradient[10:].eq(0).all()
    assert gradient[:10].ne(0).any()
