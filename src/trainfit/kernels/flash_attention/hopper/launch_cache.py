"""Launches of one kernel over and over with tensors of the same shapes: Triton's own way is gone once, not each time.

``kernel[grid](...)`` binds and classifies every argument on each call, and a tensor descriptor checks itself when it is made:
together more host time than a short sequence takes on the GPU. What Triton decides by (types, sizes, strides, alignment,
device) is the key here; for a known key the compiled kernel is launched as it is, as Triton's tutorials do
(``CompiledKernel.__getitem__``, triton-lang.org, fused softmax). Values that a kernel is not compiled for are passed on.

What ``JITFunction.run`` does and a known launch does not (Triton 3.6 and 3.7), and why nothing is missed:

- the kernel's ``pre_run_hooks``: none of these kernels has one (``add_pre_run_hook`` is for its author);
- autotuning and heuristics: these are objects around a kernel, no ``JITFunction``, so here they are never known;
- the check that globals a kernel reads are as they were: they are constants of its file;
- knobs that would compile anew (debug, instrumentation, a custom pipeline): to be set before the first launch.

The launch hooks of profilers (``knobs.runtime.launch_enter_hook``, ``launch_exit_hook``) are called as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

MOST_KNOWN = 4096
"""Keys that are kept; then all are forgotten, so that ever new lengths cost no memory."""


class Tile(NamedTuple):
    """A tensor that a kernel takes by TMA, [b, heads, rows, d] or two-dimensional, and the block that is one copy.

    ``in_gluon``: the kernel is in Gluon, so the descriptor names the block's layout.
    """

    x: Tensor
    block: tuple[int, ...]
    in_gluon: bool = True


class _Known(NamedTuple):
    """A launch that has been made: the compiled kernel with its grid and, of each descriptor, all but the tensor."""

    run: Any
    types: tuple[type, ...]
    fields: tuple[dict[str, Any], ...]


_known: dict[Any, _Known] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tiles: tuple[Tile, ...],
    values: tuple[Any, ...],
    constants: Mapping[str, Any],
    num_warps: int = 4,
) -> None:
    """``kernel[grid](descriptors of tiles, *values, **constants)``; that is the order of the kernel's parameters.

    ``values``: tensors, floats, which a kernel is not compiled for, and integers, which it may be.
    """
    if not isinstance(kernel, JITFunction):  # Triton's interpreter: no driver, nothing compiled
        kernel[grid](*map(_descriptor, tiles), *values, **constants, num_warps=num_warps)
        return
    active: Any = driver.active
    # Triton would hash a kernel's text; its Python function stays with it.
    key = (
        active.get_current_device(), kernel.fn, grid, num_warps,
        *map(_kind_of_tile, tiles), *map(_kind, values), *constants.values(),
    )  # fmt: skip
    known = _known.get(key)
    if known is not None:
        known.run(*map(_with_tensor, known.types, known.fields, tiles), *values, *constants.values())
        return
    descriptors = [_descriptor(each) for each in tiles]
    compiled = kernel[grid](*descriptors, *values, **constants, num_warps=num_warps)
    if isinstance(compiled, CompiledKernel):  # None where a hook of Triton's took the launch over
        _remember(key, kernel, grid, compiled, descriptors, constants)


def _remember(
    key: Any, kernel: Any, grid: tuple[int, ...], compiled: Any, descriptors: list[Any], constants: Any
) -> None:
    last = kernel.arg_names[len(kernel.arg_names) - len(constants) :]
    assert last == list(constants), (kernel.arg_names, list(constants))
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    fields = tuple({name: x for name, x in vars(each).items() if name != "base"} for each in descriptors)
    run = compiled[(*grid, 1, 1)[:3]]
    _known[key] = _Known(run, tuple(map(type, descriptors)), fields)


def _kind(value: Any) -> Any:
    """All that Triton compiles for."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16
    return float if isinstance(value, float) else value


def _kind_of_tile(tile: Tile) -> Any:
    """All that a descriptor holds and checks, but the address."""
    x = tile.x
    return x.dtype, x.shape, x.stride(), x.data_ptr() % 16, tile.block, tile.in_gluon


def _with_tensor(descriptor_type: type, fields: dict[str, Any], tile: Tile) -> Any:
    """A descriptor equal to a checked one but for the tensor. A new one each: two threads may launch at once."""
    made = object.__new__(descriptor_type)
    made.__dict__.update(fields, base=tile.x)
    return made


def _descriptor(tile: Tile) -> Any:
    x, block = tile.x, list(tile.block)
    shape, strides = list(x.shape), list(x.stride())
    if not tile.in_gluon:
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
