"""The tensors of a Hugging Face folder that hold a model's parameters, in both directions.

A ``Stored`` is one tensor of the folder: its name there, the parameter (or persistent buffer) of the bare
model that holds it, and its place in that. Most are a whole parameter. The others are parts of one:

- the native decoder's ``attention.qkv`` is q_proj, k_proj and v_proj, one below the other; ``mlp.up`` is
  gate_proj and up_proj;
- transformers' models with experts hold a layer's experts in one parameter, and a folder has a tensor an
  expert and matrix. transformers' own conversion says which.

``layout(model)`` returns them all. The model may be on ``meta``, which costs no memory::

    model = build_model(spec, dtype=torch.float32, device="meta")
    for stored in layout(model):
        # Read: stored.of(parameters[stored.parameter]).copy_(folder[stored.name])
        # Write: folder[stored.name] = stored.of(parameters[stored.parameter])

``of`` returns a view of a whole, contiguous parameter, in either direction. Take the layout of the bare
model: PEFT, quantisation and parallelism change its names. A tied parameter is listed once, by the name that
``state_dict`` has first; ``tied(model)`` returns its other names, which a folder may have too.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainfit.models.native.config import NativeConfig
from trainfit.models.native.decoder import NativeDecoder
from trainfit.spec.errors import InputError

Ranges = tuple[slice, ...]
"""A range of each dimension of a tensor, with start and stop."""


class Stored(NamedTuple):
    """A tensor of a Hugging Face folder, and its place in a parameter; sizes are in elements."""

    name: str
    parameter: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, parameter: Tensor) -> Tensor:
        """Return the tensor as a detached view of the whole parameter, to read or write."""
        return parameter.detach().as_strided(
            self.shape, self.stride, parameter.storage_offset() + self.offset
        )

    def rows_of(self, parameter: Tensor) -> slice | None:
        """Return the rows of the parameter that the tensor is; None: it is no range of whole rows."""
        row = parameter[:1].numel()
        own = self.shape[1:] == tuple(parameter.shape[1:]) and self.offset % row == 0
        is_whole = own and self.stride == contiguous_strides(self.shape)
        return slice(self.offset // row, self.offset // row + self.shape[0]) if is_whole else None

    def within(self, shape: tuple[int, ...], ranges: Ranges) -> "tuple[Ranges, Stored] | None":
        """Return what of the tensor is in a part of its parameter, and where in that part it belongs.

        Args:
            shape: of the parameter.
            ranges: the part, a range of each dimension.

        Returns:
            The ranges of the tensor, and their place in a contiguous tensor of the part; None: nothing is.
        """
        strides, sizes = contiguous_strides(shape), tuple(one.stop - one.start for one in ranges)
        out_strides = contiguous_strides(sizes)
        left = {dim for dim in range(len(shape)) if shape[dim] > 1}
        dims: list[int | None] = []  # The parameter's dimension that each of the tensor's is.
        for size, stride in zip(self.shape, self.stride, strict=True):
            dim = next((one for one in left if size > 1 and strides[one] == stride), None)
            left -= {dim}
            dims.append(dim)
        lengths = {dim: size for dim, size in zip(dims, self.shape, strict=True) if dim is not None}
        first, rest, offset = {}, self.offset, 0
        for dim, (stride, part) in enumerate(zip(strides, ranges, strict=True)):
            start, rest = divmod(rest, stride)
            low, high = max(start, part.start), min(start + lengths.get(dim, 1), part.stop)
            if low >= high:
                return None
            first[dim] = low - start, high - start
            offset += (low - part.start) * out_strides[dim]
        own = tuple(slice(0, 1) if dim is None else slice(*first[dim]) for dim in dims)
        out_shape = tuple(one.stop - one.start for one in own)
        out_stride = tuple(1 if dim is None else out_strides[dim] for dim in dims)
        return own, Stored(self.name, self.parameter, out_shape, out_stride, offset)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def layout(model: nn.Module) -> list[Stored]:
    """Return the tensors of the folder that holds a bare model's parameters and persistent buffers.

    Raises:
        InputError: transformers converts a parameter in a way that is no view of it.
    """
    aliases = tied(model)
    tensors = {name: one for name, one in model.state_dict().items() if name not in aliases}
    on_meta = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}
    if isinstance(model, NativeDecoder):
        return list(_native(model.config, on_meta))
    return _transformers(model, on_meta)


def tied(model: nn.Module) -> dict[str, str]:
    """Return the names under which a model has a parameter again, and the first name of each."""
    first: dict[int, str] = {}
    again: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            again[name] = first[id(parameter)]
    return again


def stored_at(name: str, parameter: str, view: Tensor) -> Stored:
    """Return the tensor ``name`` of a folder at the place of a view of the parameter, or all of it."""
    return Stored(name, parameter, tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))


class _Views(TorchFunctionMode):
    """Skips the copies that make a view contiguous."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _transformers(model: Any, tensors: dict[str, Tensor]) -> list[Stored]:
    """Return the layout in which transformers saves: its conversion, run on meta tensors, yields views."""
    from transformers.core_model_loading import revert_weight_conversion

    with _Views():
        converted = revert_weight_conversion(model, dict(tensors))
    places = {one.untyped_storage()._cdata: name for name, one in tensors.items()}
    found: list[Stored] = []
    for name, view in converted.items():
        parameter = places.get(view.untyped_storage()._cdata)
        if parameter is None:
            kind = model.config.model_type
            problem = f"transformers stores its {name} permuted, which is not supported"
            raise InputError(problem, "use model.weights: random", field="model.weights", value=kind)
        found.append(stored_at(name, parameter, view))
    return found


