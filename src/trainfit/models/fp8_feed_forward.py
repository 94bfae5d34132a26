"""The native decoder's gated feed-forward part in fp8, with casts fused into SwiGLU and its gradient.

Shapes: n tokens, e hidden size, f intermediate size. Rounding is that of ``precision: fp8``: each operand by
one scale a tensor, input and weights to e4m3, gradients to e5m2.

Saved for backward: the input and the gate-up product in bf16, and SwiGLU's output in e4m3 as [f, n].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.kernels.fp8_cast.op import E4M3, E5M2
from trainfit.kernels.swiglu import fp8
from trainfit.models.fp8_weights import Kept, kept_of, largest, product, transposed, weight_gradient
from trainfit.models.native.decoder import FeedForward, Linear, NativeDecoder
from trainfit.spec.errors import InputError

SILU = ("silu", "silu_unfused")
MULTIPLE = 16  # Sizes of torch._scaled_mm's operands, in elements
REMEDY = "use block_kernels: standard"
HISTORIES = ("history", "gradient_history")
"""Buffers of a part, fp32 [2], of SwiGLU's output and of the gate-up product's gradient: HEADROOM times the
largest magnitude in the step before, and the largest since. Without them each tensor is measured before it is
rounded."""
HEADROOM = 2.0
"""Half of all steps have a larger magnitude than the step before, which would be cut off; few have twice it.
The factor costs the smallest exponent of the codes."""


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


class Histories:
    """Largest magnitudes of the feed-forward parts' hidden tensors, noted for the next step."""

    def __init__(self, model: nn.Module):
        """Allocate them, as buffers of the parts; nothing is known yet."""
        self.tensors: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, Fp8FeedForward):
                for of in HISTORIES:
                    zeros = module.up.weight.detach().new_zeros(2, dtype=torch.float32)
                    module.register_buffer(of, zeros, persistent=False)
                    self.tensors[f"{name}.{of}"] = zeros

    @torch.no_grad()
    def end_step(self) -> None:
        """Let what was noted in a step be that of the step before."""
        for tensor in self.tensors.values():
            torch.mul(tensor[1:], HEADROOM, out=tensor[:1])
            tensor[1:].zero_()


class HeldLinear(Linear):
    """A linear layer whose product its owner computes; so no other technique converts it."""

    kept: Tensor | None = None  # Sum of the weight's gradients (kept_gradients.py)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class Fp8FeedForward(FeedForward):
    """``down(silu(gate(x)) * up(x))`` with products in fp8."""

    emulated: bool

    def forward(self, x_bse: Tensor) -> Tensor:
        # Evaluation measures, and notes nothing.
        histories = (getattr(self, name, None) if self.training else None for name in HISTORIES)
        return _FeedForward.apply(  # pyright: ignore
            x_bse, self.up.weight, self.down.weight, self.emulated, self.up.kept, self.down.kept,
            *histories, *kept_of(self.up), *kept_of(self.down),
        )  # fmt: skip


class _FeedForward(torch.autograd.Function):
    """(x [..., e], weights [2f, e] and [e, f], emulated, sums of both's gradients or None, two histories,
    *Kept of both) -> [..., e].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        # Dynamo decides by the number of parameters whether a function takes ctx.
        w_up, w_down, emulated, of_up, of_down, history, gradient_history, *kept = others
        # Not saved: their versions change before the backward, the history's where a block is recomputed.
        ctx.emulated, ctx.history, ctx.of_weights = emulated, gradient_history, (of_up, of_down)
        up, down = Kept(*kept[:4]), Kept(*kept[4:])
        x_ne = x.flatten(0, -2)
        gate_up = product(largest(x_ne, E4M3), up.for_forward(w_up), x.dtype, emulated=emulated, fast=True)
        if history is None:
            amax = torch.ops.trainfit.swiglu_amax(gate_up)
            codes, turned, scale = torch.ops.trainfit.swiglu_fp8(gate_up, amax)
        else:
            codes, turned, scale = torch.ops.trainfit.swiglu_fp8_delayed(gate_up, history)
        y_ne = product((codes, scale), down.for_forward(w_down), x.dtype, emulated=emulated, fast=True)
        ctx.save_for_backward(x_ne, w_up, w_down, gate_up, turned, scale, *kept)
        return y_ne.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x_ne, w_up, w_down, gate_up, hidden, scale, *kept = ctx.saved_tensors
        gradient, emulated, dtype = gradients[0], ctx.emulated, x_ne.dtype
        up, down = Kept(*kept[:4]), Kept(*kept[4:])
        of_up, of_down = ctx.of_weights
        d_ne = largest(gradient.flatten(0, -2), E5M2)
        d_hidden = product(d_ne, down.for_backward(w_down, gradient), dtype, emulated=emulated)
        dw_down = weight_gradient(transposed(d_ne), (hidden, scale), of_down, dtype, emulated=emulated)
        if ctx.history is None:
            amax = torch.ops.trainfit.swiglu_backward_amax(d_hidden, gate_up)
            codes, turned, d_scale = torch.ops.trainfit.swiglu_backward_fp8(d_hidden, gate_up, amax)
        else:
            rounded = torch.ops.trainfit.swiglu_backward_fp8_delayed(d_hidden, gate_up, ctx.history)
            codes, turned, d_scale = rounded
        del d_hidden
        dx = product((codes, d_scale), up.for_backward(w_up, gradient), dtype, emulated=emulated)
        x_en = transposed(largest(x_ne, E4M3))
        dw_up = weight_gradient((turned, d_scale), x_en, of_up, dtype, emulated=emulated)
        return dx.view(gradient.shape), dw_up, dw_down, *[None] * (5 + len(kept))


def _refusal(problem: str) -> InputError:
    return InputError(problem, REMEDY, field="block_kernels", value="fp8")
