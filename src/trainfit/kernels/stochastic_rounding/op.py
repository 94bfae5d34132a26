"""Stochastic rounding of fp32 values to bf16 weights: the expected value is preserved.

Rounding to nearest loses every update below half the weight's last bit (2^-9 of the weight). Source: Zamirai
et al., Revisiting BFloat16 Training, arXiv:2010.06192, section 3. Nothing is saved; the Triton kernel
allocates nothing.
"""

from functools import cache

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, triton_kernels

NUM_SEEDS = 2**31


def seed_of(seed: int, number: int, step: int) -> int:
    """Return the seed of parameter ``number`` of an optimizer at this step."""
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
        "add_rounded_", reference_add_rounded, lambda *_: None, triton=triton_add_rounded, mutates=("target",)
    )


@torch.no_grad()
def round_stochastically(target: Tensor, values: Tensor, seed: int | torch.Generator) -> None:
    """Write ``values`` (fp32, overwritten) into ``target`` (bf16, same shape); inf and NaN are unchanged.

    16 random bits are added to the bits that bf16 lacks, which are then cleared: x between neighbours a and b
    becomes b with probability (x - a) / (b - a). Equal seeds round equally on one device.
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


def write(target: Tensor, values: Tensor, seed: int | torch.Generator | None) -> None:
    """Write fp32 values, stochastically rounded with ``seed`` if the target is bf16, else to nearest."""
    if seed is None or target.dtype != torch.bfloat16:
        target.copy_(values)
    else:
        round_stochastically(target, values, seed)


def generator_of(seed: int, device: torch.device) -> torch.Generator:
    """Return a generator on ``device`` with this seed."""
    return torch.Generator(device).manual_seed(seed)


def reference_add_rounded(target: Tensor, update: Tensor, keep: float, factor: float, seed: int) -> None:
    """Compute target = keep * target + factor * update in fp32, rounded stochastically."""
    round_stochastically(target, target.float().mul_(keep).add_(update.float(), alpha=factor), seed)


def triton_add_rounded(target: Tensor, update: Tensor, keep: float, factor: float, seed: int) -> None:
    """Compute ``reference_add_rounded`` in one kernel, with other random bits."""
    kernels = triton_kernels("kernels.stochastic_rounding.triton")
    numel = target.numel()
    kernels.weighted_sum_kernel[(-(-numel // 1024),)](target, update, keep, factor, seed, numel, BLOCK=1024)