def _native(config: NativeConfig, tensors: dict[str, Tensor]) -> Iterator[Stored]:
    """Yield the layout of Llama, Mistral and Qwen, in the order of their files."""
    for name, parameter, rows in _native_names(config):
        whole = tensors[parameter]
        yield stored_at(name, parameter, whole if rows is None else whole[rows])


NativeName = tuple[str, str, slice | None]
"""Hugging Face name, native parameter, and its rows (None: all)."""


def _native_names(config: NativeConfig) -> Iterator[NativeName]:
    yield "model.embed_tokens.weight", "embed.weight", None
    if config.position_embedding == "learned":
        yield "model.embed_positions.weight", "embed_positions.weight", None
    for layer in range(config.num_hidden_layers):
        yield from _block(config, f"model.layers.{layer}", f"layers.{layer}")
    if config.norm_placement == "pre":
        yield from _norm(config, "model.norm", "norm")
    if not config.tie_word_embeddings:
        yield "lm_head.weight", "lm_head.weight", None


def _block(config: NativeConfig, theirs: str, ours: str) -> Iterator[NativeName]:
    heads = config.num_attention_heads * config.head_dim
    groups = config.num_key_value_heads * config.head_dim
    qkv = {"q_proj": heads, "k_proj": groups, "v_proj": groups}
    yield from _norm(config, f"{theirs}.input_layernorm", f"{ours}.attention_norm")
    yield from _fused(qkv, f"{theirs}.self_attn", f"{ours}.attention.qkv", config.attention_bias)
    if config.qk_norm:
        yield from _norm(config, f"{theirs}.self_attn.q_norm", f"{ours}.attention.q_norm")
        yield from _norm(config, f"{theirs}.self_attn.k_norm", f"{ours}.attention.k_norm")
    yield f"{theirs}.self_attn.o_proj.weight", f"{ours}.attention.out.weight", None
    if config.attention_output_bias:
        yield f"{theirs}.self_attn.o_proj.bias", f"{ours}.attention.out.bias", None
    yield from _norm(config, f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm")
    up = {"gate_proj": config.intermediate_size} if config.gated_mlp else {}
    up["up_proj"] = config.intermediate_size
    yield from _fused(up, f"{theirs}.mlp", f"{ours}.mlp.up", config.mlp_bias)
    yield f"{theirs}.mlp.down_proj.weight", f"{ours}.mlp.down.weight", None
    if config.mlp_bias:
        yield f"{theirs}.mlp.down_proj.bias", f"{ours}.mlp.down.bias", None


def _fused(sizes: dict[str, int], theirs: str, ours: str, bias: bool) -> Iterator[NativeName]:
    for kind in ("weight", "bias") if bias else ("weight",):
        start = 0
        for part, size in sizes.items():
            yield f"{theirs}.{part}.{kind}", f"{ours}.{kind}", slice(start, start + size)
            start += size


def _norm(config: NativeConfig, theirs: str, ours: str) -> Iterator[NativeName]:
    yield f"{theirs}.weight", f"{ours}.weight", None
    if config.norm == "layernorm":
        yield f"{theirs}.bias", f"{ours}.bias", None
