"""Weights in int8 or fp8 (e4m3) with one fp32 scale per row: 8 + 32 / columns bits per weight.

A row's largest magnitude becomes the largest code: 127 in int8 (symmetric, -128 is not used), 448 in e4m3
(Micikevicius et al., https://arxiv.org/abs/2209.05433, table 1).

Shapes: t tokens, i inputs, o outputs of a layer with weight [o, i].
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.kernels.custom_op import declare, triton_kernels

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: 448.0}
TILE = 32  # Words of rows and columns of codes that a program transposes


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


def quantize_tokens(x_ti: Tensor) -> Rows:
    """Round activations to e4m3 by one scale a token; compiled, this is a part of what computes them."""
    magnitudes = torch.linalg.vector_norm(x_ti, float("inf"), -1, keepdim=True, dtype=torch.float32)
    scales = (magnitudes / LARGEST[FP8]).clamp(min=torch.finfo(torch.float32).tiny)
    return Rows((x_ti / scales).to(FP8), scales)


def fp8_product(
    x: Rows, w_oi: Tensor, w_scales: Tensor, dtype: torch.dtype, *, emulated: bool, fast: bool = True
) -> Tensor:
    """Return x W^T, [t, o], of operands in e4m3 with a scale for each row of both.

    Args:
        x: [t, i], scales [t, 1].
        w_scales: fp32 [o].
        emulated: multiply in fp32, on a device without fp8 products.
        fast: sum in the tensor cores' own precision; False, as torchao does for gradients: in fp32.
    """
    if emulated:
        return (F.linear(x.codes.float(), w_oi.float()) * x.scales * w_scales).to(dtype)
    # Row-wise scales are for results in bf16 alone.
    y = torch._scaled_mm(
        x.codes, w_oi.t(), x.scales, w_scales[None], out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return y.to(dtype)


def reference_transpose(like: Tensor, codes: Tensor) -> Tensor:
    """Return codes [o, i] as contiguous [i, o], which fp8 products read.

    ``like`` is not read: a compiler that sees it cannot transpose in the forward and keep the result.
    """
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


def reference_dequantize(like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix in the dtype of ``like``: computed in fp32 and rounded once."""
    return (codes.float() * scales[:, None]).to(like.dtype)


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.dequantize_rows`` and ``transpose_codes``."""
    declare("dequantize_rows", reference_dequantize, _fake, triton=triton_dequantize)
    declare("transpose_codes", reference_transpose, _fake_transpose, triton=triton_transpose)


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


def triton_transpose(like: Tensor, codes: Tensor) -> Tensor:
    """Compute ``reference_transpose`` in one kernel, where sizes are multiples of 4."""
    rows, columns = codes.shape
    if rows % 4 or columns % 4:
        return reference_transpose(like, codes)
    out, tiles = _fake_transpose(like, codes), (-(-columns // (4 * TILE)), -(-rows // (4 * TILE)))
    triton_kernels("kernels.quantize.triton").transpose_bytes_kernel[tiles](
        codes.view(torch.int32), out.view(torch.int32), rows // 4, columns // 4, TILE=TILE
    )
    return out


def _fake_transpose(like: Tensor, codes: Tensor) -> Tensor:
    return codes.new_empty(codes.shape[1], codes.shape[0])


def _fake(like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return torch.empty_like(codes, dtype=like.dtype)
