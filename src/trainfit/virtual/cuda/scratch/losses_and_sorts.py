"""Scratch of softmax, losses, sorts, scans and operations on lists of tensors.

Contiguous cross-entropy, in-place operations on lists and fused optimizers take none. Sources:
aten/src/ATen/native/Loss.cpp, cuda/SoftMax.cu, NLLLoss2d.cu, Sort.cpp, SortStable.cu, TensorTopK.cpp,
cub.cuh, ScanKernels.cpp, ForeachReduceOp.cu, MultiTensorApply.cuh. CUB's radix sort needs a second
copy of keys and values; counters (some KiB) are not counted.
"""

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

CHUNK = 65536  # Elements per block (kChunkSize)
SMALL_SORT = 4096
HUGE_SLICE = 1_000_000
FEW_SLICES = 128
INDEX = 8


@SCRATCH.rule("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
def reduced_loss(call: Call) -> tuple[int, ...]:
    """The elementwise loss (Loss.cpp: ``Tensor loss``), which is the output with reduction 0."""
    name, source = call.name, call.args[0]
    position = 3 if name == "aten::binary_cross_entropy" else 2
    return () if call.arg(position, "reduction", 1) == 0 else (num_bytes(source),)


COPIED = {
    "_softmax": (0,), "_log_softmax": (0,), "nll_loss_forward": (0,), "nll_loss2d_forward": (0,),
    "_log_softmax_backward_data": (0, 1), "embedding": (1,),
}  # fmt: skip
"""Operations that only copy strided arguments at these positions (host_softmax, Embedding.cpp)."""
for _name, _positions in COPIED.items():
    SCRATCH.rule(_name)(lambda call, at=_positions: copy_if_strided(*(call.args[i] for i in at)))


@SCRATCH.rule("_softmax_backward_data")
def softmax_backward(call: Call) -> tuple[int, ...]:
    """``grad * output`` (SoftMax.cu softmax_backward_cuda_out), and a copy of a strided output."""
    return (num_bytes(call.args[0]), *copy_if_strided(call.args[1]))


@SCRATCH.rule("_safe_softmax")
def safe_softmax(call: Call) -> tuple[int, ...]:
    """Booleans of -inf scores and of rows of -inf alone (SoftMax.cpp ``_safe_softmax``)."""
    x, dim = call.args[0], call.args[1]
    return (*copy_if_strided(x), x.numel(), x.numel() // max(1, x.shape[dim]))


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


@SCRATCH.rule("_foreach_norm", "_foreach_powsum")
def foreach_norm(call: Call) -> tuple[int, ...]:
    """Partial norms, ``output_per_tensor``: chunks of the largest tensor times the number of tensors.

    The slow path (orders other than 0, 1, 2 and infinity; integers) works tensor by tensor.
    """
    tensors = call.args[0]
    order = call.arg(1, "ord", 2)
    if not tensors or order not in (0, 1, 2, float("inf")) or not tensors[0].is_floating_point():
        return ()
    dtype: torch.dtype = call.arg(2, "dtype") or tensors[0].dtype
    return (_partials(tensors) * accumulate_size(dtype),)


@SCRATCH.rule("_foreach_max")
def foreach_max(call: Call) -> tuple[int, ...]:
    """Partial maxima, ``output_per_tensor``, in the tensors' dtype."""
    tensors = call.args[0]
    return (_partials(tensors) * tensors[0].element_size(),) if tensors else ()


def _partials(tensors: list[torch.Tensor]) -> int:
    return len(tensors) * max(ceil_div(t.numel(), CHUNK) for t in tensors)
