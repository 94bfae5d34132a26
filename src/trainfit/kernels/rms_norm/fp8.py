"""RMSNorm rounded to fp8 as it is computed, and the residual sums around it.

Shapes: n rows of e elements, contiguous; x and what is added to it [n, e], weight [e].

The norm's output y is rounded to x's dtype and then, by its largest magnitude, to e4m3; y itself is not
written. A first kernel computes the rows' factors and that magnitude, and of a sum also the sum; a second one
computes y again and writes its codes as a product reads them: [n, e], or [e, n] for the weight's gradient.
Passes over a tensor [n, e] of 16 bits: of a sum 2 read and 1 written, then 1 read and 1 written; the backward
of both 3 read and 1 written.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, interprets_triton, triton_kernels
from trainfit.kernels.fp8_cast.op import E4M3, FOUR, LEAST, rounded, transposed_bytes
from trainfit.kernels.rms_norm.op import reference_forward, wide_backward

TRITON = "kernels.rms_norm.fp8_triton"


class Rows(NamedTuple):
    """What a program of whole rows takes at once: rows, and columns of a chunk of them.

    ``programs`` are at most as many as an H200's 132 multiprocessors run at once. The number does not depend
    on the GPU, and each program adds its rows in order, so that sums are deterministic.
    """

    rows: int
    block: int
    num_warps: int
    programs: int
    stages: int = 1


class Tile(NamedTuple):
    """Rows and columns that a program rounds, and its warps."""

    rows: int = 64
    block: int = 128
    num_warps: int = 4


def forward_rows(e: int) -> Rows:
    """Return what a program of ``add_rms_norm_amax`` takes: at most 128 registers a thread."""
    block = max(256, _power_of_two(-(-e // 6)))
    return Rows(max(1, 1024 // block), block, max(4, block // 256), 528)


def backward_rows(e: int) -> Rows:
    """Return what a program of ``rms_norm_backward_add`` takes: the fastest of those tried on an H100.

    At most 168 registers a thread, but for the widest rows.
    """
    if e <= 1024:
        return Rows(1, max(256, _power_of_two(e)), 4, 1056)
    if e <= 1536:
        return Rows(1, 512, 4, 792)
    if e <= 2048:
        return Rows(1, 512, 4, 528, 2)
    if e <= 3584:
        return Rows(1, 512, 4, 396)
    block = max(1024, _power_of_two(-(-e // 7)))
    return Rows(1, block, min(32, block // 128), 264)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def num_parts(n: int, e: int) -> int:
    """Return the partial sums of the weight's gradient of n rows, one a program."""
    return min(n, backward_rows(e).programs)


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.rms_norm_amax``, ``add_rms_norm_amax``, ``rms_norm_fp8_rows``,
    ``rms_norm_fp8_transposed`` and ``rms_norm_backward_add``.
    """
    declare("rms_norm_amax", reference_amax, _fake_amax, triton=triton_amax)
    declare("add_rms_norm_amax", reference_add_amax, _fake_add_amax, triton=triton_add_amax)
    declare("rms_norm_fp8_rows", reference_rows, _fake_rows, triton=triton_rows)
    declare("rms_norm_fp8_transposed", reference_transposed, _fake_transposed, triton=triton_transposed)
    declare("rms_norm_backward_add", reference_backward_add, _fake_backward_add, triton=triton_backward_add)


def reference_amax(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return 1 / sqrt(mean(x^2) + eps) of each row, fp32 [n], and the largest magnitude of y, fp32 [1]."""
    y, rstd = reference_forward(x, weight, eps)
    return rstd, y.abs().amax().float().reshape(1)


