"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) in one pass over a weight, for what torch's own does not do:

- bf16 weights and moments rounded at random, so that small updates are not lost (``stochastic_rounding``);
- moments in 8 or 4 bits (``codebook``). The states and the function are torchao's AdamW8bit and AdamW4bit, which a
  test compares step by step; torchao compiles its step anew for each shape, and the program holds two fp32 copies of the
  weight while it runs.

Everything is computed in fp32. Triton on CUDA, plain PyTorch elsewhere; nothing of the weight's size is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainfit.kernels.custom_op import declare
from trainfit.kernels.quantize.codebook import BLOCK, Codes, MomentLevels, decode, encode, zeros
from trainfit.kernels.stochastic_rounding.op import generator_of, round_stochastically, seed_of
from trainfit.optim.per_parameter import WeightByWeight

LEAST_NUMEL = 4096
"""Smaller tensors keep fp32 moments, as in bitsandbytes and torchao (which keeps the weight's dtype)."""
TILE = 1024
"""Elements that one program updates."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Numbers(NamedTuple):
    """One update's scalars."""

    lr: float
    decay: float
    """lr times the weight decay."""
    take1: float
    """1 - beta1: the share of the new gradient in the first moment."""
    take2: float
    eps: float
    correction1: float
    """1 - beta1^step."""
    correction2: float
    """The root of 1 - beta2^step."""

    @classmethod
    def of(cls, group: dict[str, Any], step: int) -> Numbers:
        (beta1, beta2), lr = group["betas"], group["lr"]
        return cls(
            lr, lr * group["weight_decay"], 1 - beta1, 1 - beta2, group["eps"],
            1 - beta1**step, math.sqrt(1 - beta2**step),
        )  # fmt: skip


class FusedAdamW(WeightByWeight):
    """One tensor after another; state: ``step`` (on the host) and two moments.

    A moment is ``exp_avg`` and ``exp_avg_sq`` in the weight's dtype (in fp32 where moments are quantised but the tensor is
    small), or the same names with ``_codes`` and ``_scales``.

    Args:
        levels: for 8-bit or 4-bit moments; optimizers may share it.
        stochastic: round bf16 weights, and moments in bf16, at random; other dtypes are rounded to nearest.
        seed: of the rounding; with the parameter's number and the step it decides every bit of it.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        levels: MomentLevels | None = None,
        stochastic: bool,
        seed: int,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        register()
        self._levels, self._stochastic, self._seed = levels, stochastic, seed

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], number: int) -> None:
        assert parameter.is_contiguous(), "kernels take a weight flat"
        state = self.state[parameter]
        if not state:
            state.update(self._new_state(parameter))
        state["step"] += 1
        step = int(state["step"].item())
        numbers = list(Numbers.of(group, step))
        stochastic = self._stochastic and parameter.dtype == torch.bfloat16
        seed = seed_of(self._seed, number, step)
        gradient = gradient.contiguous()
        if self._levels is None or "exp_avg" in state:
            moments = [state[name] for name in MOMENTS]
            torch.ops.trainfit.adamw_(parameter, gradient, *moments, numbers, stochastic, seed)
            return
        moments = [state[f"{name}_{part}"] for name in MOMENTS for part in Codes._fields]
        torch.ops.trainfit.adamw_coded_(
            parameter, gradient, *moments, self._levels.table, numbers, stochastic, seed
        )

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.tensor(0.0)}  # On the host, as torch keeps it: reading it waits for nothing.
        if self._levels is None:
            return state | {name: torch.zeros_like(parameter) for name in MOMENTS}
        if parameter.numel() < LEAST_NUMEL:
            return state | {name: torch.zeros_like(parameter, dtype=torch.float32) for name in MOMENTS}
        for name in MOMENTS:
            moment = zeros(parameter.shape, self._levels.bits, parameter.device)
            state |= {f"{name}_{part}": value for part, value in moment._asdict().items()}
        return state


# -- moments as they are ------------------------------------------------------------------------------------------------


def plain_adamw(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: list[float], stochastic: bool, seed: int
) -> None:
    """Update in place; ``stochastic``: weights and moments in bf16 are rounded at random."""
    generator = generator_of(seed, p.device)
    wide, m_wide, v_wide = (t.float() for t in (p, m, v))
    for target, values in zip(
        (p, m, v), updated(wide, g.float(), m_wide, v_wide, Numbers(*numbers)), strict=True
    ):
        _write(target, values, generator if stochastic else None)


def updated(p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2 of arXiv:1711.05101 with decoupled decay: the new weight and its moments, from wide ones."""
    p = p - numbers.decay * p
    m = m.lerp(g, numbers.take1)
    v = v.lerp(g.square(), numbers.take2)
    return (
        p - numbers.lr * (m / numbers.correction1) / (v.sqrt() / numbers.correction2 + numbers.eps),
        m,
        v,
    )


