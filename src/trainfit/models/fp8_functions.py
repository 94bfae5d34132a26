"""Autograd functions of a decoder block in fp8, with norms, residual sums and casts by kernels.

Shapes: n tokens, e hidden size, i inputs, o outputs, f intermediate size. Rounding is that of ``precision:
fp8``: each operand by one scale a tensor, input and weights to e4m3, gradients to e5m2.

Products read codes in two layouts. Of a gradient both are written at once. Of an input the backward writes
the transposed codes again, from what is kept anyway: a norm's input, attention's output, or the product
before SwiGLU.

The gradient that a residual connection takes past a norm is added in the kernel of that norm's gradient; so
``norm_product`` hands its input on.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.kernels.custom_op import refuse_second_derivative
from trainfit.kernels.fp8_cast.op import magnitude
from trainfit.models.fp8_weights import Kept, Operand, product, weight_gradient

NUM_KEPT = len(Kept._fields)


class Layer(NamedTuple):
    """What a product takes of a linear layer.

    Attributes:
        of_weight: sum of the weight's gradients, which the product adds to; None: autograd's.
        kept: of the weight's rounding.
    """

    weight: Tensor
    bias: Tensor | None
    of_weight: Tensor | None
    kept: Kept

    def flat(self) -> tuple[Tensor | None, ...]:
        """Return its tensors, which autograd looks for among a function's own arguments."""
        return self.weight, self.bias, self.of_weight, *self.kept


class Rounded(NamedTuple):
    """A matrix's codes in both layouts."""

    codes: Operand
    transposed: Operand


def linear(x: Tensor, layer: Layer, *, emulated: bool) -> Tensor:
    """Return ``x W^T + b``."""
    y: Any = _Linear.apply(_rows(x), emulated, *layer.flat())
    return y.view(*x.shape[:-1], y.shape[1])


