"""``torch.optim.Muon`` with stochastic rounding of bf16 weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from trainfit.kernels.stochastic_rounding.op import add_rounded, register, seed_of
from trainfit.optim.per_parameter import PerParameterOptimizer


class StochasticMuon(PerParameterOptimizer, torch.optim.Muon):
    """Muon with state ``step`` (on the host) and ``momentum_buffer`` in the weight's dtype.

    Args:
        seed: Seed of the rounding; each parameter and step derives its own.
        settings: Arguments of ``torch.optim.Muon``.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, seed: int, **settings: Any):
        super().__init__(params, **settings)
        register()
        self._seed = seed

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=torch.tensor(0.0), momentum_buffer=torch.zeros_like(gradient))
        state["step"] += 1
        momentum = group["momentum"]
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = _zeropower_via_newtonschulz(
            update, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        factor = -_adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        seed = seed_of(self._seed, number, int(state["step"].item()))
        add_rounded(parameter, update, 1 - group["lr"] * group["weight_decay"], factor, seed)
