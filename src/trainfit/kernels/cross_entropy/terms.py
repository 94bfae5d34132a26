"""What a token's loss is made of besides its cross-entropy, and the definition that every loss here is compared with."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.kernels.cross_entropy.gradients_in_forward import IGNORED_LABEL


class Terms(NamedTuple):
    """What a token's loss is: (1 - s)(lse - x_t) + s mean_j(lse - x_j) + z lse^2."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = IGNORED_LABEL


def cross_entropy_with_terms(logits: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """Mean loss of ``targets`` (int64 [n]) given all logits [n, v], in fp32 (fp64 of fp64); gradients by autograd.

    As torch's ``cross_entropy``: what is ignored takes no part, and if all is, the loss is NaN.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(
        logits, targets, ignore_index=terms.ignore_index, label_smoothing=terms.label_smoothing
    )
    if not terms.z_loss:
        return loss
    ignored = targets == terms.ignore_index
    squares = logits.logsumexp(1).square().masked_fill(ignored, 0.0)
    return loss + terms.z_loss * squares.sum() / ignored.logical_not().sum()
