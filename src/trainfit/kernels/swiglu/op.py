"""SwiGLU, silu(gate) * up, with one interface and two bodies: Triton on CUDA, PyTorch everywhere.

Shapes: gate and up [n, f], rows contiguous and as far apart as they like, so that they may be the halves of one tensor
[n, 2f] that one product made; the result [n, f]. Computed in fp32, rounded once. Kept for the backward: gate and up.
Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, equation 5.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, refuse_second_derivative
from trainfit.spec.errors import InputError


class Tile(NamedTuple):
    """Elements of a row that one program takes, and its warps."""

    block: int
    num_warps: int


FORWARD, BACKWARD = Tile(1024, 4), Tile(1024, 4)


class SwiGLU(torch.autograd.Function):
    """``SwiGLU.apply(gate_up)`` of [n, 2f], gates first: its gradient is one tensor too, without copies."""

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
    """``SplitSwiGLU.apply(gate, up)`` of two [n, f]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.ops.trainfit.swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivative()
        return torch.ops.trainfit.swiglu_backward(gradients[0].contiguous(), *ctx.saved_tensors).chunk(2, 1)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up of any [..., f]; ``up`` None: ``gate`` is [..., 2f], both halves.

    Registers the operations on first use; under ``torch.compile`` call ``register`` before.

    Raises:
        InputError: shapes or dtypes that do not fit together.
    """
    if not torch.compiler.is_compiling():
        register()
    if up is None:
        if gate.dim() < 1 or gate.shape[-1] % 2:
            raise InputError(f"halves of {list(gate.shape)}", "make the last size even")
        out = SwiGLU.apply(_flat(gate))
        return out.view(*gate.shape[:-1], gate.shape[-1] // 2)  # pyright: ignore[reportOptionalMemberAccess]
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dim() < 1:
        raise InputError(
            f"gate {list(gate.shape)} {gate.dtype}, up {list(up.shape)} {up.dtype}", "make them equal"
        )
    return SplitSwiGLU.apply(_flat(gate), _flat(up)).view(gate.shape)  # pyright: ignore[reportOptionalMemberAccess]


def _flat(x: Tensor) -> Tensor:
    """[n, f] with contiguous rows."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def plain_forward(gate: Tensor, up: Tensor) -> Tensor:
    """The PyTorch body."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    g = gate.to(wide)
    return (g * g.sigmoid() * up).to(gate.dtype)


def plain_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Gradients of gate and up beside each other, [n, 2f]."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    d, g, u = gradient.to(wide), gate.to(wide), up.to(wide)
    s = g.sigmoid()
    return torch.cat((d * u * s * (1 + g * (1 - s)), d * g * s), 1).to(gate.dtype)


def triton_forward(gate: Tensor, up: Tensor, tile: Tile = FORWARD) -> Tensor:
    """As ``plain_forward``, one kernel."""
    from trainfit.kernels.swiglu import triton as swiglu_triton

    kernels: Any = swiglu_triton  # a constexpr argument takes a plain value
    out, f = _fake_forward(gate, up), gate.shape[1]
    if out.numel():
        kernels.swiglu_kernel[_grid(gate, tile)](
            gate, up, out, gate.stride(0), up.stride(0), f, BLOCK=tile.block, num_warps=tile.num_warps
        )
    return out


def triton_backward(gradient: Tensor, gate: Tensor, up: Tensor, tile: Tile = BACKWARD) -> Tensor:
    """As ``plain_backward``, one kernel."""
    from trainfit.kernels.swiglu import triton as swiglu_triton

    kernels: Any = swiglu_triton
    both, f = _fake_backward(gradient, gate, up), gate.shape[1]
    if both.numel():
        kernels.swiglu_backward_kernel[_grid(gate, tile)](
            gradient,
            gate,
            up,
            both,
            gate.stride(0),
            up.stride(0),
            f,
            BLOCK=tile.block,
            num_warps=tile.num_warps,
        )
    return both


def _grid(gate: Tensor, tile: Tile) -> tuple[int]:
    return (gate.shape[0] * -(-gate.shape[1] // tile.block),)


@cache
def register() -> None:
    """Make ``torch.ops.trainfit.swiglu`` and its backward; a second call does nothing."""
    declare("swiglu", _run_forward, _fake_forward)
    declare("swiglu_backward", _run_backward, _fake_backward)


def _run_forward(gate: Tensor, up: Tensor) -> Tensor:
    run = triton_forward if gate.is_cuda and gate.dtype != torch.float64 else plain_forward
    return run(gate, up)


def _run_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    run = triton_backward if gate.is_cuda and gate.dtype != torch.float64 else plain_backward
    return run(gradient, gate, up)


def _fake_forward(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _fake_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape[0], 2 * gate.shape[1])
