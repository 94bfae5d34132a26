"""Losses of completions, against their formulas with autograd."""

import math

import pytest
import torch

from trainfit.kernels.cross_entropy.chunked import Head
from trainfit.kernels.cross_entropy.token_logs import linear_token_loss
from trainfit.kernels.policy_loss.op import PolicyLoss
from trainfit.rl.objectives.policy import group_advantages, token_weights, whitened
from trainfit.rl.objectives.preference import preference


def test_advantages_of_a_group() -> None:
    found = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 5.0]), 4)
    assert found.tolist() == pytest.approx([0.8659, -0.8659, -0.8659, 0.8659, 0, 0, 0, 0], abs=1e-4)
    plain = group_advantages(torch.tensor([1.0, 0.0, 4.0, 0.0]), 2, scale=False)
    assert plain.tolist() == [0.5, -0.5, 2.0, -2.0]
    assert whitened(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-3)


def test_weights_of_tokens() -> None:
    counted = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    assert token_weights(counted, "token")[counted].tolist() == [0.25] * 4
    by_sequence = token_weights(counted, "sequence")
    assert by_sequence[counted].tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert by_sequence[~counted].eq(0).all()


def test_the_worked_example() -> None:
    """A token twice as probable as when it was sampled has no gradient."""
    logs = torch.tensor([math.log(0.4)], requires_grad=True)
    loss = PolicyLoss(torch.tensor([math.log(0.2)]), torch.tensor([0.87]), torch.ones(1), clip=0.2)
    found = loss(logs, slice(0, 1)).sum()
    assert found.item() == pytest.approx(-1.2 * 0.87)
    assert torch.autograd.grad(found, logs)[0].item() == 0
    assert loss.metrics()["clipped_share"] == 1
    # With a negative advantage it is pushed back.
    loss = PolicyLoss(torch.tensor([math.log(0.2)]), torch.tensor([-0.87]), torch.ones(1), clip=0.2)
    found = loss(logs, slice(0, 1)).sum()
    assert found.item() == pytest.approx(2 * 0.87)
    assert torch.autograd.grad(found, logs)[0].item() == pytest.approx(2 * 0.87)


@pytest.mark.parametrize("moved", [-300.0, -90.0, 90.0, 300.0])
def test_a_collapsed_probability_has_a_finite_loss(moved: float) -> None:
    """fp32's exp overflows at 88: a ratio, or a divergence, of infinity would end the run."""
    logs = torch.tensor([-1.0, -1.0 + moved, -1.0 + moved], requires_grad=True)
    old = reference = torch.full((3,), -1.0)
    loss = PolicyLoss(old, torch.tensor([1.0, 1.0, -1.0]), torch.full((3,), 1 / 3), 0.2, 0.1, reference)
    found = loss(logs, slice(0, 3)).sum()
    assert found.isfinite()
    (gradient,) = torch.autograd.grad(found, logs)
    assert gradient.isfinite().all()
    assert gradient[0] == pytest.approx(-1 / 3)  # The token that did not move learns as before.
    assert loss.metrics()["log_difference_max"] == pytest.approx(abs(moved))


def test_chunks_of_the_policy_loss_are_the_whole_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    n, e, v, clip, kl = 30, 8, 20, 0.2, 0.1
    hidden = torch.randn(n, e, generator=generator, requires_grad=True)
    weight = torch.randn(v, e, generator=generator, requires_grad=True)
    targets = torch.randint(v, (n,), generator=generator)
    logs = (hidden @ weight.t()).log_softmax(1).gather(1, targets[:, None])[:, 0]
    old = logs.detach() + 0.3 * torch.randn(n, generator=generator)
    reference = logs.detach() + 0.3 * torch.randn(n, generator=generator)
    advantages = torch.randn(n, generator=generator)
    weights = token_weights(torch.rand(5, 6, generator=generator) < 0.7, "sequence").flatten()
    # Tokens that do not count hold anything.
    old, reference = (torch.where(weights > 0, x, -300.0) for x in (old, reference))
    counted = weights > 0
    ratio, apart, a = (logs - old)[counted].exp(), (reference - logs)[counted], advantages[counted]
    divergence = apart.exp() - apart - 1
    whole = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a) + kl * divergence
    expected = (whole * weights[counted]).sum()
    loss = PolicyLoss(old, advantages, weights, clip, kl, reference)
    found = linear_token_loss(hidden, Head(weight), targets, loss, rows=8)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(
        torch.autograd.grad(found, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    metrics = loss.metrics()
    assert metrics["log_difference_max"] == pytest.approx((logs - old)[counted].abs().max().item(), rel=1e-4)
    assert metrics["kl"] == pytest.approx((divergence * weights[counted]).sum().item(), rel=1e-4)


def test_preference() -> None:
    given = [torch.tensor(x, requires_grad=True) for x in ([-3.0, -5.0], [-4.0, -2.0])]
    reference = torch.tensor([-3.5, -4.0]), torch.tensor([-3.5, -3.0])
    margins = 0.5 * ((given[0] - reference[0]) - (given[1] - reference[1]))
    expected = -torch.sigmoid(margins).log()
    found = preference(given[0].detach(), given[1].detach(), *reference, beta=0.5)
    torch.testing.assert_close(found.losses, expected)
    for factors, gradient in zip(found.factors, torch.autograd.grad(expected.mean(), given), strict=True):
        torch.testing.assert_close(factors, gradient)
    assert (found.margins > 0).tolist() == [True, False]
