"""NF4: weights in 4-bit NormalFloat with doubly quantised scales, as QLoRA stores its frozen base.

Dettmers et al., https://arxiv.org/abs/2305.14314, section 3: blocks of 64 weights, each divided by its largest
magnitude and rounded to the nearest of 16 levels; those magnitudes less their mean are rounded to 8-bit floats in groups
of 256, each group with one fp32 scale. 4 + 8/64 + 32/(64 * 256) = 4.127 bits a weight.

The weights of a tensor are taken row by row; a last block or group that is not full is filled with zeros. The first
of two neighbours is the upper half of their byte, as in bitsandbytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare
from trainfit.kernels.quantize import codebook

BLOCK = 64
"""Weights that share a magnitude."""
GROUP = 256
"""Magnitudes that share a scale."""

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of NormalFloat (appendix E there)."""


class Nf4(NamedTuple):
    """A quantised tensor of n weights in B = ceil(n / 64) blocks."""

    codes: Tensor
    """uint8 [32 B]: two levels a byte."""
    block_codes: Tensor
    """uint8 [B]: the blocks' magnitudes, less ``offset`` and over their group's scale, as 8-bit floats."""
    group_scales: Tensor
    """fp32 [ceil(B / 256)]."""
    offset: Tensor
    """fp32 [1]: the mean of the magnitudes."""
    levels: Tensor
    """fp32 [272]: the 16 values of a weight's code, then the 256 of a block's; kernels look them up in memory."""


def make_levels(device: torch.device | str) -> Tensor:
    """Both code books, fp32 [272]."""
    return torch.tensor([*LEVELS, *codebook.levels(8, signed=True)], dtype=torch.float32).to(device)


def midpoints(levels: Tensor) -> Tensor:
    """Where one level gives way to the next; a value on the border takes the lower level."""
    return (levels[1:] + levels[:-1]) / 2


