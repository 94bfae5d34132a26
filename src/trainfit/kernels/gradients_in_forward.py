"""A loss of hidden states and a head's weight whose gradients are computed in its forward, as one autograd function.

The backward multiplies them by the gradient that comes in over the expected one, which costs nothing where that is 1: a kernel reads
the ratio on the device and returns. The idea is Liger-Kernel's (Hsu et al.,
https://arxiv.org/abs/2410.10989, section 3.2). A gradient that comes in scaled (accumulation, a loss scaler) can be said
in advance, so that small fp16 or bf16 gradients are rounded after they are scaled, as in the usual way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.operations import declare

PROGRAMS = 1056
"""Of the kernel that multiplies, eight for each of an H200's multiprocessors: few, since most launches do nothing."""
BLOCK = 2048
IGNORED_LABEL = -100
Gradients = tuple[Tensor | None, ...]
Run = Callable[[torch.dtype, tuple[bool, ...]], tuple[Tensor, Gradients]]
"""(dtype of the products, which gradients are needed) -> loss, and those gradients of hidden states, weight and bias for a
loss gradient as expected; None where not needed."""


def loss_with_gradients(
    run: Run, hidden: Tensor, weight: Tensor, bias: Tensor | None, expected_gradient: Tensor | float
) -> Tensor:
    """The loss, with a backward. ``run`` is called once, without autocast; its products' dtype is autocast's, if it is on.

    Args:
        expected_gradient: what the backward is likely to be given; any other gradient is right too.
    """
    register()
    wanted = torch.is_grad_enabled()
    return _LossWithGradients.apply(hidden, weight, bias, run, wanted, expected_gradient)  # pyright: ignore[reportReturnType]


class _LossWithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        run: Run,
        wanted: bool,
        expected_gradient: Tensor | float,
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        needed = ctx.needs_input_grad[:3] if wanted else (False, False, False)
        with torch.autocast(device, enabled=False):
            loss, ctx.gradients = run(dtype, needed)
        ctx.expected_gradient = expected_gradient
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Nothing may hold the gradients any more when the engine gets them: it would copy the weight's.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this loss were used up by its first backward")
        expected = ctx.expected_gradient
        # By a number CUDA multiplies with its reciprocal, and 1/13 by 1/13 would not be 1.
        ratio = grad / (expected if isinstance(expected, Tensor) else grad.new_full((), expected))
        for gradient in gradients:
            if gradient is not None:
                torch.ops.trainfit.multiply_unless_one_(gradient, ratio)
        return (*gradients, None, None, None)


def multiply(first: Tensor, second: Tensor, *, into: Tensor, add: bool = False) -> None:
    """The product, written or added ``into`` a tensor that may have another dtype."""
    if into.dtype == first.dtype:
        into.addmm_(first, second, beta=int(add))
    elif add:
        into.add_(torch.mm(first, second))
    else:
        into.copy_(torch.mm(first, second))


# -- the operation ----------------------------------------------------------------------------------------------------


@cache
def register() -> None:
    """Make ``torch.ops.trainfit.multiply_unless_one_``; a second call does nothing.

    It multiplies a tensor in place by a scalar on its device, and touches nothing where that is 1.
    """
    declare("multiply_unless_one_", _run, lambda *_: None, mutates=("x",))


def _run(x: Tensor, ratio: Tensor) -> None:
    if x.is_cuda and x.dtype != torch.float64 and x.is_contiguous():
        triton_multiply_unless_one(x, ratio)
    elif x.is_cuda or ratio.item() != 1:  # Asking a GPU would make the host wait.
        x.mul_(ratio)


def triton_multiply_unless_one(x: Tensor, ratio: Tensor) -> None:
    """One kernel over contiguous ``x``; computed in fp32."""
    from trainfit.kernels import gradients_in_forward_triton

    kernels: Any = gradients_in_forward_triton  # a constexpr argument takes a plain value
    if x.numel():
        programs = min(PROGRAMS, -(-x.numel() // BLOCK))
        kernels.multiply_unless_one_kernel[(programs,)](x, ratio, x.numel(), BLOCK=BLOCK)
