"""The clipped loss of a policy's tokens (PPO, Schulman et al., arXiv:1707.06347), with GRPO's divergence.

It limits how far the ratio of new to old probability moves the policy::

    loss = -min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) + kl (exp(r - l) - (r - l) - 1)

with l the new and r the reference's log-probability; the last term is a positive, unbiased estimate of the
KL divergence from the reference (Schulman, "Approximating KL divergence", 2020).

Example: a token whose probability has doubled since it was sampled, of a completion with advantage 0.87, has
ratio 2; with clip 0.2 its loss is -1.2 x 0.87, a constant, and it has no gradient.

Differences of log-probabilities are limited to 20 either way before ``exp``, so that a token whose
probability collapsed has a finite loss; beyond the limit it has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Largest size of a log ratio in the loss; its exp is 4.9e8, and fp32 overflows at 88."""


@dataclass
class PolicyLoss:
    """The loss of each token, for ``kernels.cross_entropy.token_logs``, and what it counts meanwhile.

    Attributes:
        old: log-probabilities when the tokens were sampled, fp32 [m].
        advantages, weights: of each token, fp32 [m]; a weight of 0 leaves a token out.
        clip: how far the ratio may move; kl: weight of the divergence from ``reference``, fp32 [m].
        sums: weighted sums over the tokens seen, fp32 [4]: clipped tokens, divergence from the reference,
            squared difference of new and old log-probabilities, and its largest size.
    """

    old: Tensor
    advantages: Tensor
    weights: Tensor
    clip: float
    kl: float = 0.0
    reference: Tensor | None = None
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(4, dtype=torch.float32, device=self.old.device)

    def __call__(self, logs: Tensor, part: slice) -> Tensor:
        """Return the weighted losses of a chunk's tokens, [c]."""
        weights, advantages = self.weights[part], self.advantages[part]
        moved = logs - self.old[part]
        # Tokens that do not count may have any log-probability; exp of it could be infinite, times 0.
        moved = torch.where(weights > 0, moved, 0.0)
        ratio = moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        bounded = ratio.clamp(1 - self.clip, 1 + self.clip)
        losses = -torch.minimum(ratio * advantages, bounded * advantages)
        divergence = torch.zeros_like(losses)
        if self.reference is not None:
            apart = torch.where(weights > 0, self.reference[part] - logs, 0.0)
            apart = apart.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            divergence = apart.exp() - apart - 1
            losses = losses + self.kl * divergence
        with torch.no_grad():
            cut = bounded * advantages < ratio * advantages
            size = moved.abs().amax() if len(moved) else moved.sum()
            found = [(cut * weights).sum(), (divergence * weights).sum(), (moved.square() * weights).sum()]
            self.sums[:3] += torch.stack(found)
            self.sums[3] = torch.maximum(self.sums[3], size)
        return losses * weights

    def metrics(self) -> dict[str, float]:
        """Return what was counted; it waits for the device."""
        clipped, divergence, square, largest = self.sums.tolist()
        return {
            "clipped_share": clipped, "kl": divergence, "log_difference_rms": square**0.5,
            "log_difference_max": largest,
        }  # fmt: skip