def empty_nf4(num_weights: int, device: torch.device | str) -> Nf4:
    """Memory for the codes of so many weights; only the code books are filled."""
    num_blocks = -(-num_weights // BLOCK)
    return Nf4(
        torch.empty(num_blocks * BLOCK // 2, dtype=torch.uint8, device=device),
        torch.empty(num_blocks, dtype=torch.uint8, device=device),
        torch.empty(-(-num_blocks // GROUP), dtype=torch.float32, device=device),
        torch.empty(1, dtype=torch.float32, device=device),
        make_levels(device),
    )


def quantize_nf4(weight: Tensor) -> Nf4:
    """The weights (any floating dtype and shape) in NF4, on their device."""
    register()
    levels = make_levels(weight.device)
    codes, magnitudes = torch.ops.trainfit.quantize_blocks(weight.contiguous(), levels)
    return Nf4(codes, *_quantize_magnitudes(magnitudes, levels[16:]), levels)


def _quantize_magnitudes(magnitudes: Tensor, levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The second quantisation: codes, scales of groups, mean."""
    offset = magnitudes.mean(dim=0, keepdim=True)
    padded = torch.nn.functional.pad(magnitudes - offset, (0, -magnitudes.numel() % GROUP)).view(-1, GROUP)
    scales = torch.linalg.vector_norm(padded, ord=float("inf"), dim=1)
    shares = padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(shares, midpoints(levels), out_int32=True).to(torch.uint8)
    # A copy: what is cut off would stay in memory behind a view.
    return codes.view(-1)[: magnitudes.numel()].clone(), scales, offset


# -- PyTorch bodies ----------------------------------------------------------------------------------------------------


def reference_quantize_blocks(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (uint8, two a byte) and magnitudes (fp32, one a block) of the weights."""
    flat = weight.float().view(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    magnitudes = blocks.abs().amax(1)
    shares = blocks / magnitudes.masked_fill(magnitudes == 0, 1.0)[:, None]
    codes = torch.bucketize(shares, midpoints(levels[:16]), out_int32=True).to(torch.uint8)
    return (codes[:, 0::2] << 4 | codes[:, 1::2]).view(-1), magnitudes


def reference_dequantize(
    like: Tensor,
    codes: Tensor,
    block_codes: Tensor,
    group_scales: Tensor,
    offset: Tensor,
    levels: Tensor,
    rows: int,
    columns: int,
) -> Tensor:
    """The weights, [rows, columns] in the dtype of ``like``: computed in fp32, rounded once."""
    scales = group_scales.repeat_interleave(GROUP)[: block_codes.numel()]
    magnitudes = levels[16 + block_codes.int()] * scales + offset
    pairs = torch.stack((codes >> 4, codes & 15), dim=-1).view(-1, BLOCK)
    weight = levels[pairs.int()] * magnitudes[:, None]
    return weight.view(-1)[: rows * columns].view(rows, columns).to(like.dtype)


# -- Triton bodies -----------------------------------------------------------------------------------------------------


def triton_quantize_blocks(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """As ``reference_quantize_blocks``, one kernel and no scratch."""
    from triton import cdiv

    from trainfit.kernels.quantize import triton as quantize_triton

    kernels: Any = quantize_triton  # a constexpr argument takes a plain value
    codes, magnitudes = _fake_quantize_blocks(weight, levels)
    blocks_a_program = 32
    kernels.quantize_nf4_kernel[(cdiv(magnitudes.numel(), blocks_a_program),)](
        weight, levels, codes, magnitudes, weight.numel(), magnitudes.numel(),
        BLOCKS=blocks_a_program, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, magnitudes


def triton_dequantize(
    like: Tensor,
    codes: Tensor,
    block_codes: Tensor,
    group_scales: Tensor,
    offset: Tensor,
    levels: Tensor,
    rows: int,
    columns: int,
) -> Tensor:
    """As ``reference_dequantize``, one kernel, bit for bit the same."""
    from triton import cdiv

    from trainfit.kernels.quantize import triton as quantize_triton

    kernels: Any = quantize_triton
    weight = codes.new_empty((rows, columns), dtype=like.dtype)
    blocks_a_program = 64
    kernels.dequantize_nf4_kernel[(cdiv(block_codes.numel(), blocks_a_program),)](
        codes, block_codes, group_scales, offset, levels, weight, weight.numel(), block_codes.numel(),
        BLOCKS=blocks_a_program, enable_fp_fusion=False,
    )  # fmt: skip
    return weight


# -- the operations ----------------------------------------------------------------------------------------------------


@cache
def register() -> None:
    """Make ``torch.ops.trainfit.quantize_blocks`` and ``dequantize_nf4``; a second call does nothing."""
    declare("quantize_blocks", _run_quantize_blocks, _fake_quantize_blocks)
    declare("dequantize_nf4", _run_dequantize, _fake_dequantize)


def _run_quantize_blocks(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    run = triton_quantize_blocks if weight.is_cuda else reference_quantize_blocks
    return run(weight, levels)


def _fake_quantize_blocks(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    num_blocks = -(-weight.numel() // BLOCK)
    codes = weight.new_empty(num_blocks * BLOCK // 2, dtype=torch.uint8)
    return codes, weight.new_empty(num_blocks, dtype=torch.float32)


def _run_dequantize(
    like: Tensor,
    codes: Tensor,
    block_codes: Tensor,
    group_scales: Tensor,
    offset: Tensor,
    levels: Tensor,
    rows: int,
    columns: int,
) -> Tensor:
    run = triton_dequantize if codes.is_cuda else reference_dequantize
    return run(like, codes, block_codes, group_scales, offset, levels, rows, columns)


def _fake_dequantize(
    like: Tensor,
    codes: Tensor,
    block_codes: Tensor,
    group_scales: Tensor,
    offset: Tensor,
    levels: Tensor,
    rows: int,
    columns: int,
) -> Tensor:
    return codes.new_empty((rows, columns), dtype=like.dtype)