def reference_add_amax(x: Tensor, a: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return h = x + a, and of h what ``reference_amax`` returns of x."""
    h = x + a
    return h, *reference_amax(h, weight, eps)


def reference_rows(x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return y in e4m3 [n, e], and its scale, fp32 [1]."""
    y = (x.to(rstd.dtype) * rstd[:, None] * weight).to(x.dtype)
    return rounded(y, amax, E4M3)


def reference_transposed(
    like: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y in e4m3, transposed [e, n], and its scale, fp32 [1].

    ``like`` is not read: a compiler that sees it cannot compute this in the forward and keep the result.
    """
    codes, scale = reference_rows(x, weight, rstd, amax)
    return transposed_bytes(codes), scale


def reference_backward_add(
    gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, added: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x plus ``added``, rounded once, and partial sums of the weight's gradient.

    Args:
        gradient: of y, [n, e].

    Returns:
        [n, e] in x's dtype, and fp32 [parts, e].
    """
    dx, parts = wide_backward(gradient, x, weight, rstd, num_parts(*x.shape))
    return (dx + added).to(x.dtype), parts


def triton_amax(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``reference_amax`` in one kernel."""
    rstd, amax = _fake_amax(x, weight, eps)
    _launch_amax("rms_norm_amax_kernel", (x, weight, rstd, amax.zero_()), x, eps, forward_rows(x.shape[1]))
    return rstd, amax


def triton_add_amax(x: Tensor, a: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``reference_add_amax`` in one kernel."""
    h, rstd, amax = _fake_add_amax(x, a, weight, eps)
    tensors = (x, a, weight, h, rstd, amax.zero_())
    _launch_amax("add_rms_norm_amax_kernel", tensors, x, eps, forward_rows(x.shape[1]))
    return h, rstd, amax


def triton_rows(x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``reference_rows`` in one kernel; in PyTorch where the rows are not a multiple of four."""
    if x.shape[0] % FOUR:
        return reference_rows(x, weight, rstd, amax)
    out = _fake_rows(x, weight, rstd, amax)
    _launch_fp8("rms_norm_fp8_rows_kernel", (x, weight, rstd, amax, *out), Tile())
    return out


def triton_transposed(
    like: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``reference_transposed`` as ``triton_rows`` does."""
    if x.shape[0] % FOUR:
        return reference_transposed(like, x, weight, rstd, amax)
    out = _fake_transposed(like, x, weight, rstd, amax)
    _launch_fp8("rms_norm_fp8_transposed_kernel", (x, weight, rstd, amax, *out), Tile())
    return out


def triton_backward_add(
    gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, added: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``reference_backward_add`` in one kernel, a partial sum per program."""
    dx, parts = _fake_backward_add(gradient, x, weight, rstd, added)
    _launch_backward((gradient, x, weight, rstd, added, dx, parts), backward_rows(x.shape[1]))
    return dx, parts


def _launch_amax(kernel: str, tensors: tuple[Tensor, ...], x: Tensor, eps: float, tile: Rows) -> None:
    if x.numel():
        grid = (min(tile.programs, -(-x.shape[0] // tile.rows)),)
        getattr(triton_kernels(TRITON), kernel)[grid](*tensors, x.shape[0], eps, **_constants(x, tile))


def _launch_backward(tensors: tuple[Tensor, ...], tile: Rows) -> None:
    x, parts = tensors[1], tensors[-1]
    if x.numel():
        triton_kernels(TRITON).rms_norm_backward_add_kernel[(len(parts),)](
            *tensors, x.shape[0], **_constants(x, tile)
        )


def _launch_fp8(kernel: str, tensors: tuple[Tensor, ...], tile: Tile) -> None:
    x = tensors[0]
    n, e = x.shape
    if x.numel():
        getattr(triton_kernels(TRITON), kernel)[(-(-n // tile.rows), -(-e // tile.block))](
            *tensors, n // FOUR, e, ROWS=tile.rows, BLOCK=tile.block, LEAST=LEAST,
            LARGEST=torch.finfo(E4M3).max, WORDS=not interprets_triton(), PACKED=_packs(x),
            num_warps=tile.num_warps,
        )  # fmt: skip


def _constants(x: Tensor, tile: Rows) -> dict[str, int]:
    e = x.shape[1]
    return {
        "WIDTH": e, "ROWS": tile.rows, "BLOCK": tile.block, "CHUNKS": -(-e // tile.block),
        "STAGES": tile.stages, "PACKED": _packs(x), "num_warps": tile.num_warps,
    }  # fmt: skip


def _packs(x: Tensor) -> bool:
    """Return whether a kernel uses instructions of two elements of bf16, which the interpreter has not."""
    return x.dtype == torch.bfloat16 and not interprets_triton()


def _fake_amax(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty(1, dtype=torch.float32)


def _fake_add_amax(x: Tensor, a: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_fake_amax(x, weight, eps)


def _fake_backward_add(
    gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, added: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), rstd.new_empty(num_parts(*x.shape), x.shape[1])


def _fake_rows(x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(1, dtype=torch.float32)


def _fake_transposed(
    like: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=E4M3), x.new_empty(1, dtype=torch.float32)
