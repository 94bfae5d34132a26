"""RMSNorm rounded to fp8 as it is computed, and the residual sums around it.

Shapes: n rows of e elements, contiguous; x and what is added to it [n, e], weight [e].

The norm's output y is rounded to x's dtype and then, by its largest magnitude, to e4m3; y itself is not
written. A first kernel computes the rows' factors and that magnitude, and of a sum also the sum; a second one
computes y again and writes its codes as products read them: [n, e], and [e, n] for the weight's gradient.
Passes over a tensor [n, e] of 16 bits: of a sum 2 read and 1 written, then 1 read and 1 written; the backward
of both 3 read and 1 written.
"""

from functools import cache

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare
from trainfit.kernels.fp8_cast.op import E4M3, rounded, transposed_bytes
from trainfit.kernels.rms_norm.op import MAX_PARTS, reference_forward, wide_backward


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.rms_norm_amax``, ``add_rms_norm_amax``, ``rms_norm_fp8`` and
    ``rms_norm_backward_add``.
    """
    declare("rms_norm_amax", reference_amax, _fake_amax)
    declare("add_rms_norm_amax", reference_add_amax, _fake_add_amax)
    declare("rms_norm_fp8", reference_fp8, _fake_fp8)
    declare("rms_norm_fp8_rows", reference_rows, _fake_rows)
    declare("rms_norm_fp8_transposed", reference_transposed, _fake_transposed)
    declare("rms_norm_backward_add", reference_backward_add, _fake_backward_add)


def reference_amax(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return 1 / sqrt(mean(x^2) + eps) of each row, fp32 [n], and the largest magnitude of y, fp32 [1]."""
    y, rstd = reference_forward(x, weight, eps)
    return rstd, y.abs().amax().float().reshape(1)


def reference_add_amax(x: Tensor, a: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return h = x + a, and of h what ``reference_amax`` returns of x."""
    h = x + a
    return h, *reference_amax(h, weight, eps)


def reference_fp8(x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y in e4m3 as [n, e] and as [e, n], and its scale, fp32 [1]."""
    y = (x.to(rstd.dtype) * rstd[:, None] * weight).to(x.dtype)
    codes, scale = rounded(y, amax, E4M3)
    return codes, transposed_bytes(codes), scale


def reference_rows(x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return y in e4m3 [n, e], and its scale, fp32 [1]."""
    codes, _, scale = reference_fp8(x, weight, rstd, amax)
    return codes, scale


def reference_transposed(
    like: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y in e4m3, transposed [e, n], and its scale, fp32 [1].

    ``like`` is not read: a compiler that sees it cannot compute this in the forward and keep the result.
    """
    _, codes, scale = reference_fp8(x, weight, rstd, amax)
    return codes, scale


def reference_backward_add(
    gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, added: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x plus ``added``, rounded once, and partial sums of the weight's gradient.

    Args:
        gradient: of y, [n, e].

    Returns:
        [n, e] in x's dtype, and [parts, e] as ``own_rms_norm_backward`` returns them.
    """
    dx, parts = wide_backward(gradient, x, weight, rstd)
    return (dx + added).to(x.dtype), parts


def _fake_amax(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty(1, dtype=torch.float32)


def _fake_add_amax(x: Tensor, a: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_fake_amax(x, weight, eps)


def _fake_fp8(x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, e = x.shape
    codes, transposed = (x.new_empty(shape, dtype=E4M3) for shape in ((n, e), (e, n)))
    return codes, transposed, x.new_empty(1, dtype=torch.float32)


def _fake_backward_add(
    gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, added: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), rstd.new_empty(min(x.shape[0], MAX_PARTS), x.shape[1])


def _fake_rows(x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(1, dtype=torch.float32)


def _fake_transposed(
    like: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=E4M3), x.new_empty(1, dtype=torch.float32)
