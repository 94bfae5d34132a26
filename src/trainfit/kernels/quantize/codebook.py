"""The 256 or 16 values that an 8-bit or 4-bit moment can have, times its block's scale; and its rounding to the nearest.

8 bits and the first moment in 4: the dynamic map of Dettmers et al., https://arxiv.org/abs/2110.02861, section 2.2. The
second moment in 4: the linear map without zero of Li et al., https://arxiv.org/abs/2309.01507, section 4.1 (a zero in the
denominator is a jump of the weight). The same tables as torchao's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = {8: 256, 4: 128}
"""Elements that share a scale, by bits: the papers' and torchao's."""
LEAST_SCALE = 1e-12


def levels(bits: int, *, signed: bool) -> list[float]:
    """The values, ascending, in -1 to 1.

    In 8 bits with signs that is the "dynamic tree" of https://arxiv.org/abs/1511.04561, which nf4's scales take as well: each
    of seven decades below 1 is cut, from 0.1 to 1, into 1, 2, ... 64 equal cells, whose middles are the values, and 0 and 1.
    """
    if bits == 4 and not signed:
        return [number / 16 for number in range(1, 17)]
    decades = bits - 1
    middles = [
        (0.1 + 0.9 * (cell + 0.5) / num_cells) * 10.0 ** (decade + 1 - decades)
        for decade in range(decades)
        for num_cells in [2**decade if signed else 2 ** (decade + 1)]
        for cell in range(num_cells)
    ]
    return ([-middle for middle in reversed(middles)] if signed else []) + [0.0, *middles, 1.0]


class MomentLevels:
    """Both moments' values and bounds in one tensor of a device; ``bits``: 8 or 4.

    A bound is the middle between a level and the one below it; the first is never asked.
    """

    def __init__(self, bits: int, device: torch.device):
        self.bits = bits
        rows = [
            row
            for signed in (True, False)
            for values in [levels(bits, signed=signed)]
            for row in (values, [-math.inf, *map(_middle, values[:-1], values[1:])])
        ]
        self.table = torch.tensor(rows, dtype=torch.float32, device=device)
        """fp32 [4, 2^bits]: values and bounds of the first moment, then of the second."""


def _middle(a: float, b: float) -> float:
    return (a + b) / 2


class Codes(NamedTuple):
    """A quantised moment of n elements."""

    codes: Tensor
    """uint8: of the moment's shape in 8 bits, [ceil(n / 2)] in 4."""
    scales: Tensor
    """fp32 [ceil(n / block)]."""


def zeros(shape: torch.Size, bits: int, device: torch.device) -> Codes:
    """A moment that is 0 everywhere."""
    numel = shape.numel()
    codes = torch.zeros(shape if bits == 8 else (-(-numel // 2),), dtype=torch.uint8, device=device)
    return Codes(codes, torch.zeros(-(-numel // BLOCK[bits]), device=device))


def decode(moment: Codes, values: Tensor, bits: int, numel: int) -> Tensor:
    """The moment in fp32, [numel]."""
    codes = moment.codes.flatten()
    if bits == 4:
        codes = torch.stack([codes >> 4, codes & 15], 1).flatten()[:numel]
    scales = moment.scales.repeat_interleave(BLOCK[bits])[:numel]
    return values[codes.int()] * scales


def encode(moment: Codes, wide: Tensor, bounds: Tensor, bits: int) -> None:
    """Write fp32 values ([n]) into the moment's memory: each the nearest level of its block's scale."""
    block = BLOCK[bits]
    padded = torch.nn.functional.pad(wide, (0, -wide.numel() % block)).view(-1, block)
    scales = padded.abs().amax(1).clamp_(min=LEAST_SCALE)
    codes = torch.bucketize(padded / scales[:, None], bounds[1:], right=True).to(torch.uint8).flatten()
    if bits == 4:
        codes = codes[0::2] << 4 | codes[1::2]
    moment.codes.copy_(codes[: moment.codes.numel()].view_as(moment.codes))
    moment.scales.copy_(scales)
