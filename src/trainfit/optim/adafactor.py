"""Adafactor without momentum (Shazeer and Stern, arXiv:1804.04235), in fp32 without host synchronisation.

It equals ``torch.optim.Adafactor`` on fp32 weights. On bf16 weights PyTorch takes bf16's epsilon, 2^-7, which
damps every update with a smaller gradient; here epsilon and second moment are fp32. Nothing of the
parameter's size is allocated: three passes read the gradient and one writes the weights, optionally with
stochastic rounding.

Each pass is an operator ``torch.ops.trainfit.adafactor_*``: Triton on CUDA, PyTorch elsewhere.
Shapes: parameter and gradient [b, r, c] (b: leading dimensions); vectors are updated by PyTorch operations.
"""

import math
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.kernels.custom_op import declare, triton_kernels
from trainfit.kernels.stochastic_rounding.op import seed_of, write
from trainfit.optim.per_parameter import PerParameterOptimizer, local

BETA2_DECAY, CLIP, LEAST_SCALE = -0.8, 1.0, 1e-3
"""Decay of beta2, clipping threshold d and epsilon2 of the paper; PyTorch's defaults."""
EPS = torch.finfo(torch.float32).eps
ROWS_A_PART = 512  # Rows per partial column sum
TRITON = "optim.adafactor_triton"


class FusedAdafactor(PerParameterOptimizer):
    """Adafactor with state ``step``, and ``row_var`` and ``col_var`` or ``variance`` in fp32.

    Args:
        stochastic: Round bf16 weights stochastically; other dtypes are rounded to nearest.
        scaled: Multiply the rate by the weights' root mean square, as PyTorch does; False: absolute steps.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        *,
        stochastic: bool,
        seed: int,
        scaled: bool = True,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        register()
        self._stochastic, self._seed, self._scaled = stochastic, seed, scaled

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        # Made of the parameter, so that a trace finds which layer the state belongs to.
        zeros = partial(local(parameter).new_zeros, dtype=torch.float32)
        if parameter.dim() < 2:
            return {"variance": zeros(parameter.shape)}
        b, r, c = _sizes(parameter)
        return {"row_var": zeros((b, r)), "col_var": zeros((b, c))}

    def _update(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], number: int
    ) -> None:
        step = state["step"].item()
        one_minus_beta2 = step**BETA2_DECAY
        rate = min(group["lr"], 1 / math.sqrt(step))
        keep = 1 - group["lr"] * group["weight_decay"]
        stochastic = self._stochastic and parameter.dtype == torch.bfloat16
        seed = seed_of(self._seed, number, int(step))
        if parameter.dim() < 2:
            g, p = gradient.float(), parameter.float()
            variance = state["variance"].lerp_(g.square(), one_minus_beta2)
            update = variance.clamp(min=EPS * EPS).rsqrt_().mul_(g)
            p = p * keep - update * self._step_size(p.square(), update.square(), p.numel(), rate)
            write(parameter, p, seed if stochastic else None)
            return
        b, r, c = _sizes(parameter)
        p, g = parameter.view(b, r, c), gradient.contiguous().view(b, r, c)
        row, col = state["row_var"], state["col_var"]
        row_mean, col_parts, weights = torch.ops.trainfit.adafactor_squares(p, g)
        row.lerp_(row_mean, one_minus_beta2)
        col.lerp_(col_parts.sum(1).div_(r), one_minus_beta2)
        mean = row.mean(1).clamp_(min=EPS)
        updates = torch.ops.trainfit.adafactor_update_squares(g, row, col, mean)
        size = self._step_size(weights, updates, parameter.numel(), rate)
        torch.ops.trainfit.adafactor_apply_(p, g, row, col, mean, size, keep, stochastic, seed)

    def _step_size(self, weights: Tensor, updates: Tensor, numel: int, rate: float) -> Tensor:
        """Return the update's factor ([] fp32): the clipped rate, times the weights' root mean square."""
        clip = updates.sum().div_(numel).sqrt_().div_(CLIP).clamp_(min=1.0)
        if not self._scaled:
            return clip.reciprocal_().mul_(rate)
        scale = weights.sum().div_(numel).sqrt_().clamp_(min=LEAST_SCALE)
        return scale.div_(clip).mul_(rate)


def _sizes(t: Tensor) -> tuple[int, int, int]:
    return math.prod(t.shape[:-2]), t.shape[-2], t.shape[-1]


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.adafactor_squares``, ``_update_squares`` and ``_apply_``."""
    declare("adafactor_squares", plain_squares, lambda p, g: _empty_squares(g), triton=triton_squares)
    declare(
        "adafactor_update_squares",
        plain_update_squares,
        lambda g, row, col, mean: g.new_empty(row.numel(), dtype=torch.float32),
        triton=triton_update_squares,
    )
    declare("adafactor_apply_", plain_apply, lambda *_: None, triton=triton_apply, mutates=("p",))