def norm_product(
    x: Tensor, norm: Tensor, eps: float, layer: Layer, *, emulated: bool
) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(x) W^T + b``, and x for the residual connection.

    Args:
        norm: the norm's weight.
    """
    y, past = _NormProduct.apply(_rows(x), norm, eps, emulated, *layer.flat())  # pyright: ignore
    return y.view(*x.shape[:-1], y.shape[1]), past.view(x.shape)


def feed_forward(
    x: Tensor, up: Layer, down: Layer, histories: tuple[Tensor | None, ...], *, emulated: bool
) -> Tensor:
    """Return ``down(silu(gate(x)) * up(x))``, gate and up as halves of one product.

    Args:
        histories: of SwiGLU's output and of its input's gradient (fp8_block.py); None: they are measured.
    """
    y: Any = _FeedForward.apply(_rows(x), emulated, *histories, *_flat(up), *_flat(down))
    return y.view(x.shape)


def feed_forward_branch(
    x: Tensor,
    added: Tensor,
    norm: Tensor,
    eps: float,
    up: Layer,
    down: Layer,
    histories: tuple[Tensor | None, ...],
    *,
    emulated: bool,
) -> Tensor:
    """Return ``h + feed_forward(rms_norm(h))`` with ``h = x + added``."""
    y: Any = _FeedForwardBranch.apply(
        _rows(x), _rows(added), norm, eps, emulated, *histories, *_flat(up), *_flat(down)
    )
    return y.view(x.shape)


def _rows(x: Tensor) -> Tensor:
    """Return a tensor [..., e] as [n, e].

    Views of a function's input are made outside of it: a compiler finds the ends of recomputed blocks by the
    operations that read them, and knows none within functions.
    """
    return x.flatten(0, -2).contiguous()


def _flat(layer: Layer) -> tuple[Tensor | None, ...]:
    """Return the tensors of a layer without a bias."""
    return layer.weight, layer.of_weight, *layer.kept


# Dynamo decides by the number of a forward's parameters whether the function takes ctx: hence *others. Sums
# and histories are not saved: their versions change before the backward, where a block is recomputed or a
# weight is used twice.


class _Linear(torch.autograd.Function):
    """(x [n, i], emulated, *Layer) -> [n, o]."""

    @staticmethod
    def forward(ctx: Any, x_ni: Tensor, *others: Any) -> Tensor:
        emulated, weight, bias, of_weight, *kept = others
        ctx.emulated, ctx.of_weight, ctx.has_bias = emulated, of_weight, bias is not None
        amax = magnitude(x_ni).reshape(1)
        x8 = torch.ops.trainfit.fp8_cast_rows(x_ni, amax)
        w8 = Kept(*kept).for_forward(weight)
        ctx.save_for_backward(x_ni, amax, weight, *kept)
        return product(x8, w8, x_ni.dtype, emulated=emulated, fast=True, bias=bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative()
        x_ni, amax, weight, *kept = ctx.saved_tensors
        layer = Layer(weight, None, ctx.of_weight, Kept(*kept))
        d_no = gradients[0].contiguous()
        x8 = torch.ops.trainfit.fp8_cast_transposed(d_no, x_ni, amax)
        dx, dw = _products(_cast_gradient(d_no), x8, layer, d_no, emulated=ctx.emulated)
        d_bias = d_no.sum(0) if ctx.has_bias else None
        return dx, None, dw, d_bias, *[None] * (1 + NUM_KEPT)


class _NormProduct(torch.autograd.Function):
    """(x [n, e], norm's weight [e], eps, emulated, *Layer) -> [n, o], x."""

    @staticmethod
    def forward(ctx: Any, x_ne: Tensor, *others: Any) -> Any:
        norm, eps, emulated, weight, bias, of_weight, *kept = others
        ctx.emulated, ctx.of_weight, ctx.has_bias = emulated, of_weight, bias is not None
        rstd, amax = torch.ops.trainfit.rms_norm_amax(x_ne, norm, eps)
        x8 = torch.ops.trainfit.rms_norm_fp8_rows(x_ne, norm, rstd, amax)
        w8 = Kept(*kept).for_forward(weight)
        y = product(x8, w8, x_ne.dtype, emulated=emulated, fast=True, bias=bias)
        ctx.save_for_backward(x_ne, norm, rstd, amax, weight, *kept)
        return y, x_ne.view_as(x_ne)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative()
        x_ne, norm, rstd, amax, weight, *kept = ctx.saved_tensors
        layer = Layer(weight, None, ctx.of_weight, Kept(*kept))
        d_no = gradients[0].contiguous()
        x8 = torch.ops.trainfit.rms_norm_fp8_transposed(d_no, x_ne, norm, rstd, amax)
        dy, dw = _products(_cast_gradient(d_no), x8, layer, d_no, emulated=ctx.emulated)
        del x8
        d_bias = d_no.sum(0) if ctx.has_bias else None
        dx, d_norm = _norm_backward(dy, x_ne, norm, rstd, gradients[1])
        return dx, d_norm, None, None, dw, d_bias, *[None] * (1 + NUM_KEPT)


class _FeedForward(torch.autograd.Function):
    """(x [n, e], emulated, two histories, up and down without biases) -> [n, e]."""

    @staticmethod
    def forward(ctx: Any, x_ne: Tensor, *others: Any) -> Tensor:
        emulated, history, gradient_history, *layers = others
        up, down = _layers(layers)
        ctx.emulated, ctx.history = emulated, gradient_history
        ctx.of_weights = up.of_weight, down.of_weight
        amax = magnitude(x_ne).reshape(1)
        x8 = torch.ops.trainfit.fp8_cast_rows(x_ne, amax)
        y, gate_up, hidden_scale = _hidden(x8, up, down, history, x_ne.dtype, emulated=emulated)
        ctx.save_for_backward(x_ne, amax, gate_up, hidden_scale, up.weight, down.weight, *up.kept, *down.kept)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative()
        x_ne, amax, *saved = ctx.saved_tensors
        d_ne = gradients[0].contiguous()
        d8, up, dw_down = _hidden_backward(ctx, d_ne, saved)
        x8 = torch.ops.trainfit.fp8_cast_transposed(d_ne, x_ne, amax)
        dx, dw_up = _products(d8, x8, up, d_ne, emulated=ctx.emulated)
        nothing = [None] * (1 + NUM_KEPT)
        return dx, None, None, None, dw_up, *nothing, dw_down, *nothing


class _FeedForwardBranch(torch.autograd.Function):
    """(x and added [n, e], norm's weight [e], eps, then as ``_FeedForward``) -> [n, e]."""

    @staticmethod
    def forward(ctx: Any, x_ne: Tensor, *others: Any) -> Tensor:
        added, norm, eps, emulated, history, gradient_history, *layers = others
        up, down = _layers(layers)
        ctx.emulated, ctx.history = emulated, gradient_history
        ctx.of_weights = up.of_weight, down.of_weight
        h, rstd, amax = torch.ops.trainfit.add_rms_norm_amax(x_ne, added, norm, eps)
        x8 = torch.ops.trainfit.rms_norm_fp8_rows(h, norm, rstd, amax)
        y, gate_up, hidden_scale = _hidden(x8, up, down, history, h.dtype, emulated=emulated)
        ctx.save_for_backward(
            h, norm, rstd, amax, gate_up, hidden_scale, up.weight, down.weight, *up.kept, *down.kept
        )
        return h + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative()
        h, norm, rstd, amax, *saved = ctx.saved_tensors
        d_ne = gradients[0].contiguous()
        d8, up, dw_down = _hidden_backward(ctx, d_ne, saved)
        x8 = torch.ops.trainfit.rms_norm_fp8_transposed(d_ne, h, norm, rstd, amax)
        dy, dw_up = _products(d8, x8, up, d_ne, emulated=ctx.emulated)
        del d8, x8
        dh, d_norm = _norm_backward(dy, h, norm, rstd, d_ne)
        nothing = [None] * (1 + NUM_KEPT)
        return dh, dh, d_norm, None, None, None, None, dw_up, *nothing, dw_down, *nothing


def _layers(tensors: list[Any]) -> tuple[Layer, Layer]:
    """Return two layers without biases of ``_flat`` of both."""
    half = 2 + NUM_KEPT
    up, down = (
        Layer(weight, None, of_weight, Kept(*kept))
        for weight, of_weight, *kept in (tensors[:half], tensors[half:])
    )
    return up, down


def _cast_gradient(d_no: Tensor) -> Rounded:
    amax = magnitude(d_no).reshape(1)
    codes, turned, scale = torch.ops.trainfit.fp8_cast_both(d_no, amax, True)
    return Rounded((codes, scale), (turned, scale))


def _products(
    d: Rounded, x8: Operand, layer: Layer, like: Tensor, *, emulated: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a product's input, in the dtype of ``like``, and of its weight.

    Args:
        d: the gradient of the product.
        x8: the input's codes, transposed [i, n].
        like: any tensor of the backward, for a compiler to see.
    """
    w8 = layer.kept.for_backward(layer.weight, like)
    dx = product(d.codes, w8, like.dtype, emulated=emulated)
    return dx, weight_gradient(d.transposed, x8, layer.of_weight, like.dtype, emulated=emulated)


def _norm_backward(
    dy: Tensor, x_ne: Tensor, norm: Tensor, rstd: Tensor, past: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a norm's input, with that of the connection past it, and of its weight."""
    dx, parts = torch.ops.trainfit.rms_norm_backward_add(dy, x_ne, norm, rstd, past.contiguous())
    return dx, parts.sum(0).to(norm.dtype)


def _hidden(
    x8: Operand, up: Layer, down: Layer, history: Tensor | None, dtype: torch.dtype, *, emulated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``down(swiglu(up(x)))``, the product before SwiGLU, and the scale of SwiGLU's codes."""
    gate_up = product(x8, up.kept.for_forward(up.weight), dtype, emulated=emulated, fast=True)
    if history is None:
        amax = torch.ops.trainfit.swiglu_amax(gate_up)
        codes, scale = torch.ops.trainfit.swiglu_fp8(gate_up, amax)
    else:
        codes, scale = torch.ops.trainfit.swiglu_fp8_delayed(gate_up, history)
    y = product((codes, scale), down.kept.for_forward(down.weight), dtype, emulated=emulated, fast=True)
    return y, gate_up, scale


def _hidden_backward(ctx: Any, d_ne: Tensor, saved: list[Tensor]) -> tuple[Rounded, Layer, Tensor | None]:
    """Return the gradient of ``_hidden``'s first product, that product's layer, and the second weight's
    gradient.

    Args:
        saved: from the product before SwiGLU on, what ``_FeedForward`` saves.
    """
    gate_up, hidden_scale, w_up, w_down, *kept = saved
    of_up, of_down = ctx.of_weights
    up = Layer(w_up, None, of_up, Kept(*kept[:NUM_KEPT]))
    down = Layer(w_down, None, of_down, Kept(*kept[NUM_KEPT:]))
    codes, of_output = _cast_gradient(d_ne)
    w8 = down.kept.for_backward(w_down, d_ne)
    d_hidden = product(codes, w8, d_ne.dtype, emulated=ctx.emulated)
    del codes, w8
    if ctx.history is None:
        amax = torch.ops.trainfit.swiglu_backward_amax(d_hidden, gate_up)
        rounded = torch.ops.trainfit.swiglu_backward_fp8(d_hidden, gate_up, hidden_scale, amax)
    else:
        run = torch.ops.trainfit.swiglu_backward_fp8_delayed
        rounded = run(d_hidden, gate_up, hidden_scale, ctx.history)
    codes, turned, scale, hidden = rounded
    del d_hidden, rounded
    hidden8 = hidden, hidden_scale
    dw_down = weight_gradient(of_output, hidden8, of_down, d_ne.dtype, emulated=ctx.emulated)
    return Rounded((codes, scale), (turned, scale)), up, dw_down
