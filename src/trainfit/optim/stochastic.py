"""SGD and Muon with stochastic rounding of bf16 weights and momentum."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from trainfit.kernels.stochastic_rounding.op import add_rounded, register, seed_of
from trainfit.optim.per_parameter import PerParameterOptimizer


class StochasticSGD(PerParameterOptimizer):
    """``torch.optim.SGD`` with state ``step`` (on the host) and, with momentum, ``momentum_buffer``."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float, *, seed: int
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        register()
        self._seed = seed

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    def _update(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], number: int
    ) -> None:
        lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
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


class StochasticMuon(PerParameterOptimizer, torch.optim.Muon):
    """``torch.optim.Muon`` with state ``step`` (on the host) and ``momentum_buffer``."""

    def __init__(self, params: Iterable[nn.Parameter], *, seed: int, **settings: Any):
        super().__init__(params, **settings)
        register()
        self._seed = seed

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def _update(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], number: int
    ) -> None:
        momentum = group["momentum"]
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = _zeropower_via_newtonschulz(
            update, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        factor = -_adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        seed = seed_of(self._seed, number, int(state["step"].item()))
        add_rounded(parameter, update, 1 - group["lr"] * group["weight_decay"], factor, seed)
