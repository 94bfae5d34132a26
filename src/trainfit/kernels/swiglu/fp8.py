"""SwiGLU and its gradient rounded to fp8 as they are computed, in the layouts that products read.

Shapes: n tokens, f intermediate size. ``gate_up`` is contiguous [n, 2f], gate first.

A product of fp8 on tensor cores reads both operands along the summed dimension, so the output [n, f] is read
as it is by the next layer's product and transposed, [f, n], by the product that gives that layer's weight's
gradient. The backward writes the transposed codes: it reads gate and up anyway, and nothing of the output is
kept but its scale. One scale a tensor, from its largest magnitude (Micikevicius et al., arXiv:2209.05433): a
first kernel computes the values only for that magnitude, a second computes them again and writes codes.
Passes over a tensor [n, f] of 16 bits: forward 2 + 2 read and half of one written, backward 3 + 3 read and
2 1/2 written.
A compiler's kernels take 20 passes for these 13, as the forward's values are computed again in the backward,
and the gradient is written in 16 bits.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, interprets_triton, triton_kernels
from trainfit.kernels.fp8_cast.op import E4M3, E5M2, FOUR, LEAST, rounded, rounded_by, transposed_bytes
from trainfit.kernels.swiglu.op import reference_backward

TRITON = "kernels.swiglu.fp8_triton"


class Tile(NamedTuple):
    """Tokens and columns of a program, its warps, and how many such tiles it looks at, one after another."""

    rows: int = 64
    block: int = 128
    num_warps: int = 8
    loops: int = 1


FORWARD = Tile()
AMAX, BACKWARD_AMAX = Tile(loops=4), Tile(16, 256, 4, 8)
"""Of the kernels that look for the largest magnitude, which end in an atomic operation each."""


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.swiglu_amax``, ``swiglu_fp8`` and those of the backward."""
    declare("swiglu_amax", reference_amax, _fake_amax, triton=triton_amax)
    declare("swiglu_fp8", reference_forward, _fake_forward, triton=triton_forward)
    declare("swiglu_backward_amax", reference_backward_amax, _fake_amax, triton=triton_backward_amax)
    declare("swiglu_backward_fp8", reference_backward_fp8, _fake_backward, triton=triton_backward)
    kept = ("history",)
    declare("swiglu_fp8_delayed", reference_delayed, _fake_forward, triton=triton_delayed, mutates=kept)
    declare(
        "swiglu_backward_fp8_delayed", reference_backward_delayed, _fake_backward,
        triton=triton_backward_delayed, mutates=kept,
    )  # fmt: skip


def reference_amax(gate_up: Tensor) -> Tensor:
    """Return the largest magnitude of silu(gate) * up, fp32 [1]."""
    return _hidden(gate_up).abs().amax().reshape(1)


