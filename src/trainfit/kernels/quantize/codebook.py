"""Codebooks of 8-bit and 4-bit optimizer moments, with one scale per block, equal to torchao's.

8 bits, and the first moment in 4 bits: the dynamic map of Dettmers et al., https://arxiv.org/abs/2110.02861,
section 2.2. Second moment in 4 bits: the linear map without zero of Li et al.,
https://arxiv.org/abs/2309.01507, section 4.1 (a zero in the denominator makes the weight jump).
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = {8: 256, 4: 128}  # Elements per scale, by bits, as in the papers and torchao
LEAST_SCALE = 1e-12


def levels(bits: int, *, signed: bool) -> list[float]:
    """Return the values in ascending order, from -1 to 1.

    Signed 8 bits are the "dynamic tree" of https://arxiv.org/abs/1511.04561, which NF4's scales use as well.
    The values are 0, 1 and the midpoints of 1, 2, ... 64 equal cells in each of seven decades below 1.
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
    """Codebooks of both moments in one tensor; ``bits`` is 8 or 4.

    A bound is the midpoint of a level and the one below it; the first bound is never read.
    """

    def __init__(self, bits: int, device: torch.device):
        self.bits = bits
        rows = [
            row
            for signed in (True, False)
            for values in [levels(bits, signed=signed)]
            for row in (values, [-math.inf, *((a + b) / 2 for a, b in pairwise(values))])
        ]
        self.table = torch.tensor(rows, dtype=torch.float32, device=device)
        """fp32 [4, 2^bits]: values and bounds of the first moment, then of the second moment."""


class Codes(NamedTuple):
    """A quantised moment of n elements."""

    codes: Tensor  # uint8: the moment's shape in 8 bits, [ceil(n / 2)] in 4 bits
    scales: Tensor  # fp32 [ceil(n / block)]


def zeros(shape: torch.Size, bits: int, device: torch.device) -> Codes:
    """Return a moment of zeros."""
    numel = shape.numel()
    codes = torch.zeros(shape if bits == 8 else (-(-numel // 2),), dtype=torch.uint8, device=device)
    return Codes(codes, torch.zeros(-(-numel // BLOCK[bits]), device=device))


def decode(moment: Codes, values: Tensor, bits: int, numel: int) -> Tensor:
    """Return the moment in fp32, [numel]."""
    codes = moment.codes.flatten()
    if bits == 4:
        codes = torch.stack([codes >> 4, codes & 15], 1).flatten()[:numel]
    scales = moment.scales.repeat_interleave(BLOCK[bits])[:numel]
    return values[codes.int()] * scales


def encode(moment: Codes, wide: Tensor, bounds: Tensor, bits: int) -> None:
    """Write fp32 values [n] into the moment, each rounded to the nearest level of its block."""
    block = BLOCK[bits]
    padded = torch.nn.functional.pad(wide, (0, -wide.numel() % block)).view(-1, block)
    scales = padded.abs().amax(1).clamp_(min=LEAST_SCALE)
    codes = torch.bucketize(padded / scales[:, None], bounds[1:], right=True).to(torch.uint8).flatten()
    if bits == 4:
        codes = codes[0::2] << 4 | codes[1::2]
    moment.codes.copy_(codes[: moment.codes.numel()].view_as(moment.codes))
    moment.scales.copy_(scales)
