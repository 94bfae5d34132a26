"""Stochastic rounding of fp32 values to bf16 weights: the expected value is preserved.

Rounding to nearest loses every update below half the weight's last bit (2^-9 of the weight). Source: Zamirai
et al., Revisiting BFloat16 Training, arXiv:2010.06192, section 3. Nothing is saved; the Triton kernel
allocates nothing.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare
from trainfit.kernels.stochastic_rounding import reference

NUM_SEEDS = 2**31


def seed_of(seed: int, number: int, step: int) -> int:
    """Return the seed of an optimizer's ``number``-th parameter at this step."""
    return (seed + 1_000_003 * number + 7_919 * step) % NUM_SEEDS


def add_rounded(target: Tensor, update: Tensor, keep: float, factor: float, seed: int) -> None:
    """Compute target = keep * target + factor * update in place.

    A bf16 target is computed in fp32 and rounded stochastically; it has to be contiguous.
    """
    if target.dtype != torch.bfloat16:
        target.mul_(keep).add_(update, alpha=factor)
        return
    assert target.is_contiguous(), "the kernel reads a flat tensor"
    torch.ops.trainfit.add_rounded_(target, update.contiguous(), keep, factor, seed)


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.add_rounded_``."""
    declare(
        "add_rounded_", reference.add_rounded, lambda *_: None, triton=triton_add_rounded, mutates=("target",)
    )


def triton_add_rounded(target: Tensor, update: Tensor, keep: float, factor: float, seed: int) -> None:
    """Compute ``reference.add_rounded`` in one kernel, with other random bits."""
    from trainfit.kernels.stochastic_rounding import triton

    kernels: Any = triton  # its constexpr parameters take plain values
    numel = target.numel()
    kernels.weighted_sum_kernel[(-(-numel // 1024),)](target, update, keep, factor, seed, numel, BLOCK=1024)
