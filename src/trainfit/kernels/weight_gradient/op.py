"""A linear layer whose backward adds its weight's gradient where it is kept, within the matrix product.

Autograd computes the gradient of each micro-batch into memory of its own and adds it by a kernel that reads
both and writes one. cuBLAS adds to the result as it writes it (beta = 1), so this kernel and the memory are
saved, and the sum is rounded once instead of the product and the sum apart. Megatron-LM calls it gradient
accumulation fusion.

Shapes: n tokens, i inputs, o outputs. torch.compile knows the operator by the argument that it writes, so
that it neither copies the sum nor drops the operator.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.kernels.custom_op import declare, refuse_second_derivative
from trainfit.kernels.weight_gradient import cublaslt


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor, *, saves_first: bool = False
) -> Tensor:
    """Return ``x W^T + b``; the backward adds the weight's gradient to ``kept`` and gives autograd none.

    Call ``register`` before.

    Args:
        x: [..., i].
        weight: [o, i], of the dtype of ``x``.
        bias: [o], or None.
        kept: [o, i], of the same dtype; the sum of gradients so far.
        saves_first: save ``x`` and ``weight`` before the product. Recomputation of a block ends with the last
            tensor that it saves; saved after the product, those of a block's last layer would have it run
            again. A compiler leaves out what is not needed by itself.
    """
    holder = None
    if saves_first and x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        held: Any = _Held.apply(x, weight)
        x, holder = held, held.grad_fn
    return _Linear.apply(x, weight, bias, kept, holder)  # pyright: ignore[reportReturnType]


class _Held(torch.autograd.Function):
    """Saves a layer's input and weight for the node that follows it, whose backward runs before its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor, holder: Any
    ) -> Tensor:
        if holder is None:
            ctx.save_for_backward(x, weight)
        # Not saved: its version changes before the backward where a weight is used twice.
        ctx.kept, ctx.has_bias, ctx.holder = kept, bias is not None, holder
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative()
        x, weight = (ctx.holder or ctx).saved_tensors
        gradient = gradients[0]
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        gradient_no = gradient.flatten(0, -2)
        torch.ops.trainfit.add_weight_gradient_(ctx.kept, gradient_no, x.flatten(0, -2))
        return of_x, None, gradient_no.sum(0) if ctx.has_bias else None, None, None


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.add_weight_gradient_``: ``kept += gradient^T x``."""
    declare("add_weight_gradient_", _run, lambda *_: None, mutates=("kept",))


def _run(kept: Tensor, gradient: Tensor, x: Tensor) -> None:
    kept.addmm_(gradient.t(), x)


@cache
def register_fp8() -> None:
    """Declare ``torch.ops.trainfit.add_fp8_weight_gradient_``: ``kept += scales * gradient x^T`` of codes.

    Its arguments are e5m2 codes [o, n] and their scale, e4m3 codes [i, n] and their scale, as of
    ``torch._scaled_mm``, and ``kept`` [o, i]. A ledger's entry has the dtype of the first.
    """
    declare("add_fp8_weight_gradient_", _run_fp8, lambda *_: None, mutates=("kept",), dry_run=_dry_run_fp8)


def _run_fp8(gradient: Tensor, gradient_scale: Tensor, x: Tensor, x_scale: Tensor, kept: Tensor) -> None:
    if kept.is_cuda:
        cublaslt.add(kept, gradient, gradient_scale, x, x_scale, fast=False)
    else:
        product = F.linear(gradient.float(), x.float()) * (gradient_scale * x_scale)
        kept.copy_(kept.float() + product)


def _dry_run_fp8(
    gradient: Tensor, gradient_scale: Tensor, x: Tensor, x_scale: Tensor, kept: Tensor, *, capability: Any
) -> None:
    kept.new_empty(cublaslt.WORKSPACE_BYTES, dtype=torch.uint8)
