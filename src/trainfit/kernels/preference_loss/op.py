"""Losses of pairs of answers: direct preference optimization (Rafailov et al., arXiv:2305.18290), and others.

With d = (c - c') - (r - r'), where c and r are the log-probabilities of the chosen and the rejected answer by
the model, c' and r' by the reference::

    sigmoid: -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d)    s: label smoothing (conservative DPO)
    ipo: (d - 1 / (2 beta))^2, of mean log-probabilities              (Azar et al., arXiv:2310.12036)
    hinge: max(0, 1 - beta d)                                         (Zhao et al., arXiv:2305.10425)

Shapes: p pairs. Answers are in the order chosen, rejected, chosen, rejected, ...: a part of them has whole
pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.spec.objective import Preference


class PairLosses(NamedTuple):
    """Losses of pairs, and what they mean.

    Attributes:
        losses: fp32 [p], with a gradient.
        rewards: beta times the log-ratio of each answer, fp32 [p, 2], without a gradient: chosen, rejected.
    """

    losses: Tensor
    rewards: Tensor

    def means(self) -> Tensor:
        """Return the mean rewards of chosen and rejected answers, and the accuracy, fp32 [3]."""
        right = (self.rewards[:, 0] > self.rewards[:, 1]).float()
        return torch.cat((self.rewards.mean(dim=0), right.mean()[None]))


def pair_losses(logs: Tensor, reference: Tensor, counts: Tensor, objective: Preference) -> PairLosses:
    """Return the losses of pairs.

    Args:
        logs, reference: log-probability of each answer by the model and by the reference, fp32 [2 p].
        counts: tokens of each answer, [2 p].
    """
    ratios = (logs - reference).view(-1, 2)
    rewards = objective.beta * ratios.detach()
    if objective.loss == "ipo":
        means = ratios / counts.view(-1, 2).clamp(min=1)
        return PairLosses((means[:, 0] - means[:, 1] - 1 / (2 * objective.beta)).square(), rewards)
    margins = objective.beta * (ratios[:, 0] - ratios[:, 1])
    if objective.loss == "hinge":
        return PairLosses((1 - margins).relu(), rewards)
    losses = -F.logsigmoid(margins)
    if smoothing := objective.label_smoothing:
        losses = (1 - smoothing) * losses - smoothing * F.logsigmoid(-margins)
    return PairLosses(losses, rewards)
