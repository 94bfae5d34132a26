"""Weights in 8 bits with one fp32 scale for each output row: int8 and fp8 (e4m3).

A row's largest magnitude becomes the largest code: 127 in int8 (symmetric, -128 is not used), 448 in e4m3
(Micikevicius et al., https://arxiv.org/abs/2209.05433, table 1). 8 + 32 / columns bits a weight.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Rows(NamedTuple):
    """A quantised matrix."""

    codes: Tensor
    """int8 or float8_e4m3fn [rows, columns]."""
    scales: Tensor
    """fp32 [rows]."""


def empty_rows(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device | str) -> Rows:
    """Memory for the codes of such a matrix, unfilled."""
    codes = torch.empty(num_rows, num_columns, dtype=dtype, device=device)
    return Rows(codes, torch.empty(num_rows, dtype=torch.float32, device=device))


def quantize_rows(weight: Tensor, dtype: torch.dtype) -> Rows:
    """The matrix (any floating dtype) in int8 or float8_e4m3fn, rounded to nearest, ties to even."""
    largest = LARGEST[dtype]
    wide = weight.to(torch.float32, copy=True)
    magnitudes = torch.maximum(wide.amax(1), -wide.amin(1))
    scales = magnitudes.masked_fill_(magnitudes == 0, largest).div_(largest)
    wide.div_(scales[:, None])
    if dtype == torch.int8:
        wide.round_()
    return Rows(wide.to(dtype), scales)


def reference_dequantize(like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The matrix in the dtype of ``like``: computed in fp32, rounded once."""
    return (codes.float() * scales[:, None]).to(like.dtype)


def triton_dequantize(like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """As ``reference_dequantize``, one kernel, bit for bit the same."""
    from triton import cdiv

    from trainfit.kernels.quantize import triton as quantize_triton

    kernels: Any = quantize_triton  # a constexpr argument takes a plain value
    weight = torch.empty_like(codes, dtype=like.dtype)
    rows, columns = codes.shape
    fp8 = codes.dtype == torch.float8_e4m3fn
    kernels.dequantize_rows_kernel[(rows, cdiv(columns, 2048))](
        codes.view(torch.uint8) if fp8 else codes, scales, weight, columns,
        FP8=fp8, BLOCK=2048, enable_fp_fusion=False,
    )  # fmt: skip
    return weight


@cache
def register() -> None:
    """Make ``torch.ops.trainfit.dequantize_rows``; a second call does nothing."""
    declare("dequantize_rows", _run_dequantize, _fake_dequantize)


def _run_dequantize(like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return (triton_dequantize if codes.is_cuda else reference_dequantize)(like, codes, scales)


def _fake_dequantize(like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return torch.empty_like(codes, dtype=like.dtype)
