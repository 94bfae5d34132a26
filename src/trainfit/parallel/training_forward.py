"""Model and loss as one module, which a wrapper for several ranks calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from trainfit.models.packed import model_inputs

LossFunction = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class TrainingForward(nn.Module):
    """Return the training loss of a micro-batch.

    Args:
        model: any model; called with ``input_ids`` and ``labels`` where ``loss`` is None.
        loss: (model, micro-batch) -> loss, or None for the model's own.
    """

    def __init__(self, model: nn.Module, loss: LossFunction | None):
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: dict[str, Tensor], loss: LossFunction | None = None) -> Any:
        """Return ``loss`` in place of the training loss if it is given."""
        loss = loss or self.loss
        if loss is not None:
            return loss(self.model, batch)
        return self.model(**model_inputs(batch), labels=batch["labels"]).loss
