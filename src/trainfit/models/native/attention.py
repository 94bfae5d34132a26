"""Causal attention in three ways: PyTorch's fused one, our kernels, and written out.

Shapes: b batch, s sequence, h heads, k key-value heads, d head_dim. Each takes ``q`` [b, h, s, d], ``k`` and ``v`` [b, k, s, d] and
an additive ``bias`` on the scores ([1, h or 1, s, s]; None: plain causal), and gives [b, h, s, d].
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.kernels.flash_attention.op import attend
from trainfit.spec.errors import InputError


def sdpa(q_bhsd: Tensor, k_bksd: Tensor, v_bksd: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's fused attention. With a bias CUDA takes the efficient backend, which has no grouped heads: repeat them."""
    groups = q_bhsd.shape[1] // k_bksd.shape[1]
    if bias is None:
        return F.scaled_dot_product_attention(q_bhsd, k_bksd, v_bksd, is_causal=True, enable_gqa=groups > 1)
    k, v = repeat_heads(k_bksd, groups), repeat_heads(v_bksd, groups)
    return F.scaled_dot_product_attention(q_bhsd, k, v, attn_mask=bias)


def own_attention(q_bhsd: Tensor, k_bksd: Tensor, v_bksd: Tensor, bias: Tensor | None) -> Tensor:
    """Our FlashAttention kernels (kernels/flash_attention/op.py), which know no scores but plain causal ones."""
    if bias is not None:
        raise InputError(
            "its kernels add nothing to the scores, which ALiBi, a sliding window or a prefix asks for",
            "use attention: sdpa, efficient or eager",
            field="attention",
            value="triton",
        )
    return attend(q_bhsd, k_bksd, v_bksd, True)


def unfused_softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension operation by operation in fp32, as hand-written programs have it."""
    x_fp32 = x.float()
    # max keeps the places of the largest for its backward; amax would keep all scores.
    exponential = torch.exp(x_fp32 - x_fp32.max(dim=-1, keepdim=True).values)
    return exponential / exponential.sum(dim=-1, keepdim=True)


def fused_softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension as one operation, in fp32."""
    return x.softmax(dim=-1, dtype=torch.float32)


SOFTMAX = {"fused": fused_softmax, "unfused": unfused_softmax}


def eager_attention(
    q_bhsd: Tensor,
    k_bksd: Tensor,
    v_bksd: Tensor,
    bias: Tensor | None,
    softmax: Callable[[Tensor], Tensor] = fused_softmax,
) -> Tensor:
    """softmax(QK^T)V written out, softmax in fp32; the [b, h, s, s] scores are real memory."""
    s, d = q_bhsd.shape[2:]
    groups = q_bhsd.shape[1] // k_bksd.shape[1]
    k, v = repeat_heads(k_bksd, groups), repeat_heads(v_bksd, groups)
    scores = q_bhsd @ k.transpose(2, 3) * (1 / math.sqrt(d))
    if bias is None:
        bias = torch.full((s, s), float("-inf"), dtype=scores.dtype, device=scores.device).triu(1)
    return softmax(scores + bias).to(v.dtype) @ v


def repeat_heads(x_bksd: Tensor, groups: int) -> Tensor:
    """Each key-value head ``groups`` times in a row: [b, k * groups, s, d]."""
    return x_bksd if groups == 1 else x_bksd.repeat_interleave(groups, dim=1)
