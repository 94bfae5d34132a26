"""Models built with quantised linear layers (quantized_linear.py, quantized_libraries.py).

A model is built with its linear layers on meta; then the decoder blocks are initialised and quantised one at
a time, so at most one block is in full precision. Embeddings, norms, biases and the output layer are not
quantised. Under ``DeferredInit`` all of this is recorded on meta, so that each rank of FSDP2 keeps only its
shard of the codes, and one weight at a time is in full precision.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.models.layers import require_blocks
from trainfit.models.quantized_libraries import CLASSES
from trainfit.models.quantized_linear import QuantizedLinear
from trainfit.spec.errors import InputError
from trainfit.spec.quantize import Quantized

Initialize = Callable[[nn.Module], None]  # Initialises one module's own weights, or reads them
WithinBlock = Callable[[nn.Module], AbstractContextManager[None]]


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
