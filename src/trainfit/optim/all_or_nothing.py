"""Several optimizers as one: all of a step's weights are updated, or none. Not a technique by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def one_update(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return what runs the step of every optimizer: the only one itself, or all of them together."""
    return optimizers[0] if len(optimizers) == 1 else AllOrNothing(optimizers)  # pyright: ignore[reportReturnType]


class AllOrNothing:
    """Present several optimizers to a GradScaler as one: their parameters, and one step of them all.

    A GradScaler decides for each optimizer separately: an overflow among Muon's gradients would skip Muon's
    update, while AdamW updates the other weights in the same step. With this wrapper it decides once.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of every optimizer, as they are now (loading a state replaces them)."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Run every optimizer's step."""
        assert closure is None, "a step of trainfit has no closure"
        for optimizer in self.optimizers:
            optimizer.step()
