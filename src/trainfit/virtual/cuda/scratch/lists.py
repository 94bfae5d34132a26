"""Scratch of foreach operations; in-place ones and fused optimizers take none.

Sources: aten/src/ATen/native/cuda/ForeachReduceOp.cu, MultiTensorApply.cuh; AmpKernels.cu (no scratch).
"""

import torch

from trainfit.virtual.cuda.scratch.call import Call, Registry, accumulate_size, ceil_div

SCRATCH: Registry[tuple[int, ...]] = Registry()
CHUNK = 65536
"""Elements per block (kChunkSize)."""


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
