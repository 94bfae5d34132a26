"""Base class of optimizers that update one parameter at a time."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PerParameterOptimizer(torch.optim.Optimizer):
    """Optimizer whose ``step`` calls ``_update`` for each parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; return the closure's loss if one is given."""
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
        """Update one parameter in place.

        Args:
            group: Its parameter group.
            number: Its number among all parameters, from 1, with or without gradients.
        """
