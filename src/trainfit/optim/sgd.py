"""SGD with stochastic rounding of bf16 weights and momentum."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.kernels.stochastic_rounding.op import add_rounded, register, seed_of
from trainfit.optim.per_parameter import PerParameterOptimizer


class StochasticSGD(PerParameterOptimizer):
    """``torch.optim.SGD`` with state ``step`` (on the host) and, with momentum, ``momentum_buffer``.

    Args:
        seed: Seed of the rounding; each parameter and step derives its own.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float, *, seed: int
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        register()
        self._seed = seed

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], number: int) -> None:
        lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            if momentum:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        state["step"] += 1
        # One update may round three sums, each with its own random bits.
        first = 3 * int(state["step"].item())
        seeds = [seed_of(self._seed, number, first + i) for i in range(3)]
        if not momentum:
            add_rounded(parameter, gradient, 1 - lr * decay, -lr, seeds[0])
            return
        buffer = state["momentum_buffer"]
        add_rounded(buffer, gradient, momentum, 1.0, seeds[0])
        if decay:
            add_rounded(buffer, parameter, 1.0, decay, seeds[1])
        add_rounded(parameter, buffer, 1.0, -lr, seeds[2])
