"""Several optimizers as one: all of a step's weights are updated, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class AllOrNothing:
    """Parameters and step of several optimizers as one, as far as a GradScaler uses them.

    A GradScaler decides for each optimizer separately: an overflow among Muon's gradients would skip Muon's
    update, while AdamW updates the other weights in the same step. With this wrapper it decides once.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of every optimizer, as they are now (loading a state replaces them)."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Run every optimizer's step."""
        for optimizer in self.optimizers:
            optimizer.step()


def one_update(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return the only optimizer, or one that updates the weights of all."""
    if len(optimizers) == 1:
        return optimizers[0]
    return AllOrNothing(optimizers)  # pyright: ignore[reportReturnType]
