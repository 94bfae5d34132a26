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

from trainfit.kernels.custom_op import declare, refuse_second_derivative
from trainfit.kernels.swiglu import reference
from trainfit.spec.errors import InputError


class Tile(NamedTuple):
    """Elements of a row that one program computes, and its warps."""

    block: int = 1024
    num_warps: int = 4


class SwiGLU(torch.autograd.Function):
    """``SwiGLU.apply(gate_up)`` of [n, 2f], gate first; the gradient is one tensor too."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return torch.ops.trainfit.swiglu(*gate_up.chunk(2, 1))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivative()
        (gate_up,) = ctx.saved_tensors
        return torch.ops.trainfit.swiglu_backward(gradients[0].contiguous(), *gate_up.chunk(2, 1))


class SplitSwiGLU(torch.autograd.Function):
    """``SplitSwiGLU.apply(gate, up)`` of two [n, f] tensors."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.ops.trainfit.swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivative()
        return torch.ops.trainfit.swiglu_backward(gradients[0].contiguous(), *ctx.saved_tensors).chunk(2, 1)


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
    if up is None:
        if gate.dim() < 1 or gate.shape[-1] % 2:
            raise InputError(f"halves of {list(gate.shape)}", "make the last size even")
        out: Any = SwiGLU.apply(_flat(gate))
        return out.view(*gate.shape[:-1], gate.shape[-1] // 2)
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dim() < 1:
        raise InputError(
            f"gate {list(gate.shape)} {gate.dtype}, up {list(up.shape)} {up.dtype}", "make them equal"
        )
    out = SplitSwiGLU.apply(_flat(gate), _flat(up))
    return out.view(gate.shape)


def _flat(x: Tensor) -> Tensor:
    """Return x as [n, f] with contiguous rows."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.swiglu`` and its backward."""
    declare("swiglu", reference.forward, _fake_forward, triton=triton_forward)
    declare("swiglu_backward", reference.backward, _fake_backward, triton=triton_backward)


def triton_forward(gate: Tensor, up: Tensor, tile: Tile = Tile()) -> Tensor:  # noqa: B008
    """Compute ``reference.forward`` in one kernel."""
    out = _fake_forward(gate, up)
    _launch("swiglu_kernel", (gate, up, out), gate, up, tile)
    return out


def triton_backward(gradient: Tensor, gate: Tensor, up: Tensor, tile: Tile = Tile()) -> Tensor:  # noqa: B008
    """Compute ``reference.backward`` in one kernel."""
    both = _fake_backward(gradient, gate, up)
    _launch("swiglu_backward_kernel", (gradient, gate, up, both), gate, up, tile)
    return both


def _launch(kernel: str, tensors: tuple[Tensor, ...], gate: Tensor, up: Tensor, tile: Tile) -> None:
    from trainfit.kernels.swiglu import triton

    n, f = gate.shape
    if gate.numel():
        getattr(triton, kernel)[(n * -(-f // tile.block),)](
            *tensors, gate.stride(0), up.stride(0), f, BLOCK=tile.block, num_warps=tile.num_warps
        )


def _fake_forward(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _fake_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape[0], 2 * gate.shape[1])
