"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) in one pass over a weight, for what PyTorch's does not do:

- stochastic rounding of bf16 weights and moments, which keeps small updates;
- bf16 or fp16 weights with fp32 master weights and moments; scaled gradients are unscaled in fp32;
- moments in 8 or 4 bits, with the states and results of torchao's AdamW8bit and AdamW4bit. torchao compiles
  its step for each shape, and holds two fp32 copies of the weight while it runs.

Arithmetic is in fp32: Triton on CUDA, which allocates nothing, and PyTorch elsewhere.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from trainfit.kernels.custom_op import declare, triton_kernels
from trainfit.kernels.quantize.codebook import BLOCK, Codes, MomentLevels, decode, encode, zeros
from trainfit.kernels.stochastic_rounding.op import generator_of, seed_of, write
from trainfit.optim.per_parameter import PerParameterOptimizer, local

LEAST_NUMEL = 4096
"""Smaller tensors have fp32 moments, as in bitsandbytes; torchao keeps them in the weight's dtype."""
TILE = 1024  # Elements per program
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
TRITON = "optim.adamw_triton"


class Numbers(NamedTuple):
    """Scalars of one update."""

    lr: float
    decay: float  # lr times the weight decay
    take1: float  # 1 - beta1: the share of the new gradient in the first moment
    take2: float
    eps: float
    correction1: float  # 1 - beta1^step
    correction2: float  # sqrt(1 - beta2^step)

    @classmethod
    def of(cls, group: dict[str, Any], step: int) -> Self:
        (beta1, beta2), lr = group["betas"], group["lr"]
        corrections = 1 - beta1**step, math.sqrt(1 - beta2**step)
        return cls(lr, lr * group["weight_decay"], 1 - beta1, 1 - beta2, group["eps"], *corrections)


class FusedAdamW(PerParameterOptimizer):
    """AdamW with state ``step`` (on the host) and two moments.

    Moments are ``exp_avg`` and ``exp_avg_sq`` in the weight's dtype (fp32 for small tensors where moments are
    quantised), or ``exp_avg_codes``, ``exp_avg_scales``, ``exp_avg_sq_codes`` and ``exp_avg_sq_scales``. With
    master weights there is ``master`` too, and all three are in fp32.

    Args:
        levels: Codebooks of 8-bit or 4-bit moments; optimizers may share them.
        stochastic: Round bf16 weights and moments stochastically; other dtypes are rounded to nearest.
        master: Update an fp32 copy of each weight, made before its first update, and round it to the weight.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        *,
        levels: MomentLevels | None = None,
        stochastic: bool = False,
        master: bool = False,
        seed: int,
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.999), "eps": 1e-8}
        super().__init__(params, defaults)
        register()
        assert not (master and (stochastic or levels)), "the kernel of master weights rounds to nearest"
        self._levels, self._stochastic, self._master, self._seed = levels, stochastic, master, seed
        self._unscale = 1.0
        self._step_supports_amp_scaling = master  # A GradScaler leaves the unscaling to this optimizer.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; with a GradScaler, unless a gradient is not finite."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and found.item():
            return None
        self._unscale = 1.0 if scale is None else scale.reciprocal().item()
        return super().step(closure)

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if self._master:
            moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in MOMENTS}
            return {MASTER: parameter.detach().to(torch.float32, copy=True), **moments}
        if self._levels is None:
            return {name: torch.zeros_like(parameter) for name in MOMENTS}
        if parameter.numel() < LEAST_NUMEL:
            return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in MOMENTS}
        shape = local(parameter).shape
        return {
            f"{name}_{part}": value
            for name in MOMENTS
            for part, value in zeros(shape, self._levels.bits, parameter.device)._asdict().items()
        }

    def _update(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], number: int
    ) -> None:
        assert parameter.is_contiguous(), "the kernels read a flat weight"
        step = int(state["step"].item())
        stochastic = self._stochastic and parameter.dtype == torch.bfloat16
        settings = list(Numbers.of(group, step)), stochastic, seed_of(self._seed, number, step)
        gradient = gradient.contiguous()
        if self._master:
            kept = [state[name] for name in (MASTER, *MOMENTS)]
            torch.ops.trainfit.adamw_master_(parameter, gradient, *kept, settings[0], self._unscale)
        elif self._levels is None or "exp_avg" in state:
            moments = [state[name] for name in MOMENTS]
            torch.ops.trainfit.adamw_(parameter, gradient, *moments, *settings)
        else:
            moments = [state[f"{name}_{part}"] for name in MOMENTS for part in Codes._fields]
            table = self._levels.table
            torch.ops.trainfit.adamw_coded_(parameter, gradient, *moments, table, *settings)


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.adamw_``, ``adamw_master_`` and ``adamw_coded_``."""
    declare("adamw_", plain_adamw, lambda *_: None, triton=triton_adamw, mutates=("p", "m", "v"))
    kept = ("p", "master", "m", "v")
    declare("adamw_master_", plain_adamw_master, lambda *_: None, triton=triton_adamw_master, mutates=kept)
    coded = ("p", "m_codes", "m_scales", "v_codes", "v_scales")
    declare("adamw_coded_", plain_adamw_coded, lambda *_: None, triton=triton_adamw_coded, mutates=coded)


