"""The kernel, head size, sequence length and mask of an attention operation, for step times. No torch
here."""

from typing import Any, NamedTuple

from trainfit.spec.hardware import Gpu

PYTORCHS = ("cudnn", "flash", "efficient")
MASKS = ("attn_bias", "bias", "attn_mask")  # Arguments of PyTorch's operations that are added to the scores
HEADS_FIRST = ("aten::_scaled_dot_product_", "trainfit::")
"""Operations on tensors [batch, heads, seq, head_dim]; others have [batch, seq, heads, head_dim]."""


class AttentionKernel(NamedTuple):
    """An attention kernel; empty for other operations."""

    kernel: str = ""
    head: int = 0
    seq: int = 0
    masked: bool = False


def attention_kernel(
    func: Any, args: Any, kwargs: Any, capability: tuple[int, int] | None
) -> AttentionKernel:
    """Return the kernel of a call on a GPU of this capability; empty on a CPU (None)."""
    name = func._schema.name
    if capability is None or "_attention" not in name:
        return AttentionKernel()
    own = getattr(func, "kernel", None)
    if own is not None:
        kernel = own(*args, **kwargs, capability=capability)
    else:
        kernel = next((each for each in PYTORCHS if f"_{each}_attention" in name), "")
    if not kernel:
        return AttentionKernel()
    query = args[1 if "backward" in name else 0]
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    return AttentionKernel(
        kernel,
        query.shape[-1],
        query.shape[2] if name.startswith(HEADS_FIRST) else query.shape[-3],
        any(given.get(each) is not None for each in MASKS),
    )


def prefers_cudnn(gpu: Gpu) -> bool:
    """Return whether SDPA tries cuDNN first on this GPU (check_prefer_cudnn_attention in sdp_utils.cpp)."""
    return gpu.compute_capability is not None and gpu.compute_capability[0] in (9, 10)
