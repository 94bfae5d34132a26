"""Inductor's joint-graph passes and decompositions for CUDA, on a graph of fake CPU tensors.

AOTAutograd differentiates fake CPU tensors, because fake CUDA tensors have no backward without a GPU:

- matrix products of sizes that tensor cores do not support are padded (pad_matmul.py);
- eager attention in fp32 is not fused unless TF32 is on (``fx_passes/fuse_attention.py``);
- a batch of one product is a product (``fx_passes/joint_graph.py``, ``bmm_to_mm``);
- LayerNorm keeps mean and scale in fp32, where the CPU uses the input's dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.compile.pad_matmul import Size, should_pad
from trainfit.virtual.trace.exclusive import replaced


@contextmanager
def cuda_choices(copies: set[Size]) -> Iterator[None]:
    """Run Inductor's passes over a joint graph of CPU tensors as for CUDA.

    Args:
        copies: as ``should_pad`` takes it.
    """
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import fuse_attention, joint_graph, pad_mm

    run_passes = compile_fx.joint_graph_passes

    def passes(gm: torch.fx.GraphModule, *args: Any) -> torch.fx.GraphModule:
        # Patterns are traced on a device that is there. Outside the passes the answer would end autocast.
        with replaced(torch.cuda, "is_available", lambda: False):
            return fused(gm, *args)

    def fused(gm: torch.fx.GraphModule, *args: Any) -> torch.fx.GraphModule:
        batched_products = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
        if len(batched_products) >= 2:
            return run_passes(gm, *args)
        # Each pattern of eager attention has two batched products; making and comparing all takes half a
        # second. The other patterns are registered once, however often this is called.
        with replaced(fuse_attention, "_sfdp_init", lambda *_: None):
            try:
                return run_passes(gm, *args)
            finally:
                joint_graph.lazy_init.cache_clear()

    params_check = fuse_attention._sfdp_params_check

    def may_fuse(match: Any) -> bool:
        query = match.kwargs["query"].meta["val"]
        if query.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
            return False
        return params_check(match)

    yes = lambda *args, **kwargs: True  # noqa: E731
    with ExitStack() as stack:
        for module, name, function in (
            (pad_mm, "check_device", yes),
            (pad_mm, "has_triton", yes),
            (pad_mm, "_should_pad", partial(should_pad, copies)),
            (fuse_attention, "_sfdp_params_check", may_fuse),
            (joint_graph, "check_device", yes),  # Used by bmm_to_mm alone.
            (compile_fx, "joint_graph_passes", passes),
        ):
            stack.enter_context(replaced(module, name, function))
        yield


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decomposition table for CUDA."""
    from torch._inductor.decomposition import select_decomp_table

    return {**select_decomp_table(), torch.ops.aten.native_layer_norm.default: _layer_norm}


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``torch._refs.native_layer_norm`` without the CPU's conversion of mean and scale."""
    from torch._refs import _normalize

    first = input.ndim - len(normalized_shape)
    out, mean, rstd = _normalize(input.contiguous(), list(range(first, input.ndim)), eps)
    if weight is not None:
        out = out * weight.contiguous()
    if bias is not None:
        out = out + bias.contiguous()
    return out.to(input.dtype), mean, rstd