def plain_squares(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the squares of gradient and parameter.

    Returns:
        Row means of g^2 [b, r]; column sums of g^2 over ROWS_A_PART rows each [b, parts, c]; row sums of p^2
        [b r].
    """
    b, r, _ = g.shape
    squares = g.float().square()
    parts = [part.sum(1) for part in squares.split(ROWS_A_PART, dim=1)]
    return squares.mean(2), torch.stack(parts, 1), p.float().square().sum(2).view(b * r)


def plain_update_squares(g: Tensor, row: Tensor, col: Tensor, mean: Tensor) -> Tensor:
    """Return the row sums of the squared update, [b r]."""
    return _plain_update(g, row, col, mean).square().sum(2).flatten()


def plain_apply(
    p: Tensor, g: Tensor, row: Tensor, col: Tensor, mean: Tensor, size: Tensor, keep: float, stochastic: bool,
    seed: int,
) -> None:  # fmt: skip
    """Compute p = keep * p - size * update in place."""
    new = p.float() * keep - size * _plain_update(g, row, col, mean)
    write(p, new, seed if stochastic else None)


def _plain_update(g: Tensor, row: Tensor, col: Tensor, mean: Tensor) -> Tensor:
    variance = row[:, :, None] * col[:, None, :] / mean[:, None, None]
    return g.float() * variance.clamp_(min=EPS * EPS).rsqrt_()


def triton_squares(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``plain_squares`` in two kernels."""
    b, r, c = g.shape
    row_mean, col_parts, weights = _empty_squares(g)
    kernels = triton_kernels(TRITON)
    kernels.row_squares_kernel[(b * r,)](g, p, row_mean, weights, c, BLOCK=_block(c))
    kernels.column_squares_kernel[(-(-c // 64), col_parts.shape[1], b)](
        g, col_parts, r, c, ROWS_A_PART=ROWS_A_PART, BLOCK_R=32, BLOCK_C=64
    )
    return row_mean, col_parts, weights


def triton_update_squares(g: Tensor, row: Tensor, col: Tensor, mean: Tensor) -> Tensor:
    """Compute ``plain_update_squares`` in one kernel."""
    b, r, c = g.shape
    sums = torch.empty(b * r, dtype=torch.float32, device=g.device)
    triton_kernels(TRITON).update_squares_kernel[(b * r,)](
        g, row, col, mean, sums, EPS * EPS, r, c, BLOCK=_block(c)
    )
    return sums


def triton_apply(p: Tensor, g: Tensor, *arguments: Any) -> None:
    """Compute ``plain_apply`` in one kernel, with other random bits."""
    *moments_and_size, keep, stochastic, seed = arguments
    b, r, c = g.shape
    triton_kernels(TRITON).apply_kernel[(b * r,)](
        p, g, *moments_and_size, keep, EPS * EPS, seed, r, c, STOCHASTIC=stochastic, BLOCK=_block(c)
    )


def _block(num_columns: int) -> int:
    return min(4096, max(128, 1 << (num_columns - 1).bit_length()))


def _empty_squares(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b, r, c = g.shape
    wide = {"dtype": torch.float32, "device": g.device}
    parts = -(-r // ROWS_A_PART)
    return torch.empty(b, r, **wide), torch.empty(b, parts, c, **wide), torch.empty(b * r, **wide)
