"""Round a matrix to fp8, in the layout of the matrix, transposed, or both.

Shapes: [o, i]. One scale a tensor, from its largest magnitude (Micikevicius et al., arXiv:2209.05433).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, interprets_triton, triton_kernels

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12
"""The least magnitude that a scale is of, as torchao's."""
TRITON = "kernels.fp8_cast.triton"
ROWS, BLOCK, WARPS = 64, 128, 8  # Of a program's tile
FOUR = 4
"""Rows whose codes a kernel puts into a word before it transposes. Products in fp8 read 16."""


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.fp8_cast_``, ``fp8_cast_both``, ``fp8_cast_rows`` and
    ``fp8_cast_transposed``.
    """
    mutates = ("codes", "transposed", "scale")
    declare("fp8_cast_", reference_cast, lambda *_: None, triton=triton_cast, mutates=mutates)
    declare("fp8_cast_both", reference_cast_both, _fake_cast_both, triton=triton_cast_both)
    declare("fp8_cast_rows", reference_cast_rows, _fake_cast_rows, triton=triton_cast_rows)
    declare(
        "fp8_cast_transposed", reference_cast_transposed, _fake_cast_transposed,
        triton=triton_cast_transposed,
    )  # fmt: skip


def magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor, fp32 []; NaN if it holds one. It is read once."""
    return torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)


def rounded(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round a tensor to fp8; the largest code stands for ``amax``, and larger values are cut off.

    Returns:
        The codes, and the scale [1] by which they are multiplied, fp32.
    """
    scale = amax.float().reshape(1).clamp(min=LEAST) / torch.finfo(dtype).max
    return rounded_by(x, scale, dtype), scale


def rounded_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a tensor to fp8 by a scale that is known."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def transposed_bytes(codes: Tensor) -> Tensor:
    """Return codes [o, i] as contiguous [i, o]."""
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


def reference_cast(x: Tensor, amax: Tensor, codes: Tensor, transposed: Tensor, scale: Tensor) -> None:
    """Write a matrix's codes and scale.

    Args:
        amax: the largest magnitude, fp32 [1].
        codes: e4m3 [o, i].
        transposed: e4m3 [i, o], or [0]: not written.
        scale: fp32 [1].
    """
    found, of_codes = rounded(x, amax, codes.dtype)
    codes.copy_(found)
    scale.copy_(of_codes)
    if transposed.numel():
        transposed.copy_(transposed_bytes(codes))


def reference_cast_both(x: Tensor, amax: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix's codes as [n, i] and as [i, n], and their scale, fp32 [1].

    Args:
        amax: the largest magnitude, fp32 [1] or [].
        e5m2: round to e5m2 instead of e4m3.
    """
    codes, scale = rounded(x, amax, E5M2 if e5m2 else E4M3)
    return codes, transposed_bytes(codes), scale


def reference_cast_rows(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix's codes in e4m3, [n, i], and their scale, fp32 [1]."""
    return rounded(x, amax, E4M3)


def reference_cast_transposed(like: Tensor, x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix's codes in e4m3, transposed [i, n], and their scale, fp32 [1].

    ``like`` is not read: a compiler that sees it cannot cast in the forward and keep the result.
    """
    codes, scale = rounded(x, amax, E4M3)
    return transposed_bytes(codes), scale


def triton_cast_both(x: Tensor, amax: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``reference_cast_both`` as ``triton_cast`` does."""
    codes, transposed, scale = _fake_cast_both(x, amax, e5m2)
    if x.numel():
        triton_cast(x, amax, codes, transposed, scale)
    return codes, transposed, scale


def triton_cast_rows(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``reference_cast_rows`` in one kernel."""
    codes, scale = _fake_cast_rows(x, amax)
    if x.numel():
        triton_cast(x, amax, codes, codes.new_empty(0), scale)
    return codes, scale


def triton_cast_transposed(like: Tensor, x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``reference_cast_transposed`` as ``triton_cast`` does."""
    if x.shape[0] % FOUR:
        return reference_cast_transposed(like, x, amax)
    codes, scale = _fake_cast_transposed(like, x, amax)
    if x.numel():
        _launch_transposed(x, amax, codes, codes, scale, by_rows=False)
    return codes, scale


def _fake_cast_both(x: Tensor, amax: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor]:
    n, i = x.shape
    codes, transposed = (x.new_empty(shape, dtype=E5M2 if e5m2 else E4M3) for shape in ((n, i), (i, n)))
    return codes, transposed, x.new_empty(1, dtype=torch.float32)


def _fake_cast_rows(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(1, dtype=torch.float32)


def _fake_cast_transposed(like: Tensor, x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=E4M3), x.new_empty(1, dtype=torch.float32)


def triton_cast(x: Tensor, amax: Tensor, codes: Tensor, transposed: Tensor, scale: Tensor) -> None:
    """Compute ``reference_cast`` in one kernel; in PyTorch where the rows are not a multiple of four."""
    rows, columns = x.shape
    if not transposed.numel():
        triton_kernels(TRITON).fp8_cast_kernel[_grid(x)](
            x, amax, codes, scale, rows, columns, **_constants(codes), num_warps=WARPS
        )
    elif rows % FOUR:
        reference_cast(x, amax, codes, transposed, scale)
    else:
        _launch_transposed(x, amax, codes, transposed, scale, by_rows=True)


def _launch_transposed(
    x: Tensor, amax: Tensor, codes: Tensor, transposed: Tensor, scale: Tensor, *, by_rows: bool
) -> None:
    triton_kernels(TRITON).fp8_cast_both_kernel[_grid(x)](
        x, amax, codes, transposed, scale, x.shape[0] // FOUR, x.shape[1], **_constants(codes),
        BY_ROWS=by_rows, num_warps=WARPS,
    )  # fmt: skip


def _grid(x: Tensor) -> tuple[int, int]:
    return -(-x.shape[0] // ROWS), -(-x.shape[1] // BLOCK)


def _constants(codes: Tensor) -> dict[str, Any]:
    return {
        "ROWS": ROWS, "BLOCK": BLOCK, "LEAST": LEAST, "LARGEST": torch.finfo(codes.dtype).max,
        "WORDS": not interprets_triton(),
    }  # fmt: skip
