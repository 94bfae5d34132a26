"""A frozen linear layer whose weight is stored in 4 or 8 bits, and models built with such layers.

Enters: a model whose linear layers stand on the meta device. Leaves: the same model on its device, the linear layers of
its decoder blocks quantised, one block at a time, so that no more than one block is ever there in full precision.
Embeddings, norms, biases and the output head stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.kernels.quantize import nf4
from trainfit.kernels.quantize import rowwise as rows
from trainfit.models.layers import require_blocks
from trainfit.spec.errors import InputError

Initialize = Callable[[nn.Module], None]
"""Fills one module's own weights with their random start."""

ROW_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class QuantizedLinear(nn.Linear):
    """``y = x W^T + b``, W frozen and held as codes; computed in x's dtype (under autocast in autocast's).

    Forward and backward each make W anew for their one product, so nothing of its size is kept between them.

    Args:
        bias: whether it has one; a frozen parameter of ``dtype``.
        kind: nf4, int8 or fp8.
        dtype: what the weight stands for; adapters take it over.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        kind: str,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        nn.Module.__init__(self)  # A Linear's own would make a weight in full precision.
        self.in_features, self.out_features, self.kind = in_features, out_features, kind
        self.compute_dtype = dtype
        """PEFT asks for it by this name."""
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
            if bias
            else None
        )
        if kind == "nf4":
            nf4.register()
            parts: Any = nf4.empty_nf4(self.num_quantized, device)
        else:
            rows.register()
            parts = rows.empty_rows(out_features, in_features, ROW_CODES[kind], device)
        for name, part in zip(parts._fields, parts, strict=True):
            self.register_buffer(name, part)

    @torch.no_grad()
    def load(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantise this weight ([out, in], on the layer's device) into the layer's memory, and take the bias over.

        Raises:
            ValueError: another shape.
        """
        if weight.shape != (self.out_features, self.in_features):
            raise ValueError(
                f"weight {list(weight.shape)}: the layer has {self.out_features} x {self.in_features}"
            )
        weight = weight.contiguous()
        if self.kind == "nf4":
            parts: Any = nf4.quantize_nf4(weight)
        else:
            parts = rows.quantize_rows(weight, ROW_CODES[self.kind])
        for own, part in zip(self._parts(), parts, strict=True):
            own.copy_(part)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The codes: what asks a layer for its weight wants to know its device."""
        return self._buffers["codes"]  # pyright: ignore[reportReturnType]

    @property
    def num_quantized(self) -> int:
        """Weights that are stored as codes."""
        return self.out_features * self.in_features

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight that the codes stand for, [out, in]."""
        like = torch.empty(0, dtype=dtype, device=self.weight.device)
        return _dequantize(like, self._parts(), (self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, bias, (self.out_features, self.in_features), *self._parts())  # pyright: ignore[reportReturnType]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"

    def _parts(self) -> list[Tensor]:
        return [part for part in self._buffers.values() if part is not None]


class _Product(torch.autograd.Function):
    """x W^T + b whose backward makes W from its codes again. Only x gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        # (bias, shape, *parts), not spelt out: Dynamo tells whether a function takes ctx by counting its parameters.
        bias, shape, *parts = others
        ctx.shape = shape
        ctx.save_for_backward(*parts)
        return F.linear(x, _dequantize(x, parts, shape), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, parts = gradients[0], ctx.saved_tensors  # asked for once: checkpointing unpacks once
        wanted = gradient @ _dequantize(gradient, parts, ctx.shape)
        return wanted, None, None, *(None for _ in parts)


def _dequantize(like: Tensor, parts: Any, shape: tuple[int, int]) -> Tensor:
    """The weight in the dtype of ``like``.

    The operation takes that tensor, not a dtype: its backward then depends on the gradient, so that a compiler neither
    merges it with the forward's nor keeps the forward's result for it.
    """
    if len(parts) == len(rows.Rows._fields):
        return torch.ops.trainfit.dequantize_rows(like, *parts)
    return torch.ops.trainfit.dequantize_nf4(like, *parts, *shape)


# -- building ----------------------------------------------------------------------------------------------------------


@contextmanager
def linears_on_meta() -> Iterator[None]:
    """Linear layers (and transformers' Conv1D) made inside have no memory, wherever they are asked to be."""
    from transformers.pytorch_utils import Conv1D

    linear, conv = nn.Linear.__init__, Conv1D.__init__

    def make_linear(
        self: nn.Linear,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        linear(self, in_features, out_features, bias, "meta", dtype)

    def make_conv(self: Any, nf: int, nx: int) -> None:
        with torch.device("meta"):
            conv(self, nf, nx)

    nn.Linear.__init__, Conv1D.__init__ = make_linear, make_conv
    try:
        yield
    finally:
        nn.Linear.__init__, Conv1D.__init__ = linear, conv


@torch.no_grad()
def fill_quantized(model: nn.Module, kind: str, device: torch.device | str, initialize: Initialize) -> None:
    """Give a model built under ``linears_on_meta`` its linear layers: quantised in the decoder blocks, whole elsewhere.

    Args:
        initialize: called once with every module of a block, children first, then with each linear layer outside: the
            order in which a whole model is initialised. A seed gives ``native`` the weights that it gives it unquantised;
            transformers' constructors draw some more.

    Raises:
        InputError: no decoder blocks, or blocks that hold their weights in something else than linear layers.
    """
    blocks = require_blocks(model, "quantize", kind, "use quantize: null")
    _refuse_other_weights(blocks, kind)
    # All that stays is allocated first: between what comes and goes it would leave holes in the allocator's segments.
    stays = {
        child: _quantized(child, kind, device)
        for block in blocks
        for child in block.modules()
        if _is_linear(child)
    }
    for block in blocks:
        _materialize(block, device)
        for module in _children_first(block):
            initialize(module)
        for parent in list(block.modules()):
            for name, child in parent.named_children():
                if child in stays:
                    setattr(parent, name, stays[child])
                    stays.pop(child).load(_weight(child), child.bias)  # pyright: ignore[reportArgumentType]
    _materialize(model, device, initialize)


def replace_linears(blocks: list[nn.Module], kind: str) -> dict[nn.Module, QuantizedLinear]:
    """Put quantised layers without memory in the place of the blocks' linear layers; those that were there -> these.

    Raises:
        InputError: blocks that hold their weights in something else than linear layers.
    """
    _refuse_other_weights(blocks, kind)
    replaced: dict[nn.Module, QuantizedLinear] = {}
    for block in blocks:
        for parent in list(block.modules()):
            for name, child in parent.named_children():
                if _is_linear(child):
                    replaced[child] = _quantized(child, kind, "meta")
                    setattr(parent, name, replaced[child])
    return replaced


@torch.no_grad()
def load_random(
    quantized: QuantizedLinear, linear: nn.Module, device: torch.device, initialize: Initialize
) -> None:
    """Give a quantised layer the random start of the layer on ``meta`` that it replaced, which is on the device meanwhile."""
    on_meta = dict(linear._parameters)
    _materialize(linear, device, initialize)
    quantized.load(_weight(linear), linear.bias)  # pyright: ignore[reportArgumentType]
    linear._parameters.update(on_meta)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _quantized(linear: Any, kind: str, device: torch.device | str) -> QuantizedLinear:
    num_out, num_in = _weight(linear).shape
    return QuantizedLinear(num_in, num_out, linear.bias is not None, kind, linear.weight.dtype, device)


def _weight(linear: Any) -> Tensor:
    """[out, in]; Conv1D keeps its own transposed."""
    return linear.weight if isinstance(linear, nn.Linear) else linear.weight.t()


def _is_linear(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" or (
        isinstance(module, nn.Linear) and not isinstance(module, QuantizedLinear)
    )


def _materialize(root: nn.Module, device: torch.device | str, initialize: Initialize | None = None) -> None:
    """Memory for the linear layers that have none, and, with ``initialize``, their start."""
    for module in root.modules():
        if not _is_linear(module):
            continue
        made = False
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))
                made = True
        if made and initialize is not None:
            initialize(module)


def _refuse_other_weights(blocks: list[nn.Module], kind: str) -> None:
    """Only what nothing but a linear layer's own forward reads can be stored as codes."""
    for block in blocks:
        for name, module in block.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.dim() >= 2 and not _is_linear(module):
                    raise InputError(
                        f"{name}.{own} {list(parameter.shape)} is no linear layer's weight: "
                        "blocks with experts or state-space layers are not quantised",
                        "use quantize: null, or a dense transformer",
                        field="quantize",
                        value=kind,
                    )
