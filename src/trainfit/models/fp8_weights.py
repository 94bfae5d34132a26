"""Linear layers with products in fp8 that keep, from update to update, what rounding their weights takes.

A weight is read by the forward and the backward of each micro-batch, and changes once a step. Kept are the
largest magnitude alone, from which each use rounds; or the codes, which a backward transposes; or the codes
in both layouts. Shapes: n tokens, i inputs, o outputs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.kernels.fp8_cast import op
from trainfit.kernels.fp8_cast.op import E4M3, E5M2, rounded
from trainfit.kernels.quantize import rowwise

KeptFp8 = Literal["scales", "codes", "both-layouts"]
Operand = tuple[Tensor, Tensor]  # Codes [rows, summed dimension] and their scale, fp32 [1]
NAMES = ("fp8_amax", "fp8_codes", "fp8_transposed", "fp8_scale")
"""Buffers of a layer, which are not part of its state: ``KeptWeights`` computes them from its weight."""


class Kept(NamedTuple):
    """What is kept of a weight; all None: each use measures and rounds it."""

    amax: Tensor | None = None  # fp32 [1]
    codes: Tensor | None = None  # e4m3 [o, i]
    transposed: Tensor | None = None  # e4m3 [i, o]
    scale: Tensor | None = None  # fp32 [1]

    def for_forward(self, w_oi: Tensor) -> Operand:
        """Return the weight's codes [o, i]."""
        if self.codes is not None and self.scale is not None:
            return self.codes, self.scale
        return rounded(w_oi, w_oi.abs().amax() if self.amax is None else self.amax, E4M3)

    def for_backward(self, w_oi: Tensor, gradient: Tensor) -> Operand:
        """Return the weight's codes [i, o]; ``gradient`` tells a compiler that this is of the backward."""
        if self.transposed is not None and self.scale is not None:
            return self.transposed, self.scale
        codes, scale = self.for_forward(w_oi)
        if self.codes is not None:
            return torch.ops.trainfit.transpose_codes(gradient, codes), scale
        return codes.t().contiguous(), scale


def kept_of(module: nn.Module) -> Kept:
    """Return what a layer keeps of its weight."""
    return Kept(*(getattr(module, name, None) for name in NAMES))


def largest(x: Tensor, dtype: torch.dtype) -> Operand:
    """Round a matrix by its largest magnitude; compiled, this is a part of what computes it."""
    return rounded(x, x.abs().amax(), dtype)


def transposed(x: Operand) -> Operand:
    codes, scale = x
    return codes.t().contiguous(), scale


def product(
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    *,
    emulated: bool,
    fast: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Return A B^T of codes [m, k] and [n, k].

    Args:
        bias: [n], of ``dtype``, is added before the result is rounded.
        emulated: multiply in fp32, on a device without fp8 products.
        fast: sums of the products are rounded within the tensor cores, as torchao does in the forward.
    """
    (a_codes, a_scale), (b_codes, b_scale) = a, b
    if emulated:
        exact = F.linear(a_codes.float(), b_codes.float()) * (a_scale * b_scale)
        return (exact if bias is None else exact + bias.float()).to(dtype)
    return torch._scaled_mm(
        a_codes, b_codes.t(), a_scale, b_scale, bias, out_dtype=dtype, use_fast_accum=fast
    )


def weight_gradient(
    d: Operand, x: Operand, kept: Tensor | None, dtype: torch.dtype, *, emulated: bool
) -> Tensor | None:
    """Return a weight's gradient of codes [o, n] and [i, n]; or add it to ``kept``, and return None."""
    if kept is None:
        return product(d, x, dtype, emulated=emulated)
    torch.ops.trainfit.add_fp8_weight_gradient_(*d, *x, kept)
    return None


class Fp8Linear(nn.Linear):
    """A linear layer whose products are in fp8, with scales as of torchao's ``tensorwise`` recipe."""

    emulated: bool
    kept: Tensor | None = None  # Sum of the weight's gradients (kept_gradients.py)

    def forward(self, input: Tensor) -> Tensor:
        y: Any = _Linear.apply(input, self.weight, self.emulated, self.kept, *kept_of(self))
        return y if self.bias is None else y + self.bias


class _Linear(torch.autograd.Function):
    """(x [..., i], weight [o, i], emulated, sum of gradients or None, *Kept) -> [..., o]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        # Dynamo decides by the number of parameters whether a function takes ctx.
        weight, emulated, of_weight, *kept = others
        # Not saved: its version changes before the backward where a weight is used twice.
        ctx.emulated, ctx.of_weight = emulated, of_weight
        x_ni = x.flatten(0, -2)
        y_no = product(
            largest(x_ni, E4M3), Kept(*kept).for_forward(weight), x.dtype, emulated=emulated, fast=True
        )
        ctx.save_for_backward(x_ni, weight, *kept)
        return y_no.view(*x.shape[:-1], y_no.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x_ni, weight, *kept = ctx.saved_tensors
        gradient, emulated, dtype = gradients[0], ctx.emulated, x_ni.dtype
        d_no = largest(gradient.flatten(0, -2), E5M2)
        dx = product(d_no, Kept(*kept).for_backward(weight, gradient), dtype, emulated=emulated)
        x_in = transposed(largest(x_ni, E4M3))
        dw = weight_gradient(transposed(d_no), x_in, ctx.of_weight, dtype, emulated=emulated)
        return dx.view(*gradient.shape[:-1], dx.shape[1]), dw, *[None] * (2 + len(Kept._fields))


class KeptWeights:
    """What the linear layers of a model keep, computed again after each update."""

    def __init__(self, modules: list[nn.Linear], kind: KeptFp8):
        """Allocate it, as buffers of the layers; ``refreshed`` fills it."""
        self._modules, self._versions = modules, list[int]()
        for module in modules:
            empty: Callable[..., Tensor] = module.weight.detach().new_empty
            outputs, inputs = module.weight.shape
            made: list[Tensor | None]
            if kind == "scales":
                made = [empty(1, dtype=torch.float32), None, None, None]
            else:
                both = empty(inputs, outputs, dtype=E4M3) if kind == "both-layouts" else None
                made = [None, empty(outputs, inputs, dtype=E4M3), both, empty(1, dtype=torch.float32)]
            for name, tensor in zip(NAMES, made, strict=True):
                module.register_buffer(name, tensor, persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute it from the weights."""
        for module in self._modules:
            amax, codes, transposed, scale = kept_of(module)
            found = op.magnitude(module.weight).reshape(1)
            if amax is not None:
                amax.copy_(found)
            elif codes is not None:
                turned = codes.new_empty(0) if transposed is None else transposed
                torch.ops.trainfit.fp8_cast_(module.weight, found, codes, turned, scale)
        self._versions = [module.weight._version for module in self._modules]

    def refreshed(self) -> AbstractContextManager[None]:
        """Compute it where weights have changed since: of a forward before the first update, or of loaded
        weights.
        """
        if self._versions != [module.weight._version for module in self._modules]:
            self.refresh()
        return nullcontext()


def keep_weights(
    layers: Sequence[nn.Linear], products_of_owner: Sequence[nn.Linear], kind: KeptFp8, *, emulated: bool
) -> KeptWeights:
    """Keep what rounding takes of these layers' weights.

    Args:
        layers: their forward is replaced.
        products_of_owner: layers whose products functions of an fp8 block compute.
    """
    op.register()  # torch.compile cannot trace this.
    rowwise.register()
    for layer in layers:
        layer.__class__ = Fp8Linear
        layer.emulated = emulated  # pyright: ignore
    return KeptWeights([*layers, *products_of_owner], kind)
