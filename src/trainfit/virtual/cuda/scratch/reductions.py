"""Scratch of reductions: with few outputs and long inputs, blocks share an output in global memory.

Source: aten/src/ATen/native/cuda/Reduce.cuh (``setReduceConfig``, ``gpu_reduce_kernel``,
``AccumulationBuffer``), ReduceSumProdKernel.cu, ReduceMomentKernel.cu, ReduceNormKernel.cu, ReduceOps.cpp
(conversions before the kernel), ReduceAllOps.cpp (copies before it).
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from trainfit.virtual.cuda.scratch.call import (
    SCRATCH,
    Call,
    accumulate_size,
    ceil_div,
    copy_if_strided,
    num_bytes,
)
from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits

MAX_THREADS = 512
WARP = 32
MIN_VALUES_PER_THREAD = 16
MAX_VALUES_PER_THREAD = 256
INT32_MAX = 2**31 - 1
HALVES = (torch.float16, torch.bfloat16)


class Dim(NamedTuple):
    """A dimension of the iterator; strides in elements, ``out_stride`` 0 if reduced."""

    size: int
    stride: int
    out_stride: int


@SCRATCH.rule("sum", "mean", "prod", "nansum")
def sums(call: Call) -> tuple[int, ...]:
    """Scratch of sums, accumulated in ``acc_type``; sum and mean read 16-bit inputs 8 at a time.

    The input is converted to the output's dtype, except 16-bit floats to fp32 (``make_reduction``).
    """
    x, out = call.args[0], call.out
    fused = x.dtype == out.dtype or (x.dtype in HALVES and out.dtype == torch.float32)
    converted = () if fused else (x.numel() * out.element_size(),)
    dtype = x.dtype if fused else out.dtype
    vector = sum_vector(dtype.itemsize) if call.name in ("aten::sum", "aten::mean") else 4
    return converted + reduction(x, out, dims_of(call), dtype, accumulate_size(dtype), vector, call.gpu)


def sum_vector(item: int) -> int:
    """Return how many values of so many bytes a sum or mean loads at a time."""
    return 8 if item == 2 else 4


@SCRATCH.rule("amax", "amin", "max", "min")
def extrema(call: Call) -> tuple[int, ...]:
    """Scratch of amax, amin, and of max() and min(), which copy a strided input; max(dim) has none."""
    if not isinstance(call.out, Tensor) or isinstance(call.arg(1, "other"), Tensor):
        return ()
    x = call.args[0]
    copies = copy_if_strided(x) if call.name in ("aten::max", "aten::min") else ()
    return copies + reduction(x, call.out, dims_of(call), x.dtype, x.element_size(), 4, call.gpu)


@SCRATCH.rule("any", "all", "argmax", "argmin")
def truth_and_positions(call: Call) -> tuple[int, ...]:
    """Scratch of any, all (accumulated in bool), argmax and argmin (pairs of value and int64 index)."""
    x = call.args[0]
    accumulator = 1 if call.name in ("aten::any", "aten::all") else 16
    return reduction(x, call.out, dims_of(call), x.dtype, accumulator, 4, call.gpu)


@SCRATCH.rule("linalg_vector_norm")
def vector_norm(call: Call) -> tuple[int, ...]:
    """Scratch of vector norms, accumulated in ``acc_type`` (NormTwoOps)."""
    x = call.args[0]
    return reduction(x, call.out, dims_of(call, 2), x.dtype, accumulate_size(x.dtype), 4, call.gpu)


@SCRATCH.rule("norm")
def norm(call: Call) -> tuple[int, ...]:
    """Scratch as of ``vector_norm``, with other argument positions."""
    x = call.args[0]
    dims = call.arg(2, "dim") if not isinstance(call.arg(2, "dim"), torch.dtype) else None
    return reduction(x, call.out, dims, x.dtype, accumulate_size(x.dtype), 4, call.gpu)


@SCRATCH.rule("var", "std", "var_mean", "std_mean")
def moments(call: Call) -> tuple[int, ...]:
    """Scratch of var and std, accumulated as Welford's mean, M2 and counts: 16 bytes in fp32, 32 in fp64."""
    x = call.args[0]
    out = call.out if isinstance(call.out, Tensor) else call.out[0]
    return reduction(x, out, dims_of(call), x.dtype, 32 if x.dtype == torch.float64 else 16, 4, call.gpu)


@SCRATCH.rule("logsumexp")
def logsumexp(call: Call) -> tuple[int, ...]:
    """The maxima and the exponentials (ReduceOps.cpp ``logsumexp_out_impl``)."""
    return (num_bytes(call.out), num_bytes(call.args[0]))


def dims_of(call: Call, position: int = 1) -> list[int] | None:
    """Return the dimensions to reduce; None for all. Overloads without them have a flag or nothing."""
    dims = call.arg(position, "dim")
    if isinstance(dims, int) and not isinstance(dims, bool):
        return [dims]
    return list(dims) if isinstance(dims, list | tuple) and dims else None


