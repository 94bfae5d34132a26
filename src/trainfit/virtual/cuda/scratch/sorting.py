"""Scratch of sort, topk and scans.

Sources: aten/src/ATen/native/cuda/Sort.cpp, SortStable.cu, TensorTopK.cpp, cub.cuh, ScanKernels.cpp. CUB's
radix sort needs a second copy of keys and values; counters (some KiB) are not counted.
"""

from torch import Tensor

from trainfit.virtual.cuda.scratch.call import Call, Registry, copy_if_strided, num_bytes

SCRATCH: Registry[tuple[int, ...]] = Registry()

SMALL_SORT = 4096
HUGE_SLICE = 1_000_000
FEW_SLICES = 128
INDEX = 8


@SCRATCH.rule("sort")
def sort(call: Call) -> tuple[int, ...]:
    """Scratch of sort: none up to 4096 elements a slice, else a radix sort with index arrays."""
    x = call.args[0]
    stable_overload = "stable" in call.kwargs
    dim = call.kwargs.get("dim", -1) if stable_overload else call.arg(1, "dim", -1)
    return sort_scratch(x, dim)


def sort_scratch(x: Tensor, dim: int) -> tuple[int, ...]:
    """Scratch of ``sort_cuda_kernel``: indices of every slice, and a second copy of keys and values."""
    if x.dim() == 0 or x.numel() == 0 or x.shape[dim] <= SMALL_SORT:
        return ()
    length = x.shape[dim]
    slices = x.numel() // length
    copies = copy_if_strided(x.movedim(dim, -1)) if x.dim() > 1 else copy_if_strided(x)
    if slices == 1 or length >= HUGE_SLICE:
        return (*copies, length * INDEX, length * (x.element_size() + INDEX))
    if slices < FEW_SLICES:
        # Pairs of index and segment, twice, and the radix sorts' second copies.
        return (*copies, x.numel() * INDEX, x.numel() * INDEX, x.numel() * (x.element_size() + INDEX))
    return (*copies, x.numel() * INDEX, x.numel() * (x.element_size() + INDEX))


@SCRATCH.rule("topk")
def topk(call: Call) -> tuple[int, ...]:
    """Scratch of topk: a copy of a strided input; a sort of few very long slices (``should_use_sort``)."""
    x, dim = call.args[0], call.arg(2, "dim", -1)
    if x.dim() and x.numel() and x.numel() // x.shape[dim] <= 10 and x.shape[dim] >= 100_000:
        return (num_bytes(x), x.numel() * INDEX, *sort_scratch(x, dim))
    return copy_if_strided(x)


@SCRATCH.rule("cumsum", "cumprod")
def scan(call: Call) -> tuple[int, ...]:
    """Scratch of scans: the input in the output's dtype (ReduceOps.cpp ``impl_func_cum_ops``)."""
    x = call.args[0]
    return (call.out.numel() * call.out.element_size(),) if x.dtype != call.out.dtype else copy_if_strided(x)
