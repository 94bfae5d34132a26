"""What Inductor decides for CUDA while the graph, forward and backward in one, is still on the CPU.

AOTAutograd differentiates fake CPU tensors (fake CUDA tensors have no backward without a GPU), and Inductor's passes
over the joint graph look at their device. ``cuda_choices`` makes them choose as on CUDA, ``decompositions`` falls apart
what CUDA's operations fall apart into:

- matrix products whose sizes the tensor cores cannot take are padded (padded_products.py);
- attention in fp32 written out is left so, unless TF32 is on (``fx_passes/fuse_attention.py``);
- a batch of one product is a product (``fx_passes/joint_graph.py``, ``bmm_to_mm``);
- LayerNorm keeps its mean and scale in fp32, where the CPU keeps them in the input's dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.compile.pad_matmul import should_pad
from trainfit.virtual.trace.exclusive import replaced


@contextmanager
def cuda_choices() -> Iterator[None]:
    """Inductor's passes over a joint graph of CPU tensors choose as for CUDA."""
    from torch._inductor.fx_passes import fuse_attention, joint_graph, pad_mm

    params_check = fuse_attention._sfdp_params_check

    def may_fuse(match: Any) -> bool:
        query = match.kwargs["query"].meta["val"]
        if query.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
            return False
        return params_check(match)

    yes = lambda *args, **kwargs: True  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(replaced(pad_mm, "check_device", yes))
        stack.enter_context(replaced(pad_mm, "has_triton", yes))
        stack.enter_context(replaced(pad_mm, "_should_pad", should_pad))
        stack.enter_context(replaced(fuse_attention, "_sfdp_params_check", may_fuse))
        # Only bmm_to_mm asks it.
        stack.enter_context(replaced(joint_graph, "check_device", yes))
        yield


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table, as it is for CUDA."""
    from torch._inductor.decomposition import select_decomp_table

    return {**select_decomp_table(), torch.ops.aten.native_layer_norm.default: _layer_norm}


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch._refs.native_layer_norm`` without its last lines, which convert mean and scale on a CPU."""
    from torch._refs import _normalize

    first = input.ndim - len(normalized_shape)
    out, mean, rstd = _normalize(input.contiguous(), list(range(first, input.ndim)), eps)
    if weight is not None:
        out = out * weight.contiguous()
    if bias is not None:
        out = out + bias.contiguous()
    return out.to(input.dtype), mean, rstd