def plain_adamw(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: list[float], stochastic: bool, seed: int
) -> None:
    """Update in place; ``stochastic`` rounds bf16 weights and moments stochastically."""
    generator = generator_of(seed, p.device) if stochastic else None
    new = updated(p.float(), g.float(), m.float(), v.float(), Numbers(*numbers))
    for target, values in zip((p, m, v), new, strict=True):
        write(target, values, generator)


def updated(p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new weight and moments in fp32 (arXiv:1711.05101, algorithm 2)."""
    p = p - numbers.decay * p
    m = m.lerp(g, numbers.take1)
    v = v.lerp(g.square(), numbers.take2)
    return (p - numbers.lr * (m / numbers.correction1) / (v.sqrt() / numbers.correction2 + numbers.eps), m, v)


def triton_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: list[float], *rounding: Any) -> None:
    """Compute ``plain_adamw`` in one kernel, with other random bits."""
    (stochastic, seed), numel = rounding, p.numel()
    triton_kernels(TRITON).adamw_kernel[(-(-numel // TILE),)](
        p, g, m, v, *numbers, seed, numel, STOCHASTIC=stochastic, BLOCK=TILE
    )


def plain_adamw_master(
    p: Tensor, g: Tensor, master: Tensor, m: Tensor, v: Tensor, numbers: list[float], unscale: float
) -> None:
    """Update ``master``, ``m`` and ``v`` (fp32) in place, and write the rounded master weight into ``p``.

    Args:
        unscale: the gradient's factor, 1 over the loss scale.
    """
    new = updated(master, g.float() * unscale, m, v, Numbers(*numbers))
    for target, values in zip((master, m, v), new, strict=True):
        target.copy_(values)
    p.copy_(master)


def triton_adamw_master(
    p: Tensor, g: Tensor, master: Tensor, m: Tensor, v: Tensor, numbers: list[float], unscale: float
) -> None:
    """Compute ``plain_adamw_master`` in one kernel."""
    numel = p.numel()
    triton_kernels(TRITON).adamw_master_kernel[(-(-numel // TILE),)](
        p, g, master, m, v, *numbers, unscale, numel, BLOCK=TILE
    )


def plain_adamw_coded(
    p: Tensor, g: Tensor, m_codes: Tensor, m_scales: Tensor, v_codes: Tensor, v_scales: Tensor, table: Tensor,
    numbers: list[float], stochastic: bool, seed: int,
) -> None:  # fmt: skip
    """Update in place; ``table`` is ``MomentLevels.table``."""
    bits, numel = _bits(table), p.numel()
    first, second = Codes(m_codes, m_scales), Codes(v_codes, v_scales)
    m, v = decode(first, table[0], bits, numel), decode(second, table[2], bits, numel)
    new, m, v = updated(p.flatten().float(), g.flatten().float(), m, v, Numbers(*numbers))
    encode(first, m, table[1], bits)
    encode(second, v, table[3], bits)
    write(p, new.view_as(p), seed if stochastic else None)


def triton_adamw_coded(p: Tensor, g: Tensor, *arguments: Any) -> None:
    """Compute ``plain_adamw_coded`` in one kernel, with other random bits."""
    *moments, table, numbers, stochastic, seed = arguments
    bits, numel = _bits(table), p.numel()
    block: dict[str, int] = {"BLOCK": BLOCK[8]} if bits == 8 else {"PAIRS": BLOCK[4] // 2}
    getattr(triton_kernels(TRITON), f"adamw{bits}_kernel")[(-(-numel // TILE),)](
        p, g, *moments, table, *numbers, seed, numel,
        STOCHASTIC=stochastic, ROWS=TILE // BLOCK[bits], **block,
    )  # fmt: skip


def _bits(table: Tensor) -> int:
    return {256: 8, 16: 4}[table.shape[1]]
