"""The native decoder's gated feed-forward part in fp8, with casts fused into SwiGLU and its gradient.

Shapes: n tokens, e hidden size, f intermediate size. Rounding is that of ``precision: fp8``: each operand by
one scale a tensor, input and weights to e4m3, gradients to e5m2.

Saved for backward: the input and the gate-up product in bf16, and SwiGLU's output in e4m3 as [f, n].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.kernels.swiglu import fp8
from trainfit.kernels.swiglu.fp8 import E4M3, E5M2
from trainfit.models.native.decoder import FeedForward, Linear, NativeDecoder
from trainfit.spec.errors import InputError

SILU = ("silu", "silu_unfused")
MULTIPLE = 16  # Sizes of torch._scaled_mm's operands, in elements
REMEDY = "use block_kernels: standard"


def use_fp8_feed_forward(model: nn.Module, *, emulated: bool) -> None:
    """Replace the forward of the feed-forward parts.

    Args:
        emulated: multiply in fp32, on a device without fp8 products.

    Raises:
        InputError: a model of transformers, or whose feed-forward part has another form.
    """
    if not isinstance(model, NativeDecoder):
        raise _refusal(
            "the kernels replace the native decoder's feed-forward part: model.implementation: native"
        )
    config = model.config
    if config.hidden_act not in SILU or not config.gated_mlp or config.mlp_bias:
        raise _refusal(
            "the kernels compute down(silu(gate(x)) * up(x)) without biases, and this model does not"
        )
    if config.hidden_size % MULTIPLE or config.intermediate_size % MULTIPLE:
        raise _refusal(f"fp8 products need hidden and intermediate sizes that are multiples of {MULTIPLE}")
    fp8.register()  # torch.compile cannot trace this.
    for module in model.modules():
        if isinstance(module, FeedForward):
            module.__class__ = Fp8FeedForward
            module.emulated = emulated  # pyright: ignore
            module.up.__class__ = module.down.__class__ = HeldLinear


class HeldLinear(Linear):
    """A linear layer whose product its owner computes; so no other technique converts it."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class Fp8FeedForward(FeedForward):
    """``down(silu(gate(x)) * up(x))`` with products in fp8."""

    emulated: bool

    def forward(self, x_bse: Tensor) -> Tensor:
        return _FeedForward.apply(x_bse, self.up.weight, self.down.weight, self.emulated)  # pyright: ignore


class _FeedForward(torch.autograd.Function):
    """(x [..., e], weights [2f, e] and [e, f], emulated) -> [..., e]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        # Dynamo decides by the number of parameters whether a function takes ctx.
        w_up, w_down, emulated = others
        ctx.emulated = emulated
        x_ne = x.flatten(0, -2)
        gate_up = _product(_rounded(x_ne, E4M3), _rounded(w_up, E4M3), x.dtype, emulated, fast=True)
        codes, transposed, scale = torch.ops.trainfit.swiglu_fp8(
            gate_up, torch.ops.trainfit.swiglu_amax(gate_up)
        )
        y_ne = _product((codes, scale), _rounded(w_down, E4M3), x.dtype, emulated, fast=True)
        ctx.save_for_backward(x_ne, w_up, w_down, gate_up, transposed, scale)
        return y_ne.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x_ne, w_up, w_down, gate_up, hidden, scale = ctx.saved_tensors
        gradient, emulated, dtype = gradients[0], ctx.emulated, x_ne.dtype
        d_ne = _rounded(gradient.flatten(0, -2), E5M2)
        d_hidden = _product(d_ne, _transposed(_rounded(w_down, E4M3)), dtype, emulated)
        dw_down = _product(_transposed(d_ne), (hidden, scale), dtype, emulated)
        amax = torch.ops.trainfit.swiglu_backward_amax(d_hidden, gate_up)
        codes, transposed, d_scale = torch.ops.trainfit.swiglu_backward_fp8(d_hidden, gate_up, amax)
        del d_hidden
        dx = _product((codes, d_scale), _transposed(_rounded(w_up, E4M3)), dtype, emulated)
        dw_up = _product((transposed, d_scale), _transposed(_rounded(x_ne, E4M3)), dtype, emulated)
        return dx.view(gradient.shape), dw_up, dw_down, None


def _rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round a matrix by its largest magnitude; compiled, this is a part of what computes it."""
    return fp8.rounded(x, x.abs().amax(), dtype)


def _transposed(x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    codes, scale = x
    return codes.t().contiguous(), scale


def _product(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    emulated: bool,
    *,
    fast: bool = False,
) -> Tensor:
    """Return A B^T of codes [m, k] and [n, k] with their scales.

    Args:
        fast: sums of the products are rounded within the tensor cores, as torchao does in the forward.
    """
    (a_codes, a_scale), (b_codes, b_scale) = a, b
    if emulated:
        return (F.linear(a_codes.float(), b_codes.float()) * (a_scale * b_scale)).to(dtype)
    return torch._scaled_mm(a_codes, b_codes.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


def _refusal(problem: str) -> InputError:
    return InputError(problem, REMEDY, field="block_kernels", value="fp8")
