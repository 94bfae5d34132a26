"""Stochastic rounding in PyTorch."""

import torch
from torch import Tensor


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


def generator_of(seed: int, device: torch.device) -> torch.Generator:
    """Return a generator on ``device`` with this seed."""
    return torch.Generator(device).manual_seed(seed)


def add_rounded(target: Tensor, update: Tensor, keep: float, factor: float, seed: int) -> None:
    """Compute target = keep * target + factor * update in fp32, rounded stochastically."""
    round_stochastically(target, target.float().mul_(keep).add_(update.float(), alpha=factor), seed)
