"""Weights in int8 or fp8 (e4m3) with one fp32 scale per row: 8 + 32 / columns bits per weight.

A row's largest magnitude becomes the largest code: 127 in int8 (symmetric, -128 is not used), 448 in e4m3
(Micikevicius et al., https://arxiv.org/abs/2209.05433, table 1).
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, triton_kernels

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Rows(NamedTuple):
    """A quantised matrix."""

    codes: Tensor  # int8 or float8_e4m3fn [rows, columns]
    scales: Tensor  # fp32 [rows]


def empty_rows(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device | str) -> Rows:
    """Allocate an uninitialised ``Rows``."""
    codes = torch.empty(num_rows, num_columns, dtype=dtype, device=device)
    return Rows(codes, torch.empty(num_rows, dtype=torch.float32, device=device))


def quantize_rows(weight: Tensor, dtype: torch.dtype) -> Rows:
    """Quantise a matrix of any floating dtype to int8 or float8_e4m3fn, rounding to nearest even."""
    largest = LARGEST[dtype]
    wide = weight.to(torch.float32, copy=True)
    magnitudes = torch.maximum(wide.amax(1), -wide.amin(1))
    scales = magnitudes.masked_fill_(magnitudes == 0, largest).div_(largest)
    wide.div_(scales[:, None])
    if dtype == torch.int8:
        wide.round_()
    return Rows(wide.to(dtype), scales)


def reference_dequantize(like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix in the dtype of ``like``: computed in fp32 and rounded once."""
    return (codes.float() * scales[:, None]).to(like.dtype)


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.dequantize_rows``."""
    declare("dequantize_rows", reference_dequantize, _fake, triton=triton_dequantize)


def triton_dequantize(like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Compute ``reference_dequantize`` in one kernel, equal bit for bit."""
    weight = _fake(like, codes, scales)
    rows, columns = codes.shape
    fp8 = codes.dtype == torch.float8_e4m3fn
    triton_kernels("kernels.quantize.triton").dequantize_rows_kernel[(rows, -(-columns // 2048))](
        codes.view(torch.uint8) if fp8 else codes, scales, weight, columns,
        FP8=fp8, BLOCK=2048, enable_fp_fusion=False,
    )  # fmt: skip
    return weight


def _fake(like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return torch.empty_like(codes, dtype=like.dtype)
