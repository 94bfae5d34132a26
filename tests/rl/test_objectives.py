"""Losses of completions, against their formulas with autograd."""

import math
from typing import Any

import pytest
import torch

from trainfit.kernels.cross_entropy.chunked import Head
from trainfit.kernels.cross_entropy.token_logs import linear_token_logs, linear_token_loss, token_logs
from trainfit.kernels.policy_loss.op import PolicyLoss
from trainfit.kernels.preference_loss.op import PairLosses, pair_losses
from trainfit.rl.objectives.policy import group_advantages, token_weights, whitened
from trainfit.spec.objective import Preference


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


HEADS: list[dict[str, float | bool | None]] = [
    {}, {"softcap": 3.0}, {"scale": 0.5, "bias": True}, {"softcap": 3.0, "scale": 2.0, "temperature": 0.7},
]  # fmt: skip


@pytest.mark.parametrize("options", HEADS, ids=str)
def test_log_probabilities_in_chunks_have_the_gradients_of_whole_logits(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    n, e, v = 30, 8, 20
    hidden = torch.randn(n, e, generator=generator, requires_grad=True)
    weight = torch.randn(v, e, generator=generator, requires_grad=True)
    bias = torch.randn(v, generator=generator, requires_grad=True) if options.get("bias") else None
    scale, softcap = options.get("scale", 1.0), options.get("softcap")
    temperature = options.get("temperature", 1.0)
    head, targets = Head(weight, bias, scale, softcap), torch.randint(v, (n,), generator=generator)
    logits = scale * torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    expected = (logits / temperature).log_softmax(1).gather(1, targets[:, None])[:, 0]
    found = linear_token_logs(hidden, head, targets, temperature=temperature, rows=8)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert found.equal(token_logs(hidden, head, targets, temperature=temperature, rows=8))
    of = [one for one in (hidden, weight, bias) if one is not None]
    # A loss that is no sum over tokens: of sums of six.
    mine, whole = (logs.view(5, 6).sum(dim=1).mul(0.1).sigmoid().log().sum() for logs in (found, expected))
    for one, other in zip(torch.autograd.grad(mine, of), torch.autograd.grad(whole, of), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_losses_of_pairs() -> None:
    """By hand: ratios of 0.5 and -0.5, then of -1 and 1."""
    logs = torch.tensor([-3.0, -4.0, -5.0, -2.0])
    reference = torch.tensor([-3.5, -3.5, -4.0, -3.0])
    counts = torch.tensor([2, 5, 1, 4])

    def of(**fields: Any) -> PairLosses:
        return pair_losses(logs, reference, counts, Preference(name="dpo", beta=0.5, **fields))

    found = of()
    assert found.rewards.tolist() == [[0.25, -0.25], [-0.5, 0.5]]
    assert found.means().tolist() == pytest.approx([-0.125, 0.125, 0.5])
    plain = [-math.log(1 / (1 + math.exp(-margin))) for margin in (0.5, -1.0)]
    turned = [-math.log(1 / (1 + math.exp(margin))) for margin in (0.5, -1.0)]
    assert found.losses.tolist() == pytest.approx(plain)
    smooth = [0.9 * one + 0.1 * other for one, other in zip(plain, turned, strict=True)]
    assert of(label_smoothing=0.1).losses.tolist() == pytest.approx(smooth)
    assert of(loss="hinge").losses.tolist() == [0.5, 2.0]
    assert of(loss="ipo").losses.tolist() == pytest.approx([(0.25 + 0.1 - 1) ** 2, (-1 - 0.25 - 1) ** 2])
