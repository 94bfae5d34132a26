"""Autograd function of a loss over hidden states and a head's weight that computes its gradients in forward.

The backward scales them by incoming gradient / expected gradient; where the ratio is 1, the kernel reads it
on the device and returns. The method is Liger-Kernel's (Hsu et al., https://arxiv.org/abs/2410.10989, section
3.2). A scaled gradient (accumulation, a loss scaler) can be given in advance, so small fp16 or bf16 gradients
are rounded after scaling, as in an ordinary backward.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, refuse_second_derivative, triton_kernels, uses_triton
from trainfit.kernels.weight_gradient import op as weight_gradient

PROGRAMS = 1056  # Programs of the scaling kernel: eight per multiprocessor of an H200
BLOCK = 2048
IGNORED_LABEL = -100


class LateProduct(NamedTuple):
    """A weight's gradient that the backward adds where it is kept: the product of one chunk."""

    kept: Tensor  # [v, e]
    logits: Tensor  # Gradient of the logits, [n, v]
    x: Tensor  # [n, e]

    def whole_rows(self) -> Tensor:
        """Return the logits with what is between rows, contiguous, as the scaling kernel takes them."""
        stride = self.logits.stride(0)
        return self.logits.as_strided((self.logits.shape[0], stride), (stride, 1))


class Gradients(NamedTuple):
    """Gradients at the expected loss gradient, filled chunk by chunk; None where not needed."""

    hidden: Tensor | None  # [n, e]
    weight: Tensor | None  # [v, e]
    bias: Tensor | None  # [v]
    late: LateProduct | None = None  # Instead of ``weight``

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> Self:
        """Allocate the gradients that are ``needed``; the first chunk initialises the weight's."""
        return cls(
            torch.empty_like(hidden) if needed[0] else None,
            torch.empty_like(weight) if needed[1] else None,
            torch.zeros_like(bias) if needed[2] and bias is not None else None,
        )

    def add(self, part: slice, logits: Tensor, x: Tensor, matrix: Tensor) -> None:
        """Add one chunk.

        Args:
            part: The chunk's tokens; chunks come in order.
            logits: Gradient of the chunk's logits, [c, v].
            x: The chunk's hidden states, [c, e], in the dtype of the products.
            matrix: The weight, [v, e], in the dtype of the products.
        """
        if self.hidden is not None:
            _multiply(logits, matrix, into=self.hidden[part])
        if self.weight is not None:
            _multiply(logits.t(), x, into=self.weight, add=part.start > 0)
        if self.bias is not None:
            self.bias.add_(logits.sum(0))


def _multiply(first: Tensor, second: Tensor, *, into: Tensor, add: bool = False) -> None:
    """Write or add the matrix product ``into`` a tensor that may have another dtype."""
    if into.dtype == first.dtype:
        into.addmm_(first, second, beta=int(add))
    elif add:
        into.add_(torch.mm(first, second))
    else:
        into.copy_(torch.mm(first, second))


Run = Callable[[torch.dtype, tuple[bool, ...]], tuple[Tensor, Gradients]]
"""(dtype of the matrix products, which gradients are needed) -> loss and those gradients."""


def loss_with_gradients(
    run: Run, hidden: Tensor, weight: Tensor, bias: Tensor | None, expected_gradient: Tensor | float
) -> Tensor:
    """Compute the loss with ``run``, which is called once, outside autocast.

    The matrix products have autocast's dtype where it is enabled, else the weight's.

    Args:
        expected_gradient: The gradient that the backward will most likely receive; for any other the backward
            scales the results.
    """
    register()
    grad_enabled = torch.is_grad_enabled()
    return _LossWithGradients.apply(  # pyright: ignore[reportReturnType]
        hidden, weight, bias, run, grad_enabled, expected_gradient
    )


class _LossWithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        run: Run,
        grad_enabled: bool,
        expected_gradient: Tensor | float,
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        needed = ctx.needs_input_grad[:3] if grad_enabled else (False, False, False)
        with torch.autocast(device, enabled=False):
            loss, ctx.gradients = run(dtype, needed)
        ctx.expected_gradient = expected_gradient
        return loss

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        # Drop the reference: the engine copies a gradient that something else still references.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this loss were freed by its first backward")
        expected = ctx.expected_gradient
        # CUDA divides by a Python number through its reciprocal, and 13 * (1/13) need not be 1.
        ratio = grad / (expected if isinstance(expected, Tensor) else grad.new_full((), expected))
        *made, late = gradients
        for gradient in (*made, None if late is None else late.whole_rows()):
            if gradient is not None:
                torch.ops.trainfit.multiply_unless_one_(gradient, ratio)
        if late is not None:
            torch.ops.trainfit.add_weight_gradient_(late.kept, late.logits, late.x)
        return (*made, None, None, None)


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.multiply_unless_one_``: scale in place; a factor of 1 writes nothing.

    And the product of a ``LateProduct``.
    """
    weight_gradient.register()
    declare("multiply_unless_one_", _run, lambda *_: None, mutates=("x",))


def _run(x: Tensor, ratio: Tensor) -> None:
    if uses_triton(x) and x.is_contiguous():
        triton_multiply_unless_one(x, ratio)
    elif x.is_cuda or ratio.item() != 1:  # ``item`` would synchronise with a GPU.
        x.mul_(ratio)


def triton_multiply_unless_one(x: Tensor, ratio: Tensor) -> None:
    """Scale contiguous ``x`` in one kernel, computed in fp32."""
    if x.numel():
        programs = min(PROGRAMS, -(-x.numel() // BLOCK))
        kernels = triton_kernels("kernels.cross_entropy.triton")
        kernels.multiply_unless_one_kernel[(programs,)](x, ratio, x.numel(), BLOCK=BLOCK)
