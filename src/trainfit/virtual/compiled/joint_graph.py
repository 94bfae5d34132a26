"""What Inductor decides for CUDA while the graph, forward and backward in one, is still on the CPU.

AOTAutograd differentiates fake CPU tensors (fake CUDA tensors have no backward without a GPU), and Inductor's passes
over the joint graph look at their device. ``cuda_choices`` makes them choose as on CUDA:

- matrix products whose sizes the tensor cores cannot take are padded (``fx_passes/pad_mm.py``). On a GPU a benchmark
  decides; here the rule is that of ``is_mm_compute_bound``, for 16-bit products, where an unaligned size costs most.
- attention in fp32 written out is left so, unless TF32 is on (``fx_passes/fuse_attention.py``).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trainfit.virtual.compiled.cuda_device import replaced

MACHINE_BALANCE = 100
"""Half the multiply-adds a GPU does in 16 bits while it reads one byte: pad_mm's threshold, 78 on A100, 103 on H200,
148 on H100 by their data sheets."""


@contextmanager
def cuda_choices() -> Iterator[None]:
    """Inductor's passes over a joint graph of CPU tensors choose as for CUDA."""
    from torch._inductor.fx_passes import fuse_attention, pad_mm

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
        stack.enter_context(replaced(pad_mm, "_should_pad", _should_pad))
        stack.enter_context(replaced(fuse_attention, "_sfdp_params_check", may_fuse))
        yield


def _should_pad(match: Any, mat1: torch.Tensor, mat2: torch.Tensor, op: Any, input: Any = None) -> bool:
    if mat1.dtype not in (torch.float16, torch.bfloat16):
        return False
    m, k, n = mat1.shape[-2], mat1.shape[-1], mat2.shape[-1]
    return m * k * n > MACHINE_BALANCE * (m * k + k * n + m * n)
