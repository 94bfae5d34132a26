"""Scratch of embedding and indexing; their gradients sort the indices so that equal ones are added in order.

Sources: aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu, Indexing.cu.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.cuda.scratch.call import SCRATCH, Call, ceil_div, copy_if_strided, num_bytes

FEW_INDICES = 3072
ROWS_PER_THREAD = 10
SCALAR = 8
MASKS = (torch.bool, torch.uint8)
IN_PLACE = ("aten::index_put_", "aten::_index_put_impl_")


@SCRATCH.rule("embedding_dense_backward")
def embedding_backward(call: Call) -> tuple[int, ...]:
    """Copies of strided inputs; for over 3072 indices also sorted indices, segments and fp32 partial sums."""
    grad, indices, num_weights, _, by_frequency = call.args
    copies = copy_if_strided(indices, grad)
    count = indices.numel()
    if count <= FEW_INDICES and not by_frequency:
        return copies
    item, width = indices.element_size(), grad.shape[-1]
    segments = min(count, int(num_weights))
    partials = count // ROWS_PER_THREAD + segments
    partial_item = 4 if grad.element_size() == 2 else grad.element_size()
    counts = (count * item,) if by_frequency else ()
    return (
        *copies,
        count * item, count * item, *counts,  # sorted_indices, orig_indices, count
        count * item, SCALAR,  # segment_offsets, num_of_segments
        segments * item, segments * item, SCALAR,  # partials_per_segment, offsets, num_of_partial_segments
        partials * item, partials * width * partial_item,  # partial_segment_offset, grad_weight_per_segment
    )  # fmt: skip


@SCRATCH.rule("index_put_", "index_put", "_index_put_impl_", "_unsafe_index_put")
def index_put(call: Call) -> tuple[int, ...]:
    """Index tensors of masks; accumulating sorts indices (``index_put_with_sort_kernel``), with copies."""
    target, indices, values = call.args[:3]
    if not call.arg(3, "accumulate", False):
        # One value under a mask is a masked fill (canDispatchToMaskedFill).
        named = [t for t in indices if t is not None]
        is_fill = values.numel() == 1 and len(named) == 1 and named[0].dtype in MASKS
        return () if is_fill else masks_to_indices(indices)
    reached = slice_elements(target, indices)
    masked = any(t is not None and t.dtype in MASKS for t in indices)
    # The number of elements that a mask selects follows from the values.
    shapes = (t.shape for t in indices if t is not None)
    count = values.numel() // max(1, reached) if masked else prod(torch.broadcast_shapes(*shapes))
    copies = copy_if_strided(target) if call.name in IN_PLACE else ()
    if values.numel() < count * reached or not values.is_contiguous():
        copies = (*copies, count * reached * values.element_size())
    return (*masks_to_indices(indices), *copies, *(count * 8,) * 4, count * 16)


@SCRATCH.rule("index", "_unsafe_index")
def index(call: Call) -> tuple[int, ...]:
    """Int64 copies of int32 indices, and index tensors of masks."""
    source, indices = call.args[:2]
    selected = call.out.numel() // max(1, slice_elements(source, indices))
    masks = sum(t.dim() for t in indices if t is not None and t.dtype in MASKS)
    narrow = tuple(num_bytes(t, 8) for t in indices if t is not None and t.dtype == torch.int32)
    return (*narrow, selected * masks * 8) if masks else narrow


@SCRATCH.rule("masked_select")
def masked_select(call: Call) -> tuple[int, ...]:
    """One int64 index tensor per dimension for the mask."""
    return (call.out.numel() * 8 * max(call.args[0].dim(), call.args[1].dim()),)


@SCRATCH.rule("masked_scatter", "masked_scatter_")
def masked_scatter(call: Call) -> tuple[int, ...]:
    """The int64 prefix sum of the mask (``maskPrefixSum``)."""
    return (call.args[0].numel() * 8,)


def masks_to_indices(indices: Any) -> tuple[int, ...]:
    """Return the bytes of masks' index tensors, int64 per dimension, as if all elements were selected."""
    return tuple(num_bytes(t, 8) * t.dim() for t in indices if t is not None and t.dtype in MASKS)


def slice_elements(target: Tensor, indices: Any) -> int:
    """Return the elements of the target per index: those of its dimensions without an index tensor."""
    left, d = 1, 0
    for t in (*indices, *[None] * target.dim()):
        width = t.dim() if t is not None and t.dtype in MASKS else 1
        if t is None and d < target.dim():
            left *= target.shape[d]
        d += width
    return left


@SCRATCH.rule("nonzero")
def nonzero(call: Call) -> tuple[int, ...]:
    """The device's count (Nonzero.cu), and a copy of a strided input."""
    return (*copy_if_strided(call.args[0]), 4 * ceil_div(call.args[0].numel(), 1 << 30))
