"""Adafactor without momentum, computed in fp32 whatever the weights' dtype, with no wait for the host.

The same function as ``torch.optim.Adafactor`` (Shazeer and Stern, arXiv:1804.04235) with fp32's epsilon and an fp32
second moment, so bf16 weights train as fp32 ones do. (On bf16 weights torch's own takes bf16's epsilon, 2^-7, which
holds every update back whose gradient is smaller than that.) Nothing of the parameter's size is allocated: three passes
read the gradient and one writes the weights, with stochastic rounding where asked for.

Each pass is an operation of ``torch.ops.trainfit``: Triton on CUDA, plain PyTorch elsewhere, known to fake tensors.
Shapes: parameter and gradient [b, r, c] (b: leading dimensions); vectors take torch's way, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.kernels.custom_op import declare
from trainfit.kernels.stochastic_rounding.op import round_stochastically, seed_of
from trainfit.optim.per_parameter import WeightByWeight

BETA2_DECAY, CLIP, LEAST_SCALE = -0.8, 1.0, 1e-3
"""The paper's decay of beta2, its clipping threshold d, its epsilon2: torch's defaults."""
EPS = torch.finfo(torch.float32).eps
ROWS_A_PART = 512
"""Rows whose column sums one program adds up."""


class FusedAdafactor(WeightByWeight):
    """One tensor after another, as its gradient is; state: ``step``, ``row_var`` and ``col_var``, or ``variance`` (fp32).

    Args:
        stochastic: round bf16 weights at random (``stochastic_rounding``); other dtypes are rounded to nearest.
        seed: of the rounding; with the step's number it decides every bit of it.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        *,
        stochastic: bool,
        seed: int,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        register()
        self._stochastic, self._seed = stochastic, seed

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_new_state(parameter))
        state["step"] += 1
        step = state["step"].item()
        one_minus_beta2 = step**BETA2_DECAY
        rate = min(group["lr"], 1 / math.sqrt(step))
        keep = 1 - group["lr"] * group["weight_decay"]
        stochastic = self._stochastic and parameter.dtype == torch.bfloat16
        seed = seed_of(self._seed, number, int(step))
        update = _vector if parameter.dim() < 2 else _matrix
        update(parameter, gradient, state, one_minus_beta2, rate, keep, stochastic, seed)


def _new_state(parameter: Tensor) -> dict[str, Tensor]:
    wide = {"dtype": torch.float32, "device": parameter.device}
    step = torch.tensor(0.0)  # On the host, as torch keeps it: reading it waits for nothing.
    if parameter.dim() < 2:
        return {"step": step, "variance": torch.zeros(parameter.shape, **wide)}
    b, r, c = _sizes(parameter)
    return {"step": step, "row_var": torch.zeros(b, r, **wide), "col_var": torch.zeros(b, c, **wide)}


def _sizes(t: Tensor) -> tuple[int, int, int]:
    return math.prod(t.shape[:-2]), t.shape[-2], t.shape[-1]


def _matrix(
    parameter: Tensor, gradient: Tensor, state: dict[str, Any], one_minus_beta2: float, rate: float, keep: float,
    stochastic: bool, seed: int,
) -> None:  # fmt: skip
    b, r, c = _sizes(parameter)
    p, g = parameter.view(b, r, c), gradient.contiguous().view(b, r, c)
    row, col = state["row_var"], state["col_var"]
    row_mean, col_parts, weights = torch.ops.trainfit.adafactor_squares(p, g)
    row.lerp_(row_mean, one_minus_beta2)
    col.lerp_(col_parts.sum(1).div_(r), one_minus_beta2)
    mean = row.mean(1).clamp_(min=EPS)
    updates = torch.ops.trainfit.adafactor_update_squares(g, row, col, mean)
    size = _step_size(weights, updates, parameter.numel(), rate)
    torch.ops.trainfit.adafactor_apply_(p, g, row, col, mean, size, keep, stochastic, seed)


def _step_size(weights: Tensor, updates: Tensor, numel: int, rate: float) -> Tensor:
    """What the update is multiplied by ([] fp32): the weights' root mean square times the rate, clipped."""
    scale = weights.sum().div_(numel).sqrt_().clamp_(min=LEAST_SCALE)
    clip = updates.sum().div_(numel).sqrt_().div_(CLIP).clamp_(min=1.0)
    return scale.div_(clip).mul_(rate)


def _vector(
    parameter: Tensor, gradient: Tensor, state: dict[str, Any], one_minus_beta2: float, rate: float, keep: float,
    stochastic: bool, seed: int,
) -> None:  # fmt: skip
    g, p = gradient.float(), parameter.float()
    variance = state["variance"].lerp_(g.square(), one_minus_beta2)
    update = variance.clamp(min=EPS * EPS).rsqrt_().mul_(g)
    p = p * keep - update * _step_size(p.square(), update.square(), p.numel(), rate)
    if stochastic:
        round_stochastically(parameter, p, seed)
    else:
        parameter.copy_(p)


