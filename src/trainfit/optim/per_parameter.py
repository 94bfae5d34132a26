"""Base class of optimizers that update one parameter at a time."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; another tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


class PerParameterOptimizer(torch.optim.Optimizer):
    """Optimizer whose ``step`` calls ``_update`` for each parameter that has a gradient.

    Of a sharded parameter (a DTensor) it updates this rank's part.
    """

    _seed: int  # Seed of stochastic rounding; each parameter and step derives its own

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; return the closure's loss if one is given."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["step"] = torch.tensor(0.0)  # As PyTorch's: on the host, read without a wait.
                        state.update(self._new_state(parameter, group))
                    state["step"] += 1
                    parts = {name: local(value) for name, value in state.items()}
                    if local(parameter).numel():  # An uneven shard may be empty.
                        self._update(local(parameter), local(parameter.grad), parts, group, number)
        return loss

    @abstractmethod
    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state before the first update, without ``step``."""

    @abstractmethod
    def _update(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], number: int
    ) -> None:
        """Update one parameter and its state in place.

        Args:
            state: ``step`` counts this update.
            group: The parameter's group.
            number: Its number among all parameters, from 1, with or without gradients.
        """
