"""An optimizer of ours updates one weight after another, each by kernels of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class WeightByWeight(torch.optim.Optimizer):
    """``step`` hands every weight that has a gradient to ``_update``; no lists over all weights, nothing of their size."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights; the closure's loss, if one is given."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, number)
        return loss

    @abstractmethod
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], number: int) -> None:
        """One weight, in place.

        Args:
            group: the settings of its parameter group.
            number: of the weight among all, from 1, whether or not those before it have gradients.
        """
