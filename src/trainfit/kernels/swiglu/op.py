"""SwiGLU: silu(gate) * up, computed in fp32 and rounded once.

Shapes: gate, up and the result [n, f]. Rows of gate and up are contiguous with any row stride, so both may be
halves of one [n, 2f] product. Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, equation
5.

Saved for backward: gate and up. The backward allocates their gradients as one [n, 2f] tensor.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, refuse_second_derivative, triton_kernels
from trainfit.spec.errors import InputError


class Tile(NamedTuple):
    """Elements of a row that one program computes, and its warps."""

    block: int = 1024
    num_warps: int = 4


class SwiGLU(torch.autograd.Function):
    """``SwiGLU.apply(gate, up)`` of [n, f] tensors, or ``apply(gate_up, None)`` of [n, 2f], gate first.

    The gradient of ``gate_up`` is one tensor too.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.ops.trainfit.swiglu(*(gate.chunk(2, 1) if up is None else (gate, up)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivative()
        gate, up = ctx.saved_tensors
        halves = gate.chunk(2, 1) if up is None else (gate, up)
        both = torch.ops.trainfit.swiglu_backward(gradients[0].contiguous(), *halves)
        return (both, None) if up is None else both.chunk(2, 1)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up.

    Registers the operators on first use; call ``register`` before compiling.

    Args:
        gate: [..., f], or [..., 2f] with gate and up as its halves.
        up: [..., f]; None if ``gate`` holds both.

    Raises:
        InputError: Shapes or dtypes that do not match.
    """
    if not torch.compiler.is_compiling():
        register()
    if up is None and (gate.dim() < 1 or gate.shape[-1] % 2):
        raise InputError(f"halves of {list(gate.shape)}", "make the last size even")
    if up is not None and (gate.shape != up.shape or gate.dtype != up.dtype or gate.dim() < 1):
        given = f"gate {list(gate.shape)} {gate.dtype}, up {list(up.shape)} {up.dtype}"
        raise InputError(given, "make them equal")
    out: Any = SwiGLU.apply(_flat(gate), None if up is None else _flat(up))
    return out.view(*gate.shape[:-1], out.shape[1])


def _flat(x: Tensor) -> Tensor:
    """Return x as [n, f] with contiguous rows."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.swiglu`` and its backward."""
    declare("swiglu", reference_forward, _fake_forward, triton=triton_forward)
    declare("swiglu_backward", reference_backward, _fake_backward, triton=triton_backward)


def reference_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, [n, f]."""
    g = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (g * g.sigmoid() * up).to(gate.dtype)


def reference_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return the gradients of gate and up as the halves of one tensor, [n, 2f]."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    d, g, u = gradient.to(wide), gate.to(wide), up.to(wide)
    s = g.sigmoid()
    return torch.cat((d * u * s * (1 + g * (1 - s)), d * g * s), 1).to(gate.dtype)


def triton_forward(gate: Tensor, up: Tensor, tile: Tile = Tile()) -> Tensor:  # noqa: B008
    """Compute ``reference_forward`` in one kernel."""
    out = _fake_forward(gate, up)
    _launch("swiglu_kernel", (gate, up, out), gate, up, tile)
    return out


def triton_backward(gradient: Tensor, gate: Tensor, up: Tensor, tile: Tile = Tile()) -> Tensor:  # noqa: B008
    """Compute ``reference_backward`` in one kernel."""
    both = _fake_backward(gradient, gate, up)
    _launch("swiglu_backward_kernel", (gradient, gate, up, both), gate, up, tile)
    return both


def _launch(kernel: str, tensors: tuple[Tensor, ...], gate: Tensor, up: Tensor, tile: Tile) -> None:
    n, f = gate.shape
    if gate.numel():
        getattr(triton_kernels("kernels.swiglu.triton"), kernel)[(n * -(-f // tile.block),)](
            *tensors, gate.stride(0), up.stride(0), f, BLOCK=tile.block, num_warps=tile.num_warps
        )


def _fake_forward(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _fake_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape[0], 2 * gate.shape[1])
