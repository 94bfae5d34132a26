"""A loss of hidden states and a head's weight whose gradients are computed in its forward, as one autograd function.

The backward multiplies them by the gradient that comes in over the expected one, which costs nothing where that is 1: a kernel reads
the ratio on the device and returns. The idea is Liger-Kernel's (Hsu et al.,
https://arxiv.org/abs/2410.10989, section 3.2). A gradient that comes in scaled (accumulation, a loss scaler) can be said
in advance, so that small fp16 or bf16 gradients are rounded after they are scaled, as in the usual way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, refuse_second_derivative

PROGRAMS = 1056
"""Of the kernel that multiplies, eight for each of an H200's multiprocessors: few, since most launches do nothing."""
BLOCK = 2048
IGNORED_LABEL = -100


class Gradients(NamedTuple):
    """For a loss gradient as expected; None where not needed. Filled a chunk of tokens at a time."""

    hidden: Tensor | None
    """[n, e]"""
    weight: Tensor | None
    """[v, e]"""
    bias: Tensor | None
    """[v]"""

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> Self:
        """Memory for those that are ``needed``. The first chunk sets the weight's."""
        return cls(
            torch.empty_like(hidden) if needed[0] else None,
            torch.empty_like(weight) if needed[1] else None,
            torch.zeros_like(bias) if needed[2] and bias is not None else None,
        )

    def add(self, part: slice, logits: Tensor, x: Tensor, matrix: Tensor) -> None:
        """What the gradient of a chunk's ``logits`` [c, v] makes of them.

        Args:
            part: the chunk's tokens; chunks come in order.
            x, matrix: the chunk's hidden states and the weight, in the products' dtype.
        """
        if self.hidden is not None:
            multiply(logits, matrix, into=self.hidden[part])
        if self.weight is not None:
            multiply(logits.t(), x, into=self.weight, add=part.start > 0)
        if self.bias is not None:
            self.bias.add_(logits.sum(0))


Run = Callable[[torch.dtype, tuple[bool, ...]], tuple[Tensor, Gradients]]
"""(dtype of the products, which gradients are needed) -> loss, and those gradients."""


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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative()
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


class LossSum:
    """The losses of all tokens, added up chunk by chunk: in fp64, since fp32 would round once a chunk.

    Of 509 tokens in 32 chunks a loss was 6.7e-8 off in the mean of 40 draws with an fp32 sum, and is 3.0e-8 so; its one
    rounding to fp32 is up to 6e-8. One number: no more memory, and one small launch more a loss.
    """

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, loss: Tensor) -> None:
        """A chunk's, a scalar."""
        self._sum += loss

    def mean(self, count: Tensor) -> Tensor:
        """Over ``count`` tokens, in its dtype. To be called once."""
        return self._sum.div_(count).to(count.dtype)


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
    from trainfit.kernels.cross_entropy import gradients_in_forward_triton

    kernels: Any = gradients_in_forward_triton  # a constexpr argument takes a plain value
    if x.numel():
        programs = min(PROGRAMS, -(-x.numel() // BLOCK))
        kernels.multiply_unless_one_kernel[(programs,)](x, ratio, x.numel(), BLOCK=BLOCK)
