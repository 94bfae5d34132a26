"""Direct preference optimization (Rafailov et al., arXiv:2305.18290): of two answers, prefer one.

    loss = -log sigmoid(beta ((c - c') - (r - r')))

with c and r the log-probabilities of the chosen and the rejected answer, c' and r' the reference's. The loss
is not a sum over tokens, so its gradient needs the answers' sums first: they are computed without a gradient,
and give each token's factor, with which the loss of the second pass is linear.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Preference(NamedTuple):
    """Losses of pairs and their gradients.

    Attributes:
        losses: fp32 [p].
        factors: d mean loss / d log-probability of an answer, fp32 [2, p]: of chosen, of rejected.
        margins: fp32 [p], beta times the difference; positive where the chosen answer is preferred.
    """

    losses: Tensor
    factors: Tensor
    margins: Tensor


def preference(
    chosen: Tensor, rejected: Tensor, chosen_reference: Tensor, rejected_reference: Tensor, beta: float
) -> Preference:
    """Return DPO's losses of pairs; each argument is the log-probability of an answer, fp32 [p]."""
    margins = beta * ((chosen - chosen_reference) - (rejected - rejected_reference))
    pull = beta * torch.sigmoid(-margins) / len(margins)
    return Preference(-F.logsigmoid(margins), torch.stack((-pull, pull)), margins)
