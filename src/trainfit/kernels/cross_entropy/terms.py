"""Label smoothing and z-loss, and the reference implementation of the loss with both."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.kernels.cross_entropy.gradients_in_forward import IGNORED_LABEL


class Terms(NamedTuple):
    """Parameters of a token's loss (1 - s)(lse - x_t) + s mean_j(lse - x_j) + z lse^2."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = IGNORED_LABEL


def cross_entropy_with_terms(logits: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """Return the mean loss in fp32 (fp64 for fp64); gradients are autograd's.

    As in ``F.cross_entropy``, ignored targets do not count, and the loss is NaN if all are ignored.

    Args:
        logits: [n, v].
        targets: int64 [n].
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
