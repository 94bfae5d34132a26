"""NF4 (4-bit NormalFloat) with double quantisation, as QLoRA stores frozen weights: 4.127 bits per weight.

Dettmers et al., https://arxiv.org/abs/2305.14314, section 3. Blocks of 64 weights are divided by their
largest magnitude and rounded to the nearest of 16 levels. The magnitudes, less their mean, are rounded to
8-bit floats in groups of 256 with one fp32 scale each: 4 + 8/64 + 32/(64 * 256) bits.

A tensor is quantised flat, in row-major order; the last block and group are padded with zeros. The first of
two neighbours is the upper half of their byte, as in bitsandbytes. Its other layouts: blocks of other sizes,
and magnitudes that stay in fp32 (``double`` False: 4 + 32/64 bits).
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, triton_kernels
from trainfit.kernels.quantize import codebook

BLOCK = 64  # Weights per magnitude, by default
GROUP = 256  # Magnitudes per scale
TRITON = "kernels.quantize.triton"

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of NormalFloat (appendix E of the paper)."""


class Nf4(NamedTuple):
    """A quantised tensor of n weights in B = ceil(n / block) blocks."""

    codes: Tensor  # uint8 [B block / 2]: the indices of two levels per byte
    block_codes: Tensor  # uint8 [B]: (magnitude - offset) / group scale as 8-bit floats; or fp32: magnitudes
    group_scales: Tensor  # fp32 [ceil(B / 256)]; empty with magnitudes in fp32
    offset: Tensor  # fp32 [1]: the mean of the magnitudes; empty with magnitudes in fp32
    levels: Tensor  # fp32 [272]: the 16 values of codes, then the 256 of block_codes; 16 with magnitudes


def make_levels(device: torch.device | str, *, double: bool = True) -> Tensor:
    """Return both codebooks, fp32 [272], or that of the weights alone, [16]."""
    values = [*LEVELS, *codebook.levels(8, signed=True)] if double else LEVELS
    return torch.tensor(values, dtype=torch.float32).to(device)


def empty_nf4(
    num_weights: int, device: torch.device | str, block: int = BLOCK, *, double: bool = True
) -> Nf4:
    """Allocate an ``Nf4`` of this many weights; only the codebooks are filled."""
    num_blocks = -(-num_weights // block)
    wide = {"dtype": torch.float32, "device": device}
    return Nf4(
        torch.empty(num_blocks * block // 2, dtype=torch.uint8, device=device),
        torch.empty(num_blocks, dtype=torch.uint8 if double else torch.float32, device=device),
        torch.empty(-(-num_blocks // GROUP) if double else 0, **wide),
        torch.empty(1 if double else 0, **wide),
        make_levels(device, double=double),
    )


def quantize_nf4(weight: Tensor, block: int = BLOCK, *, double: bool = True) -> Nf4:
    """Quantise weights of any floating dtype and shape, on their device."""
    register()
    levels = make_levels(weight.device, double=double)
    codes, magnitudes = torch.ops.trainfit.quantize_blocks(weight.contiguous(), levels, block)
    if not double:
        return Nf4(codes, magnitudes, levels.new_empty(0), levels.new_empty(0), levels)
    return Nf4(codes, *_quantize_magnitudes(magnitudes, levels[16:]), levels)


def _quantize_magnitudes(magnitudes: Tensor, levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, group scales and mean of the magnitudes."""
    offset = magnitudes.mean(dim=0, keepdim=True)
    padded = torch.nn.functional.pad(magnitudes - offset, (0, -magnitudes.numel() % GROUP)).view(-1, GROUP)
    scales = torch.linalg.vector_norm(padded, ord=float("inf"), dim=1)
    shares = padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = _nearest(shares, levels)
    # A view would keep the padding in memory.
    return codes.view(-1)[: magnitudes.numel()].clone(), scales, offset


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """Return the indices of the nearest levels, uint8; halfway between two, of the lower."""
    return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)


def reference_quantize_blocks(weight: Tensor, levels: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Return codes (uint8, two per byte) and magnitudes (fp32, one per block) of the weights."""
    flat = weight.float().view(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    magnitudes = blocks.abs().amax(1)
    shares = blocks / magnitudes.masked_fill(magnitudes == 0, 1.0)[:, None]
    codes = _nearest(shares, levels[:16])
    return (codes[:, 0::2] << 4 | codes[:, 1::2]).view(-1), magnitudes


def reference_dequantize(
    like: Tensor, codes: Tensor, block_codes: Tensor, group_scales: Tensor, offset: Tensor, levels: Tensor,
    rows: int, columns: int,
) -> Tensor:  # fmt: skip
    """Return the weights, [rows, columns] in the dtype of ``like``: computed in fp32 and rounded once."""
    magnitudes = block_codes
    if block_codes.dtype == torch.uint8:
        scales = group_scales.repeat_interleave(GROUP)[: block_codes.numel()]
        magnitudes = levels[16 + block_codes.int()] * scales + offset
    pairs = torch.stack((codes >> 4, codes & 15), dim=-1).view(-1, _block_of(codes, block_codes))
    weight = levels[pairs.int()] * magnitudes[:, None]
    return weight.view(-1)[: rows * columns].view(rows, columns).to(like.dtype)


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.quantize_blocks`` and ``dequantize_nf4``."""
    declare(
        "quantize_blocks", reference_quantize_blocks, _fake_quantize_blocks, triton=triton_quantize_blocks
    )
    declare("dequantize_nf4", reference_dequantize, _fake_dequantize, triton=triton_dequantize)


def _block_of(codes: Tensor, block_codes: Tensor) -> int:
    """Return the number of weights that share a magnitude."""
    return 2 * codes.numel() // block_codes.numel()


def triton_quantize_blocks(weight: Tensor, levels: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Compute ``reference_quantize_blocks`` in one kernel without scratch, equal bit for bit."""
    codes, magnitudes = _fake_quantize_blocks(weight, levels, block)
    blocks_a_program = max(1, 2048 // block)
    triton_kernels(TRITON).quantize_nf4_kernel[(-(-magnitudes.numel() // blocks_a_program),)](
        weight, levels, codes, magnitudes, weight.numel(), magnitudes.numel(),
        BLOCKS=blocks_a_program, PAIRS=block // 2, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, magnitudes


def triton_dequantize(like: Tensor, *arguments: Any) -> Tensor:
    """Compute ``reference_dequantize`` in one kernel, equal bit for bit."""
    *parts, _, _ = arguments
    weight = _fake_dequantize(like, *arguments)
    num_blocks, block = parts[1].numel(), _block_of(*parts[:2])
    blocks_a_program = max(1, 4096 // block)
    triton_kernels(TRITON).dequantize_nf4_kernel[(-(-num_blocks // blocks_a_program),)](
        *parts, weight, weight.numel(), num_blocks,
        BLOCKS=blocks_a_program, PAIRS=block // 2, DOUBLE=parts[1].dtype == torch.uint8,
        enable_fp_fusion=False,
    )  # fmt: skip
    return weight


def _fake_quantize_blocks(weight: Tensor, levels: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    num_blocks = -(-weight.numel() // block)
    codes = weight.new_empty(num_blocks * block // 2, dtype=torch.uint8)
    return codes, weight.new_empty(num_blocks, dtype=torch.float32)


def _fake_dequantize(like: Tensor, codes: Tensor, *others: Any) -> Tensor:
    return codes.new_empty(others[-2:], dtype=like.dtype)