# -- the passes ---------------------------------------------------------------------------------------------------------


def plain_squares(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means of the gradient's squares by row [b, r], their sums by column in parts [b, parts, c], p's by row [b r]."""
    b, r, _ = g.shape
    squares = g.float().square()
    parts = [part.sum(1) for part in squares.split(ROWS_A_PART, dim=1)]
    return squares.mean(2), torch.stack(parts, 1), p.float().square().sum(2).view(b * r)


def plain_update_squares(g: Tensor, row: Tensor, col: Tensor, mean: Tensor) -> Tensor:
    """Sums of the update's squares by row, [b r]."""
    return _plain_update(g, row, col, mean).square().sum(2).flatten()


def plain_apply(
    p: Tensor,
    g: Tensor,
    row: Tensor,
    col: Tensor,
    mean: Tensor,
    size: Tensor,
    keep: float,
    stochastic: bool,
    seed: int,
) -> None:
    """p = keep * p - size * update, in place."""
    new = p.float() * keep - size * _plain_update(g, row, col, mean)
    if stochastic:
        round_stochastically(p, new, seed)
    else:
        p.copy_(new)


def _plain_update(g: Tensor, row: Tensor, col: Tensor, mean: Tensor) -> Tensor:
    variance = row[:, :, None] * col[:, None, :] / mean[:, None, None]
    return g.float() * variance.clamp_(min=EPS * EPS).rsqrt_()


def triton_squares(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``plain_squares``."""
    from triton import cdiv

    b, r, c = g.shape
    row_mean, col_parts, weights = _empty_squares(g)
    kernels = _kernels()
    kernels.row_squares_kernel[(b * r,)](g, p, row_mean, weights, c, BLOCK=_block(c))
    kernels.column_squares_kernel[(cdiv(c, 64), col_parts.shape[1], b)](
        g, col_parts, r, c, ROWS_A_PART=ROWS_A_PART, BLOCK_R=32, BLOCK_C=64
    )
    return row_mean, col_parts, weights


def triton_update_squares(g: Tensor, row: Tensor, col: Tensor, mean: Tensor) -> Tensor:
    """As ``plain_update_squares``."""
    b, r, c = g.shape
    sums = torch.empty(b * r, dtype=torch.float32, device=g.device)
    _kernels().update_squares_kernel[(b * r,)](g, row, col, mean, sums, EPS * EPS, r, c, BLOCK=_block(c))
    return sums


def triton_apply(
    p: Tensor,
    g: Tensor,
    row: Tensor,
    col: Tensor,
    mean: Tensor,
    size: Tensor,
    keep: float,
    stochastic: bool,
    seed: int,
) -> None:
    """As ``plain_apply``; other random bits."""
    b, r, c = g.shape
    _kernels().apply_kernel[(b * r,)](
        p, g, row, col, mean, size, keep, EPS * EPS, seed, r, c, STOCHASTIC=stochastic, BLOCK=_block(c)
    )


def _kernels() -> Any:
    from trainfit.optim import adafactor_triton

    return adafactor_triton


def _block(num_columns: int) -> int:
    return min(4096, max(128, 1 << (num_columns - 1).bit_length()))


def _empty_squares(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b, r, c = g.shape
    wide = {"dtype": torch.float32, "device": g.device}
    parts = -(-r // ROWS_A_PART)
    return torch.empty(b, r, **wide), torch.empty(b, parts, c, **wide), torch.empty(b * r, **wide)


# -- the operations -----------------------------------------------------------------------------------------------------


@cache
def register() -> None:
    """Make ``torch.ops.trainfit.adafactor_*``; a second call does nothing."""
    declare("adafactor_squares", _squares, lambda p, g: _empty_squares(g))
    declare(
        "adafactor_update_squares",
        _update_squares,
        lambda g, row, col, mean: g.new_empty(row.numel(), dtype=torch.float32),
    )
    declare("adafactor_apply_", _apply, lambda *_: None, mutates=("p",))


def _squares(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (triton_squares if g.is_cuda else plain_squares)(p, g)


def _update_squares(g: Tensor, row: Tensor, col: Tensor, mean: Tensor) -> Tensor:
    return (triton_update_squares if g.is_cuda else plain_update_squares)(g, row, col, mean)


def _apply(
    p: Tensor,
    g: Tensor,
    row: Tensor,
    col: Tensor,
    mean: Tensor,
    size: Tensor,
    keep: float,
    stochastic: bool,
    seed: int,
) -> None:
    (triton_apply if g.is_cuda else plain_apply)(p, g, row, col, mean, size, keep, stochastic, seed)
