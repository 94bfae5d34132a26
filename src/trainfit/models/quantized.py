"""Frozen linear layers with weights in 4 or 8 bits, and models built with them.

A model is built with its linear layers on meta; then the decoder blocks are initialised and quantised one at
a time, so at most one block is in full precision. Embeddings, norms, biases and the output layer are not
quantised. Under ``DeferredInit`` all of this is recorded on meta, so that each rank of FSDP2 keeps only its
shard of the codes, and one weight at a time is in full precision.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.kernels.quantize import nf4
from trainfit.kernels.quantize import rowwise as rows
from trainfit.models.layers import require_blocks
from trainfit.spec.errors import InputError
from trainfit.spec.quantize import Quantized

Initialize = Callable[[nn.Module], None]  # Initialises one module's own weights, or reads them
WithinBlock = Callable[[nn.Module], AbstractContextManager[None]]

ROW_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHARDED = ("codes", "block_codes")
"""Buffers of a quantised layer that FSDP2 shards. The others are under 0.02 bits a weight, or magnitudes in
fp32, which bitsandbytes keeps whole on every rank as well."""
SHARDED_AS = torch.bfloat16
"""Dtype as which FSDP2 holds codes: torch 2.11 makes parameters that could require gradients, so of a
floating dtype, and a mixed-precision policy casts every other one. Bytes are only copied."""
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class QuantizedLinear(nn.Linear):
    """``y = x W^T + b`` with frozen, quantised W, in x's dtype (autocast's under autocast).

    Forward and backward dequantise W for their product each, so nothing of its size is saved.

    Args:
        base: The kind (nf4, int8 or fp8), or also its blocks and the dtype of its products.
        dtype: Dtype of the original weight, which adapters and the frozen bias take.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        base: str | Quantized,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        nn.Module.__init__(self)  # nn.Linear would allocate a full-precision weight.
        self.base = base = Quantized.of(base)
        self.in_features, self.out_features, self.kind = in_features, out_features, base.kind
        self.compute_dtype = dtype  # The name that PEFT reads.
        own_bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if own_bias is None else nn.Parameter(own_bias, requires_grad=False)
        parts = self._empty(device)
        self._fields = parts._fields
        self._viewed = dict[str, torch.dtype]()  # Codes that are parameters of another dtype
        for name, part in zip(parts._fields, parts, strict=True):
            self.register_buffer(name, part)

    @torch.no_grad()
    def load(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantise a weight ([out, in], on the layer's device) into the layer's memory, and copy the bias."""
        if weight.shape != self.shape:
            raise ValueError(f"weight {list(weight.shape)}: the layer has {self.shape[0]} x {self.shape[1]}")
        for memory, part in zip(self._parts(), self._quantize(weight.contiguous()), strict=True):
            if memory is not part:
                memory.copy_(part)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def _empty(self, device: torch.device | str) -> Any:
        """Allocate the tensors of the layout, a named tuple."""
        if self.kind == "nf4":
            nf4.register()
            return nf4.empty_nf4(self.num_quantized, device, self.base.block, double=self.base.double)
        rows.register()
        return rows.empty_rows(*self.shape, ROW_CODES[self.kind], device)

    def _quantize(self, weight: Tensor) -> Any:
        """Return the layout's tensors of a contiguous weight."""
        if self.kind == "nf4":
            return nf4.quantize_nf4(weight, self.base.block, double=self.base.double)
        return rows.quantize_rows(weight, ROW_CODES[self.kind])

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The codes, for code that reads the device of a layer's weight."""
        return self.codes  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def codes_to_parameters(self) -> None:
        """Make the codes frozen parameters, which FSDP2 shards; an odd number of bytes stays a buffer."""
        for name in SHARDED:
            codes = self._buffers.get(name)
            if codes is None or codes.dtype == torch.float32 or codes.shape[-1] % SHARDED_AS.itemsize:
                continue
            del self._buffers[name]
            self._viewed[name] = codes.dtype
            self.register_parameter(name, nn.Parameter(codes.view(SHARDED_AS), requires_grad=False))

    @property
    def sharded_names(self) -> list[str]:
        """Names of the codes that FSDP2 shards."""
        return [name for name in SHARDED if name in self._fields]

    @property
    def code_parameters(self) -> list[nn.Parameter]:
        """Codes that are parameters."""
        return [self._parameters[name] for name in self._viewed]  # pyright: ignore[reportReturnType]

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def num_quantized(self) -> int:
        """Number of weights stored as codes."""
        return self.out_features * self.in_features

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """The codes: PEFT's DoRA calls ``dequantize`` of layers with this name, which is HQQ's."""
        return self.weight

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dequantised weight, [out, in], by default in the original weight's dtype."""
        like = torch.empty(0, dtype=dtype or self.compute_dtype, device=self.weight.device)
        return _dequantize(like, self._parts(), self.shape)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        if self.base.compute is not None:
            with torch.autocast(device, enabled=False) if autocast else nullcontext():
                return self._product(x.to(COMPUTE[self.base.compute])).to(x.dtype)
        if autocast:
            x = x.to(torch.get_autocast_dtype(device))
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, bias, self.shape, *self._parts())  # pyright: ignore[reportReturnType]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.base}"

    def _parts(self) -> list[Tensor]:
        return [self._part(name) for name in self._fields]

    def _part(self, name: str) -> Tensor:
        part = getattr(self, name)
        return part.view(self._viewed[name]) if name in self._viewed else part


class _Product(torch.autograd.Function):
    """x W^T + b, whose backward dequantises W again. Only x gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        # (bias, shape, *parts): Dynamo decides by the number of parameters whether a function takes ctx.
        bias, shape, *parts = others
        ctx.shape = shape
        ctx.save_for_backward(*parts)
        return F.linear(x, _dequantize(x, parts, shape), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, parts = gradients[0], ctx.saved_tensors  # read once: checkpointing unpacks once
        dx = gradient @ _dequantize(gradient, parts, ctx.shape)
        return dx, None, None, *(None for _ in parts)


def _dequantize(like: Tensor, parts: Any, shape: tuple[int, int]) -> Tensor:
    """Return the weight in the dtype of ``like``.

    ``like`` is a tensor so that in the backward a compiler does not reuse the forward's result.
    """
    if len(parts) == len(rows.Rows._fields):
        codes, scales = parts
        return torch.ops.trainfit.dequantize_rows(like, codes, scales)
    return torch.ops.trainfit.dequantize_nf4(like, *parts, *shape)


@contextmanager
def linears_on_meta() -> Iterator[set[nn.Parameter]]:
    """Create linear layers, and transformers' Conv1D, on meta whatever device they request.

    Yields the set of their parameters, which later code initialises.
    """
    from transformers.pytorch_utils import Conv1D

    linear, conv = nn.Linear.__init__, Conv1D.__init__
    made: set[nn.Parameter] = set()

    def make_linear(
        self: nn.Linear,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        linear(self, in_features, out_features, bias, "meta", dtype)
        made.update(self.parameters())

    def make_conv(self: Any, nf: int, nx: int) -> None:
        with torch.device("meta"):
            conv(self, nf, nx)
        made.update(self.parameters())

    nn.Linear.__init__, Conv1D.__init__ = make_linear, make_conv
    try:
        yield made
    finally:
        nn.Linear.__init__, Conv1D.__init__ = linear, conv


@torch.no_grad()
def fill_quantized(
    model: nn.Module,
    base: Quantized,
    device: torch.device | str,
    initialize: Initialize,
    within_block: WithinBlock = lambda block: nullcontext(),
    *,
    waiting: set[nn.Parameter],
) -> None:
    """Initialise the linear layers of a model built under ``linears_on_meta``; those of blocks are quantised.

    ``initialize`` is called in the order of an unquantised model, so equal seeds give native models the same
    weights before quantisation; transformers' constructors draw more random numbers. Each block is quantised
    inside ``within_block(block)``. ``waiting`` are the parameters that ``linears_on_meta`` yielded.

    Raises:
        InputError: No decoder blocks, or blocks with matrices outside linear layers.
    """
    blocks = require_blocks(model, "quantize", str(base), "use quantize: null")
    _refuse_unknown_names(model, base)
    _refuse_other_weights(blocks, base)
    # Allocated before the temporary weights, which would otherwise leave holes in the allocator's segments.
    quantized = {child: _quantized(child, base, device) for _, _, child in _linears(blocks, base)}
    for block in blocks:
        with within_block(block):
            _materialize(block, device, waiting)
            for module in _children_first(block):
                initialize(module)
            for parent, name, child in _linears([block], base):
                setattr(parent, name, quantized[child])
                quantized.pop(child).load(_weight(child), child.bias)  # pyright: ignore[reportArgumentType]
    _materialize(model, device, waiting, initialize)


def replace_linears(blocks: list[nn.Module], base: Quantized) -> dict[nn.Module, QuantizedLinear]:
    """Replace the blocks' linear layers by quantised ones on meta; return the new layer of each old one."""
    _refuse_other_weights(blocks, base)
    new: dict[nn.Module, QuantizedLinear] = {}
    for parent, name, child in _linears(blocks, base):
        new[child] = _quantized(child, base, "meta")
        setattr(parent, name, new[child])
    return new


@torch.no_grad()
def load_filled(
    quantized: QuantizedLinear, linear: nn.Module, device: torch.device, initialize: Initialize
) -> None:
    """Initialise the replaced layer ``linear`` on the device, and quantise its weight into ``quantized``."""
    on_meta = dict(linear._parameters)
    _materialize(linear, device, set(linear.parameters()), initialize)
    quantized.load(_weight(linear), linear.bias)  # pyright: ignore[reportArgumentType]
    linear._parameters.update(on_meta)


def _linears(blocks: list[nn.Module], base: Quantized) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return parent, name and linear layer of every linear layer in the blocks that is quantised."""
    return [
        (parent, name, child)
        for block in blocks
        for path, parent in block.named_modules()
        for name, child in parent.named_children()
        if _is_linear(child) and not _is_skipped(f"{path}.{name}".strip("."), base)
    ]


def _refuse_unknown_names(model: nn.Module, base: Quantized) -> None:
    """Refuse names in ``skip_modules`` that no module of the model has."""
    paths = [f".{path}." for path, _ in model.named_modules()]
    for name in base.skip_modules:
        if not name or not any(f".{name}." in path for path in paths):
            remedy = "write names of its linear layers, such as down_proj"
            raise InputError(
                "the model has no such module", remedy, field="quantize.skip_modules", value=name
            )


def _is_skipped(path: str, base: Quantized) -> bool:
    """Return whether ``skip_modules`` names a layer or a module around it, within its block."""
    return any(f".{name}." in f".{path}." for name in base.skip_modules)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _quantized(linear: Any, base: Quantized, device: torch.device | str) -> QuantizedLinear:
    from trainfit.models.quantized_libraries import CLASSES  # Its classes derive from the one here.

    num_out, num_in = _weight(linear).shape
    return CLASSES[base.library](num_in, num_out, linear.bias is not None, base, linear.weight.dtype, device)


def _weight(linear: Any) -> Tensor:
    """Return the weight as [out, in]; Conv1D's is transposed."""
    return linear.weight if isinstance(linear, nn.Linear) else linear.weight.t()


def _is_linear(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" or (
        isinstance(module, nn.Linear) and not isinstance(module, QuantizedLinear)
    )


def _materialize(
    root: nn.Module,
    device: torch.device | str,
    waiting: set[nn.Parameter],
    initialize: Initialize | None = None,
) -> None:
    """Allocate the ``waiting`` parameters of linear layers, and ``initialize`` the layers if given."""
    for module in filter(_is_linear, root.modules()):
        own = {name: one for name, one in module._parameters.items() if one is not None and one in waiting}
        for name, parameter in own.items():
            module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))
        if own and initialize is not None:
            initialize(module)


def _refuse_other_weights(blocks: list[nn.Module], base: Quantized) -> None:
    """Refuse blocks with matrices outside linear layers, which other code may read."""
    for name, module in (pair for block in blocks for pair in block.named_modules()):
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and not _is_linear(module):
                problem = (
                    f"{name}.{own} {list(parameter.shape)} is no linear layer's weight: "
                    "blocks with experts or state-space layers are not quantised"
                )
                remedy = "use quantize: null, or a dense transformer"
                raise InputError(problem, remedy, field="quantize", value=str(base))
