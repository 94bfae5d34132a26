"""Cache of kernel launches by everything that Triton compiles for.

``kernel[grid](...)`` binds all arguments on each call, and tensor descriptors are validated when made. On
short sequences this takes longer on the host than the kernel on the GPU. A cached launch calls the compiled
kernel and profilers' hooks directly (``CompiledKernel.__getitem__``, as in Triton's fused-softmax tutorial).

It skips these parts of ``JITFunction.run`` (Triton 3.6 and 3.7): ``pre_run_hooks``, which these kernels lack;
the check of globals, which are constants here; autotuning, whose wrappers are not cached; and knobs that
recompile (debug, instrumentation, custom pipelines), which have to be set before the first launch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

MAX_CACHED = 4096  # The cache is cleared at this size, which bounds its memory when lengths keep changing


Tile = tuple[Tensor, tuple[int, ...]]
"""A tensor accessed by TMA, [b, heads, rows, d] or two-dimensional, and the block of one copy."""


class _Cached(NamedTuple):
    """A compiled kernel with its grid and, for each descriptor, everything but the tensor."""

    run: Any
    types: tuple[type, ...]
    fields: tuple[dict[str, Any], ...]


_cache: dict[Any, _Cached] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tiles: tuple[Tile, ...],
    values: tuple[Any, ...],
    constants: Mapping[str, Any],
    *,
    in_gluon: bool = True,
    options: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Launch ``kernel[grid](*descriptors of tiles, *values, **constants)``, in the order of its parameters.

    Args:
        options: Of compilation, such as ``num_warps``.
        values: Tensors, floats (never specialised) and integers (which Triton may specialise).
        in_gluon: The descriptors hold their blocks' layouts, as Gluon kernels need.
    """
    if not isinstance(kernel, JITFunction):  # Triton's interpreter
        kernel[grid](*(_descriptor(tile, in_gluon) for tile in tiles), *values, **constants, **options)
        return
    active: Any = driver.active
    # The Python function identifies the kernel; hashing a JITFunction would hash its source.
    key = (
        active.get_current_device(), kernel.fn, grid,
        *map(_kind_of_tile, tiles), *map(_kind, values), *constants.values(),
        *options.values(),
    )  # fmt: skip
    cached = _cache.get(key)
    if cached is not None:
        cached.run(*map(_with_tensor, cached.types, cached.fields, tiles), *values, *constants.values())
        return
    descriptors = [_descriptor(tile, in_gluon) for tile in tiles]
    compiled = kernel[grid](*descriptors, *values, **constants, **options)
    if isinstance(compiled, CompiledKernel):  # None if a hook of Triton replaced the launch
        last = kernel.arg_names[len(kernel.arg_names) - len(constants) :]
        assert last == list(constants), (kernel.arg_names, list(constants))
        if len(_cache) >= MAX_CACHED:
            _cache.clear()
        fields = tuple({name: x for name, x in vars(each).items() if name != "base"} for each in descriptors)
        _cache[key] = _Cached(compiled[(*grid, 1, 1)[:3]], tuple(map(type, descriptors)), fields)


def _kind(value: Any) -> Any:
    """Return the properties of an argument for which Triton specialises a kernel."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16
    return float if isinstance(value, float) else value


def _kind_of_tile(tile: Tile) -> Any:
    """Return the fields that a tensor's descriptor holds and validates, except the address."""
    x, block = tile
    return x.dtype, x.shape, x.stride(), x.data_ptr() % 16, block


def _with_tensor(descriptor_type: type, fields: dict[str, Any], tile: Tile) -> Any:
    """Return a descriptor equal to a validated one but for the tensor (new, for concurrent launches)."""
    made = object.__new__(descriptor_type)
    made.__dict__.update(fields, base=tile[0])
    return made


def _descriptor(tile: Tile, in_gluon: bool) -> Any:
    x, block = tile[0], list(tile[1])
    shape, strides = list(x.shape), list(x.stride())
    if not in_gluon:
        from triton.tools.tensor_descriptor import TensorDescriptor as PlainDescriptor

        return PlainDescriptor(x, shape, strides, block)
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if x.dim() == 2:
        layout: Any = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    else:
        types = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
        layout = gl.NVMMASharedLayout.get_default_for(block, types[x.dtype])
    return TensorDescriptor(x, shape, strides, block, layout)
