"""The native decoder's blocks in fp8: norms, residual sums, SwiGLU and casts by kernels between the products.

Parts that the kernels compute, of each block (functions: fp8_functions.py):

- the gated feed-forward part, in all models that are not refused;
- both norms and the residual sums around them, in pre-norm blocks with RMSNorm; the norm before attention
  only where the product of queries, keys and values is in fp8;
- casts to fp8 of the input and the gradient of attention's two products, where the products are in fp8;
- the split of queries, keys and values with their rotation, where whole heads are rotated and have no norms
  of their own.

The rest is the model's own code.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.kernels.fp8_cast import op as fp8_cast
from trainfit.kernels.rms_norm import fp8 as rms_norm
from trainfit.kernels.rms_norm.op import MAX_SIZE
from trainfit.kernels.rope import split
from trainfit.kernels.swiglu import fp8 as swiglu
from trainfit.models import fp8_functions
from trainfit.models.block_kernels import RMS, SILU, SplitAttention
from trainfit.models.fp8_functions import Layer
from trainfit.models.fp8_weights import kept_of
from trainfit.models.native.config import NativeConfig
from trainfit.models.native.decoder import (
    Attention,
    Block,
    FeedForward,
    Linear,
    NativeDecoder,
    PositionTensors,
)
from trainfit.spec.errors import InputError

MULTIPLE = 16  # Sizes of torch._scaled_mm's operands, in elements
REMEDY = "use block_kernels: standard"
HISTORIES = ("history", "gradient_history")
"""Buffers of a feed-forward part, fp32 [2], of SwiGLU's output and of the gate-up product's gradient:
HEADROOM times the largest magnitude in the step before, and the largest since. Without them each tensor is
measured before it is rounded."""
HEADROOM = 2.0
"""Half of all steps have a larger magnitude than the step before, which would be cut off; few have twice it.
The factor costs the smallest exponent of the codes."""


def use_fp8_blocks(model: nn.Module, *, emulated: bool, gains: Callable[[nn.Module], bool]) -> None:
    """Replace the forwards of the decoder's blocks and their parts.

    Args:
        emulated: multiply in fp32, on a device without fp8 products.
        gains: whether one of attention's linear layers multiplies in fp8; the feed-forward part's do.

    Raises:
        InputError: a model of transformers, or whose feed-forward part has another form.
    """
    if not isinstance(model, NativeDecoder):
        raise _refusal("the kernels replace the native decoder's blocks: model.implementation: native")
    config = model.config
    if config.hidden_act not in SILU or not config.gated_mlp or config.mlp_bias:
        raise _refusal(
            "the kernels compute down(silu(gate(x)) * up(x)) without biases, and this model does not"
        )
    if config.hidden_size % MULTIPLE or config.intermediate_size % MULTIPLE:
        raise _refusal(f"fp8 products need hidden and intermediate sizes that are multiples of {MULTIPLE}")
    for kernels in (fp8_cast, rms_norm, swiglu, split):
        kernels.register()  # torch.compile cannot trace this.
    attention = Fp8SplitAttention if _splits(config) else Fp8Attention
    for block in model.layers:
        assert isinstance(block, Block)
        _replace(block, attention, emulated=emulated, gains=gains)


def _replace(
    block: Block, attention: "type[Fp8Attention]", *, emulated: bool, gains: Callable[[nn.Module], bool]
) -> None:
    layers = [layer for layer in (block.attention.qkv, block.attention.out) if gains(layer)]
    block.attention.__class__ = attention
    block.mlp.__class__ = Fp8FeedForward
    block.mlp.up.__class__ = block.mlp.down.__class__ = HeldLinear
    for layer in layers:
        layer.__class__ = Fp8AttentionLinear
    for module in (block.mlp, *layers):
        module.emulated = emulated  # pyright: ignore
    if _fuses_norms(block.attention.config):
        block.__class__ = Fp8Block


def _splits(config: NativeConfig) -> bool:
    """Return whether the kernel that splits and rotates is for this model."""
    is_whole = config.position_embedding == "rope" and config.rotary_dim == config.head_dim
    return is_whole and not config.qk_norm


def _fuses_norms(config: NativeConfig) -> bool:
    return config.norm in RMS and config.norm_placement == "pre" and config.hidden_size <= MAX_SIZE


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


class Fp8AttentionLinear(HeldLinear):
    """A linear layer that multiplies in fp8, whose operands are each rounded once, in both layouts."""

    emulated: bool

    def forward(self, input: Tensor) -> Tensor:
        return fp8_functions.linear(input, _layer(self), emulated=self.emulated)


class Fp8FeedForward(FeedForward):
    """``down(silu(gate(x)) * up(x))`` with products in fp8."""

    emulated: bool

    def forward(self, x_bse: Tensor, added: Tensor | None = None, norm: nn.Module | None = None) -> Tensor:
        """Return the part's output.

        Args:
            added: attention's output; with it the result is ``h + part(norm(h))`` of ``h = x + added``.
        """
        # Evaluation measures, and notes nothing.
        histories = tuple(getattr(self, name, None) if self.training else None for name in HISTORIES)
        up, down = _layer(self.up), _layer(self.down)
        if added is None or norm is None:
            return fp8_functions.feed_forward(x_bse, up, down, histories, emulated=self.emulated)
        weight, eps = _of_norm(norm)
        return fp8_functions.feed_forward_branch(
            x_bse, added, weight, eps, up, down, histories, emulated=self.emulated
        )


class Fp8Attention(Attention):
    """Attention that takes its norm, too, where the product of queries, keys and values is in fp8."""

    def forward(self, x_bse: Tensor, shared: PositionTensors, norm: nn.Module | None = None) -> Any:
        """Return attention's output; with ``norm``, of the norm of x, and x for the residual connection."""
        if norm is None:
            return self.of_heads(*self.projected(x_bse, shared), shared)
        if not isinstance(self.qkv, Fp8AttentionLinear):
            return self.of_heads(*self.projected(norm(x_bse), shared), shared), x_bse
        weight, eps = _of_norm(norm)
        qkv, x_bse = fp8_functions.norm_product(
            x_bse, weight, eps, _layer(self.qkv), emulated=self.qkv.emulated
        )
        heads = self.split(qkv, shared)
        del qkv  # Attention would keep it alive.
        return self.of_heads(*heads, shared), x_bse


class Fp8SplitAttention(Fp8Attention, SplitAttention):
    """``Fp8Attention`` that splits and rotates queries, keys and values in one kernel."""


class Fp8Block(Block):
    """A pre-norm block whose norms and residual sums are parts of the functions after them."""

    def forward(self, x_bse: Tensor, shared: PositionTensors) -> Tensor:
        attended, x_bse = self.attention(x_bse, shared, self.attention_norm)
        return self.mlp(x_bse, attended, self.mlp_norm)


def _layer(module: Any) -> Layer:
    return Layer(module.weight, module.bias, module.kept, kept_of(module))


def _of_norm(norm: Any) -> tuple[Tensor, float]:
    """Return a norm's weight and epsilon."""
    return norm.weight, norm.eps


def _refusal(problem: str) -> InputError:
    return InputError(problem, REMEDY, field="block_kernels", value="fp8")