def _write(target: Tensor, values: Tensor, generator: torch.Generator | None) -> None:
    if generator is not None and target.dtype == torch.bfloat16:
        round_stochastically(target, values, generator)
    else:
        target.copy_(values)


def triton_adamw(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: list[float], stochastic: bool, seed: int
) -> None:
    """As ``plain_adamw``; other random bits."""
    numel = p.numel()
    _kernels().adamw_kernel[(-(-numel // TILE),)](
        p, g, m, v, *numbers, seed, numel, STOCHASTIC=stochastic, BLOCK=TILE
    )


# -- moments in codes ---------------------------------------------------------------------------------------------------


def plain_adamw_coded(
    p: Tensor, g: Tensor, m_codes: Tensor, m_scales: Tensor, v_codes: Tensor, v_scales: Tensor, table: Tensor,
    numbers: list[float], stochastic: bool, seed: int,
) -> None:  # fmt: skip
    """Update in place; table: ``MomentLevels.table``."""
    bits, numel = _bits(table), p.numel()
    first, second = Codes(m_codes, m_scales), Codes(v_codes, v_scales)
    m, v = decode(first, table[0], bits, numel), decode(second, table[2], bits, numel)
    new, m, v = updated(p.flatten().float(), g.flatten().float(), m, v, Numbers(*numbers))
    encode(first, m, table[1], bits)
    encode(second, v, table[3], bits)
    _write(p, new.view_as(p), generator_of(seed, p.device) if stochastic else None)


def triton_adamw_coded(
    p: Tensor, g: Tensor, m_codes: Tensor, m_scales: Tensor, v_codes: Tensor, v_scales: Tensor, table: Tensor,
    numbers: list[float], stochastic: bool, seed: int,
) -> None:  # fmt: skip
    """As ``plain_adamw_coded``; other random bits."""
    bits, numel = _bits(table), p.numel()
    rows = TILE // BLOCK[bits]
    num_programs = -(-numel // TILE)
    arguments = (p, g, m_codes, m_scales, v_codes, v_scales, table, *numbers, seed, numel)
    if bits == 8:
        _kernels().adamw8_kernel[(num_programs,)](
            *arguments, STOCHASTIC=stochastic, ROWS=rows, BLOCK=BLOCK[bits]
        )
    else:
        _kernels().adamw4_kernel[(num_programs,)](
            *arguments, STOCHASTIC=stochastic, ROWS=rows, PAIRS=BLOCK[bits] // 2
        )


def _bits(table: Tensor) -> int:
    return {256: 8, 16: 4}[table.shape[1]]


def _kernels() -> Any:
    from trainfit.optim import adamw_triton

    return adamw_triton


# -- the operations -----------------------------------------------------------------------------------------------------


@cache
def register() -> None:
    """Make ``torch.ops.trainfit.adamw_`` and ``adamw_coded_``; a second call does nothing."""
    declare("adamw_", _adamw, lambda *_: None, mutates=("p", "m", "v"))
    coded = ("p", "m_codes", "m_scales", "v_codes", "v_scales")
    declare("adamw_coded_", _adamw_coded, lambda *_: None, mutates=coded)


def _adamw(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: list[float], stochastic: bool, seed: int
) -> None:
    (triton_adamw if p.is_cuda else plain_adamw)(p, g, m, v, numbers, stochastic, seed)


def _adamw_coded(
    p: Tensor, g: Tensor, m_codes: Tensor, m_scales: Tensor, v_codes: Tensor, v_scales: Tensor, table: Tensor,
    numbers: list[float], stochastic: bool, seed: int,
) -> None:  # fmt: skip
    run = triton_adamw_coded if p.is_cuda else plain_adamw_coded
    run(p, g, m_codes, m_scales, v_codes, v_scales, table, numbers, stochastic, seed)
