"""cuDNN's backward after our forward, for heads of 256, where it is faster than our three passes.

It reads what our forward saves: the output, and the log-sum-exp in fp32 as natural logarithms. Source:
PyTorch's aten/src/ATen/native/cudnn/MHA.cpp.
"""

import torch
from torch import Tensor


def supports_cudnn(q: Tensor, k: Tensor, is_causal: bool) -> bool:
    """Return whether it masks as our kernels do, and the user and determinism allow it.

    cuDNN aligns a causal mask with the first keys, ours with the last, which is the same for equal lengths.
    """
    equal = q.shape[2] == k.shape[2]
    repeats = torch.are_deterministic_algorithms_enabled()
    return (
        (equal or not is_causal)
        and k.shape[2] > 1
        and not repeats
        and torch.backends.cuda.cudnn_sdp_enabled()
    )


def cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. The order of its additions varies, so their last bits do."""
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))  # Of no dropout
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        gradient, q, k, v, out, lse[..., None], seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0,
        is_causal, scale=scale,
    )  # fmt: skip
