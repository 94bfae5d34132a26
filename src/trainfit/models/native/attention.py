"""Causal attention by PyTorch's SDPA, by trainfit's kernels, and with all scores in memory.

Shapes: b batch, s sequence, h heads, k key-value heads, d head_dim. Each function takes ``q`` [b, h, s, d],
``k`` and ``v`` [b, k, s, d] and an additive ``bias`` of the scores ([1, h or 1, s, s]; None: plain causal)
and returns [b, h, s, d].
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.kernels.flash_attention.op import attend
from trainfit.spec.errors import InputError


def sdpa(q_bhsd: Tensor, k_bksd: Tensor, v_bksd: Tensor, bias: Tensor | None) -> Tensor:
    """Call SDPA; with a bias heads are repeated, because the efficient backend has no grouped heads."""
    groups = q_bhsd.shape[1] // k_bksd.shape[1]
    if bias is None:
        return F.scaled_dot_product_attention(q_bhsd, k_bksd, v_bksd, is_causal=True, enable_gqa=groups > 1)
    k, v = repeat_heads(k_bksd, groups), repeat_heads(v_bksd, groups)
    return F.scaled_dot_product_attention(q_bhsd, k, v, attn_mask=bias)


def own_attention(
    q_bhsd: Tensor,
    k_bksd: Tensor,
    v_bksd: Tensor,
    bias: Tensor | None,
    attend: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = attend,
) -> Tensor:
    """Call trainfit's FlashAttention kernels, which support plain causal attention only."""
    if bias is not None:
        problem = "its kernels add no bias to the scores, which ALiBi, a sliding window or a prefix needs"
        remedy = "use attention: sdpa, efficient or eager"
        raise InputError(problem, remedy, field="attention", value="triton")
    return attend(q_bhsd, k_bksd, v_bksd, True)


def unfused_softmax(x: Tensor) -> Tensor:
    """Compute softmax over the last dimension in fp32 as separate operations."""
    x_fp32 = x.float()
    # The backward of max saves indices; that of amax would save all scores.
    exponential = torch.exp(x_fp32 - x_fp32.max(dim=-1, keepdim=True).values)
    return exponential / exponential.sum(dim=-1, keepdim=True)


def fused_softmax(x: Tensor) -> Tensor:
    """Compute softmax over the last dimension in fp32 as one operation."""
    return x.softmax(dim=-1, dtype=torch.float32)


SOFTMAX = {"fused": fused_softmax, "unfused": unfused_softmax}


def eager_attention(
    q_bhsd: Tensor,
    k_bksd: Tensor,
    v_bksd: Tensor,
    bias: Tensor | None,
    softmax: Callable[[Tensor], Tensor] = fused_softmax,
) -> Tensor:
    """Compute softmax(QK^T)V with all [b, h, s, s] scores in memory, softmax in fp32."""
    s, d = q_bhsd.shape[2:]
    groups = q_bhsd.shape[1] // k_bksd.shape[1]
    k, v = repeat_heads(k_bksd, groups), repeat_heads(v_bksd, groups)
    scores = q_bhsd @ k.transpose(2, 3) * (1 / math.sqrt(d))
    if bias is None:
        bias = torch.full((s, s), float("-inf"), dtype=scores.dtype, device=scores.device).triu(1)
    return softmax(scores + bias).to(v.dtype) @ v


def repeat_heads(x_bksd: Tensor, groups: int) -> Tensor:
    """Repeat each key-value head ``groups`` times: [b, k * groups, s, d]."""
    return x_bksd if groups == 1 else x_bksd.repeat_interleave(groups, dim=1)