def reduction(
    x: Tensor,
    out: Tensor,
    dims: list[int] | None,
    dtype: torch.dtype,
    accumulator: int,
    vector: int,
    gpu: GpuTraits,
) -> tuple[int, ...]:
    """Return the staging buffer and semaphores of one reduction.

    Args:
        dims: reduced dimensions of ``x``; None for all.
        dtype: of the input as the kernel reads it.
        accumulator: bytes of an accumulated value.
        vector: elements per load along the reduced dimension (``input_vec_size``).
    """
    if x.numel() == 0:
        return ()
    shape = iterator_dims(x, dims)
    extra: tuple[int, ...] = ()
    item = dtype.itemsize
    if not fits_32_bit(shape, item):
        # A 16-bit output cannot hold partial sums between the parts of a tensor over 2 GiB.
        if dtype in HALVES and out.dtype == dtype:
            extra = (out.numel() * accumulator,)
        while not fits_32_bit(shape, item):
            shape = first_half(shape)
    return extra + global_buffers(shape, item, accumulator, vector, gpu)


def iterator_dims(x: Tensor, dims: list[int] | None) -> list[Dim]:
    """Return the iterator's dimensions, reduced and fastest first, coalesced (``reorder``, ``coalesce``)."""
    reduced = {d % max(1, x.dim()) for d in dims} if dims is not None else set(range(x.dim()))
    out_stride, kept, gone = 1, [], []
    for d in reversed(range(x.dim())):
        size, stride = x.shape[d], x.stride(d)
        if size == 1:
            continue
        if d in reduced:
            gone.append(Dim(size, stride, 0))
        else:
            kept.append(Dim(size, stride, out_stride))
            out_stride *= size
    joined: list[Dim] = []
    for dim in sorted(gone, key=lambda dim: dim.stride) + kept:
        last = joined[-1] if joined else None
        if last and last.size * last.stride == dim.stride and last.size * last.out_stride == dim.out_stride:
            joined[-1] = last._replace(size=last.size * dim.size)
        else:
            joined.append(dim)
    return joined or [Dim(1, 1, 0)]


def fits_32_bit(dims: list[Dim], item: int) -> bool:
    """Return ``can_use_32bit_indexing``: elements and byte offsets below 2**31."""
    extent = 1 + sum((dim.size - 1) * dim.stride * item for dim in dims)
    return prod(dim.size for dim in dims) <= INT32_MAX and extent <= INT32_MAX


def first_half(dims: list[Dim]) -> list[Dim]:
    """Return the first half along the dimension of the largest extent (``with_32bit_indexing``)."""
    widest = max(range(len(dims)), key=lambda i: (dims[i].size - 1) * dims[i].stride)
    return [dim._replace(size=dim.size // 2) if i == widest else dim for i, dim in enumerate(dims)]


def global_buffers(
    dims: list[Dim], item: int, accumulator: int, vector: int, gpu: GpuTraits
) -> tuple[int, ...]:
    """Return the bytes of staging buffer and semaphores (``setReduceConfig``, ``global_memory_size``)."""
    num_reduced = sum(dim.out_stride == 0 for dim in dims)
    num_outputs = prod(dim.size for dim in dims[num_reduced:])
    num_inputs = prod(dim.size for dim in dims[:num_reduced])
    along = num_reduced in (0, len(dims)) or dims[0].stride < dims[num_reduced].stride
    dim0, dim1 = (num_inputs, num_outputs) if along else (num_outputs, num_inputs)
    fastest = dims[0].stride if along else dims[num_reduced].stride
    out_vector = 1
    if fastest == 1:
        if along and dim0 >= 128 and num_reduced == 1:
            dim0 //= vector
        elif not along:
            out_vector = output_vector(dims, num_reduced)
            dim0 //= out_vector
    width, height = block_shape(dim0, dim1, MAX_THREADS // out_vector)
    step_in, step_out = (width, 1) if along else (1, width)
    across_warps = ceil_div(num_inputs, step_in) >= min(height * 16, MAX_VALUES_PER_THREAD)
    step_in, step_out = (step_in * height, step_out) if across_warps else (step_in, step_out * height)
    values = ceil_div(num_inputs, step_in)
    grid = ceil_div(num_outputs // out_vector, step_out)
    target = gpu.num_sms * (gpu.threads_per_sm // (width * height))
    if not across_warps or values < MAX_VALUES_PER_THREAD or grid > target:
        return ()
    blocks = max(
        min(ceil_div(target, grid), ceil_div(values, MIN_VALUES_PER_THREAD)),
        ceil_div(values, MAX_VALUES_PER_THREAD),
    )
    if blocks <= 1:
        return ()
    size = accumulator * num_outputs * blocks
    if not along:
        size *= width * out_vector
    return size, 4 * grid


def output_vector(dims: list[Dim], num_reduced: int) -> int:
    """Return the adjacent outputs per thread (``get_output_vec_size``) of aligned data."""
    size = 4
    for number in (dims[num_reduced].size, *(dim.stride for i, dim in enumerate(dims) if i != num_reduced)):
        while number % size:
            size //= 2
    return size


def block_shape(dim0: int, dim1: int, threads: int) -> tuple[int, int]:
    """Return width and height of a block (``set_block_dimension``), powers of two."""
    wide = power_of_two_below(dim0) if dim0 < threads else threads
    high = power_of_two_below(dim1) if dim1 < threads else threads
    height = min(high, threads // min(wide, WARP))
    return min(wide, threads // height), height


def power_of_two_below(n: int) -> int:
    """Return the largest power of two not above n, at least 1 (``last_pow2``)."""
    return 1 << (max(1, n).bit_length() - 1)
