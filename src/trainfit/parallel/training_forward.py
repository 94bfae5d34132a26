"""Model and loss as one module, which a data-parallel wrapper calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class TrainingForward(nn.Module):
    """Return the training loss of a micro-batch.

    Args:
        model: any model; called with ``input_ids`` and ``labels`` where ``loss`` is None.
        loss: (model, micro-batch) -> loss, or None for the model's own.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, dict[str, Tensor]], Tensor] | None):
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: dict[str, Tensor]) -> Any:
        if self.loss is not None:
            return self.loss(self.model, batch)
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
