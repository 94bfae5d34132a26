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
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the optimizers get scaled gradients: fp16 ones, which unscaling in place would round."""
        is_half = any(str(p.dtype) == "torch.float16" for group in self.param_groups for p in group["params"])
        return is_half and all(getattr(one, "_step_supports_amp_scaling", False) for one in self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of every optimizer, as they are now (loading a state replaces them)."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Run every optimizer's step, unless a scaled gradient is not finite."""
        # A GradScaler sets both attributes while it calls this.
        scale: Any = getattr(self, "grad_scale", None)
        found: Any = getattr(self, "found_inf", None)
        if found is not None and found.item():
            return
        for optimizer in self.optimizers:
            own: Any = optimizer
            if found is not None:
                own.grad_scale, own.found_inf = scale, found
            optimizer.step()
            if found is not None:
                del own.grad_scale, own.found_inf


def one_update(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return the only optimizer, or one that updates the weights of all."""
    if len(optimizers) == 1:
        return optimizers[0]
    return AllOrNothing(optimizers)  # pyright: ignore[reportReturnType]
