"""fp32 values written into bf16 with stochastic rounding: up or down at random, so that the mean is kept.

Rounding to nearest loses every update below half the weight's last bit (2^-9 of the weight); this keeps it on average.
Source: Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192, section 3.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare

NUM_SEEDS = 2**31


def seed_of(seed: int, number: int, step: int) -> int:
    """Seed of the random bits of an optimizer's ``number``-th parameter at this step."""
    return (seed + 1_000_003 * number + 7_919 * step) % NUM_SEEDS


@torch.no_grad()
def round_stochastically(target: Tensor, values: Tensor, seed: int | torch.Generator) -> None:
    """``target`` (bf16) takes ``values`` (fp32, same shape), which are overwritten; what is not finite stays.

    16 random bits are added below the last bit that stays, then cut off: a value x between neighbours a and b becomes
    b with probability (x - a) / (b - a). Equal seeds round equally on one device.
    """
    dtypes = (target.dtype, values.dtype)
    assert dtypes == (torch.bfloat16, torch.float32), "bf16 takes fp32's upper half"
    generator = seed if isinstance(seed, torch.Generator) else generator_of(seed, values.device)
    noise = torch.randint(
        0, 1 << 16, values.shape, generator=generator, dtype=torch.int32, device=values.device
    )
    finite = values.isfinite()
    bits = values.view(torch.int32)
    bits.add_(noise.mul_(finite)).bitwise_and_(-65536)
    target.copy_(values)


def generator_of(seed: int, device: torch.device) -> torch.Generator:
    """A generator of that device that starts from the seed."""
    return torch.Generator(device).manual_seed(seed)


# -- a weighted sum, for optimizers whose update is one ------------------------------------------------------------------


def add_rounded(target: Tensor, update: Tensor, keep: float, factor: float, seed: int) -> None:
    """``target`` (contiguous) = keep * target + factor * update; a bf16 target is computed in fp32 and rounded at random.

    A contiguous update is not copied.
    """
    if target.dtype != torch.bfloat16:
        target.mul_(keep).add_(update, alpha=factor)
        return
    assert target.is_contiguous(), "the kernel takes it flat"
    torch.ops.trainfit.add_rounded_(target, update.contiguous(), keep, factor, seed)


def plain_add_rounded(target: Tensor, update: Tensor, keep: float, factor: float, seed: int) -> None:
    """The reference."""
    round_stochastically(target, target.float().mul_(keep).add_(update.float(), alpha=factor), seed)


def triton_add_rounded(target: Tensor, update: Tensor, keep: float, factor: float, seed: int) -> None:
    """As ``plain_add_rounded``; other random bits."""
    from triton import cdiv

    from trainfit.kernels.stochastic_rounding import triton as stochastic_rounding_triton

    kernels: Any = stochastic_rounding_triton  # a constexpr argument takes a plain value
    numel = target.numel()
    kernels.weighted_sum_kernel[(cdiv(numel, 1024),)](target, update, keep, factor, seed, numel, BLOCK=1024)


@cache
def register() -> None:
    """Make ``torch.ops.trainfit.add_rounded_``; a second call does nothing."""
    declare("add_rounded_", _add_rounded, lambda *_: None, mutates=("target",))


def _add_rounded(target: Tensor, update: Tensor, keep: float, factor: float, seed: int) -> None:
    run = triton_add_rounded if target.is_cuda else plain_add_rounded
    run(target, update, keep, factor, seed)
