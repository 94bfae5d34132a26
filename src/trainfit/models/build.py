"""Build the module of a ModelSpec, of either implementation, on a device.

The result is a randomly initialised causal LM in training mode. Its ``forward(input_ids, labels=None)``
returns ``.loss`` (fp32 scalar, labels shifted inside, -100 ignored) and ``.logits`` [batch, seq, vocabulary].
The device can be ``meta``, fake CPU tensors (under FakeTensorMode) or real; nothing is created on the CPU and
moved.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from trainfit.catalog.load import model_config
from trainfit.models.deferred_init import deferred
from trainfit.models.layers import decoder_blocks, require_blocks
from trainfit.models.quantized import (
    WithinBlock,
    fill_quantized,
    linears_on_meta,
    load_filled,
    replace_linears,
)
from trainfit.offload.blocks import HostBlocks
from trainfit.spec.errors import InputError
from trainfit.spec.quantize import Quantized
from trainfit.spec.recipe import ModelSpec

if TYPE_CHECKING:
    from trainfit.models.native.decoder import NativeDecoder
    from trainfit.models.weights.read import Weights

MAX_MODULES = 20_000
"""Limit per model, over ten times that of the deepest published ones (experts are one tensor per layer)."""


def build_model(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: str = "sdpa",
    quantize: str | Quantized | None = None,
    weights: "Weights | None" = None,
    on_model: Callable[[nn.Module], None] = lambda model: None,
    within_block: WithinBlock = lambda block: nullcontext(),
) -> nn.Module:
    """Build the model of ``spec`` with parameters on ``device`` in ``dtype``.

    Args:
        attention: The recipe's value. ``eager`` computes all scores, ``triton`` runs trainfit's kernels; the
            others call ``F.scaled_dot_product_attention``, whose backend the caller selects.
        quantize: Format of the decoder blocks' frozen linear layers (quantized.py).
        weights: Read into the parameters; None: they are random.
        on_model: Called with the model before its blocks are quantised; it may remove blocks.
        within_block: Returns the context in which a block is quantised.

    Raises:
        InputError: Unknown catalog name, unsupported ``model_type``, or a key that its config refuses.
    """
    config = model_config(spec.config)
    if spec.implementation == "native":
        build = build_native
    else:
        from trainfit.models.hf import build_hf as build
    with _at_most(MAX_MODULES), linears_on_meta() if quantize is not None else nullcontext(set()) as waiting:
        is_random = weights is None
        model: Any = build(config, dtype=dtype, device=device, attention=attention, is_random=is_random)
    if weights is not None:
        weights.bind(model)
    if quantize is not None:
        require_blocks(model, "quantize", str(quantize), "use quantize: null")
    on_model(model)
    if quantize is not None:
        if (recorded := deferred()) is not None:
            recorded.forget(waiting)  # Their first initialisation; on a device there is none.
        initialise = partial(_initialise, model) if weights is None else weights.fill
        fill_quantized(model, Quantized.of(quantize), device, initialise, within_block, waiting=waiting)
    if weights is not None:
        weights.finish(model)
    return model


def build_native(
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: str = "sdpa",
    is_random: bool = True,
) -> "NativeDecoder":
    """Build the native decoder of ``config``, in training mode.

    Its weights are random, or as allocated where they are read later (``is_random`` False).
    """
    from trainfit.models.native.decoder import NativeDecoder
    from trainfit.models.native.families import native_config

    if attention == "triton":
        from trainfit.kernels.flash_attention.op import register

        register()  # torch.compile cannot trace this.
    model = NativeDecoder(native_config(config), kind=attention, dtype=dtype, device=torch.device(device))
    if is_random:
        model.init_weights()
    return model


@contextmanager
def _at_most(limit: int) -> Iterator[None]:
    """Raise InputError while a model is built as soon as it has more modules than ``limit``."""
    num_modules = 0

    def count(*_: Any) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > limit:
            remedy = (
                "correct its numbers of layers, heads and experts, which are far over any published model's"
            )
            raise InputError(f"describes over {limit:,} modules", remedy, field="model.config")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def build_on_host(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "sdpa",
    quantize: str | Quantized | None = None,
    weights: "Weights | None" = None,
    num_buffers: int,
    on_model: Callable[[nn.Module], None],
) -> tuple[nn.Module, HostBlocks]:
    """Build the model with its decoder blocks' weights on the host, ``num_buffers`` at a time on ``device``.

    ``weights`` and ``on_model`` as in ``build_model``; the latter gets the model while it is on ``meta``.
    """
    model = build_model(spec, dtype=dtype, device="meta", attention=attention)
    initialise = partial(_initialise, model)
    if weights is not None:
        weights.bind(model)
        initialise = partial(_read, model, weights)
    blocks = require_blocks(model, "offload.weights", True, "set offload.weights: false")
    block_of = {id(module): block for block in blocks for module in block.modules()}
    visited = _as_initialised(model)
    quantized = replace_linears(blocks, Quantized.of(quantize)) if quantize is not None else {}
    on_model(model)
    blocks = decoder_blocks(model)
    visited = [module for module in visited if block_of.get(id(module)) in (None, *blocks)]
    _to_device([module for module in visited if id(module) not in block_of], device)
    hosted = HostBlocks(blocks, device, num_buffers)
    for module, following in zip(visited, [*visited[1:], None], strict=True):
        if module in quantized:
            load_filled(quantized[module], module, device, initialise)
        else:
            initialise(module)
        block = block_of.get(id(module))
        if block is not None and block is not block_of.get(id(following)):
            hosted.store(blocks.index(block))
    return model, hosted


def _as_initialised(model: nn.Module) -> list[nn.Module]:
    """Return the modules in ``build_model``'s order, so that equal seeds give native models equal weights."""
    if hasattr(model, "init_module"):
        return list(model.modules())
    visited: list[nn.Module] = []
    model.apply(visited.append)  # pyright: ignore[reportArgumentType] - transformers: children first
    return visited


def _to_device(modules: list[nn.Module], device: torch.device) -> None:
    """Allocate these modules' parameters and buffers on ``device``; shared ones stay shared."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in new:
                    memory = torch.empty_like(parameter, device=device)
                    new[parameter] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                module._parameters[name] = new[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _read(model: nn.Module, weights: "Weights", module: nn.Module) -> None:
    """Read the weights of a module that was built on ``meta``; buffers that no folder has are computed."""
    if module._buffers:
        _initialise(model, module)
    weights.fill(module)


@torch.no_grad()
def _initialise(model: nn.Module, module: nn.Module) -> None:
    """Initialise the module's own weights and buffers by the model's code."""
    if hasattr(model, "init_module"):
        model.init_module(module)  # pyright: ignore[reportCallIssue]
    else:
        model._init_weights(module)  # pyright: ignore[reportCallIssue]