def reference_forward(gate_up: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up in e4m3 [n, f], and its scale, fp32 [1]."""
    return rounded(_hidden(gate_up), amax, E4M3)


def reference_backward_amax(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """Return the largest magnitude of the gradients of gate and up, fp32 [1]."""
    return _gradients(gradient, gate_up).abs().amax().reshape(1)


def reference_backward_fp8(
    gradient: Tensor, gate_up: Tensor, hidden_scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of ``gate_up`` in e5m2 as [n, 2f] and as [2f, n], its scale, fp32 [1], and the
    forward's codes, to the bit, as [f, n].

    Args:
        hidden_scale: the forward's.
    """
    codes, scale = rounded(_gradients(gradient, gate_up), amax, E5M2)
    hidden = rounded_by(_hidden(gate_up), hidden_scale, E4M3)
    return codes, transposed_bytes(codes), scale, transposed_bytes(hidden)


def reference_delayed(gate_up: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``reference_forward`` by the largest magnitude of the step before.

    Args:
        history: fp32 [2]: the magnitude to round by, and the largest one since, which this raises. If the
            first is 0, none is known, and the second stands in for it.
    """
    return reference_forward(gate_up, _noted(history, reference_amax(gate_up)))


def reference_backward_delayed(
    gradient: Tensor, gate_up: Tensor, hidden_scale: Tensor, history: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``reference_backward_fp8`` by the largest magnitude of the step before."""
    amax = _noted(history, reference_backward_amax(gradient, gate_up))
    return reference_backward_fp8(gradient, gate_up, hidden_scale, amax)


def _noted(history: Tensor, amax: Tensor) -> Tensor:
    """Raise the largest magnitude since the step before, and return the one to round by."""
    infinite = float("inf")
    history[1:].copy_(torch.maximum(history[1:], amax.nan_to_num(nan=infinite, posinf=infinite)))
    return torch.where(history[:1] > 0, history[:1], history[1:])


def _hidden(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, 1)
    return gate * gate.sigmoid() * up


def _gradients(gradient: Tensor, gate_up: Tensor) -> Tensor:
    return reference_backward(gradient.float(), *gate_up.float().chunk(2, 1))


def triton_amax(gate_up: Tensor) -> Tensor:
    """Compute ``reference_amax`` in one kernel."""
    amax = torch.zeros(1, dtype=torch.float32, device=gate_up.device)
    _launch("swiglu_amax_kernel", AMAX, gate_up, amax)
    return amax


def triton_forward(gate_up: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``reference_forward`` in one kernel; in PyTorch where the tokens are not a multiple of four,
    as the backward then does, whose codes are to be the same.
    """
    if gate_up.shape[0] % FOUR:
        return reference_forward(gate_up, amax)
    out = _fake_forward(gate_up, amax)
    _launch("swiglu_fp8_kernel", FORWARD, gate_up, amax, *out)
    return out


def triton_backward_amax(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """Compute ``reference_backward_amax`` in one kernel."""
    amax = torch.zeros(1, dtype=torch.float32, device=gate_up.device)
    _launch("swiglu_backward_amax_kernel", BACKWARD_AMAX, gradient, gate_up, amax)
    return amax


def triton_backward(
    gradient: Tensor, gate_up: Tensor, hidden_scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``reference_backward_fp8`` as ``triton_forward`` does."""
    if gate_up.shape[0] % FOUR:
        return reference_backward_fp8(gradient, gate_up, hidden_scale, amax)
    out = _fake_backward(gradient, gate_up, hidden_scale, amax)
    _launch("swiglu_backward_fp8_kernel", Tile(), gradient, gate_up, hidden_scale, amax, *out)
    return out


def triton_delayed(gate_up: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``reference_delayed`` in two kernels, of which the first ends at once if it knows enough."""
    if gate_up.shape[0] % FOUR:
        return reference_delayed(gate_up, history)
    out = _fake_forward(gate_up, history)
    _launch("swiglu_amax_kernel", AMAX, gate_up, history, delayed=True)
    _launch("swiglu_fp8_kernel", FORWARD, gate_up, history, *out, delayed=True)
    return out


def triton_backward_delayed(
    gradient: Tensor, gate_up: Tensor, hidden_scale: Tensor, history: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``reference_backward_delayed`` as ``triton_delayed`` does."""
    if gate_up.shape[0] % FOUR:
        return reference_backward_delayed(gradient, gate_up, hidden_scale, history)
    out = _fake_backward(gradient, gate_up, hidden_scale, history)
    _launch("swiglu_backward_amax_kernel", BACKWARD_AMAX, gradient, gate_up, history, delayed=True)
    tensors = (gradient, gate_up, hidden_scale, history, *out)
    _launch("swiglu_backward_fp8_kernel", Tile(), *tensors, delayed=True)
    return out


def _launch(kernel: str, tile: Tile, *tensors: Tensor, delayed: bool = False) -> None:
    gate_up = tensors[1 if "backward" in kernel else 0]
    n, f = gate_up.shape[0], gate_up.shape[1] // 2
    rows, block, num_warps, loops = tile
    by_fours = kernel == "swiglu_backward_fp8_kernel"
    constants: dict[str, Any] = {"FAST": not interprets_triton()}
    if "amax" in kernel:
        constants |= {"LOOPS": loops}
    else:
        constants |= {
            "LARGEST": torch.finfo(E5M2 if by_fours else E4M3).max, "WORDS": not interprets_triton(),
        }  # fmt: skip
    if by_fours:
        constants |= {"LARGEST_HIDDEN": torch.finfo(E4M3).max}
    if gate_up.numel():
        getattr(triton_kernels(TRITON), kernel)[(-(-n // (rows * loops)), -(-f // block))](
            *tensors, n // FOUR if by_fours else n, f, ROWS=rows, BLOCK=block, LEAST=LEAST,
            DELAYED=delayed, num_warps=num_warps, **constants,
        )  # fmt: skip


def _fake_amax(*tensors: Tensor) -> Tensor:
    return tensors[0].new_empty(1, dtype=torch.float32)


def _fake_forward(gate_up: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    n, width = gate_up.shape
    return gate_up.new_empty((n, width // 2), dtype=E4M3), gate_up.new_empty(1, dtype=torch.float32)


def _fake_backward(
    gradient: Tensor, gate_up: Tensor, hidden_scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, width = gate_up.shape
    codes, transposed = (gate_up.new_empty(shape, dtype=E5M2) for shape in ((n, width), (width, n)))
    hidden = gate_up.new_empty((width // 2, n), dtype=E4M3)
    return codes, transposed, gate_up.new_empty(1, dtype=torch.float32), hidden
