"""fp32 values written into bf16 with stochastic rounding: up or down at random, so that the mean is kept.

Rounding to nearest loses every update below half the weight's last bit (2^-9 of the weight); this keeps it on average.
Source: Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def round_stochastically(target: Tensor, values: Tensor, seed: int) -> None:
    """``target`` (bf16) takes ``values`` (fp32, same shape), which are overwritten; what is not finite stays.

    16 random bits are added below the last bit that stays, then cut off: a value x between neighbours a and b becomes
    b with probability (x - a) / (b - a). Equal seeds round equally on one device.
    """
    dtypes = (target.dtype, values.dtype)
    assert dtypes == (torch.bfloat16, torch.float32), "bf16 takes fp32's upper half"
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(
        0, 1 << 16, values.shape, generator=generator, dtype=torch.int32, device=values.device
    )
    finite = values.isfinite()
    bits = values.view(torch.int32)
    bits.add_(noise.mul_(finite)).bitwise_and_(-65536)
    target.copy_(values)
