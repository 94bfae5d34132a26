"""CUDA's choice of SDPA backend, run on fake tensors so that autograd saves the same tensors as on CUDA.

The rules are those of PyTorch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, with the switches of
``torch.nn.attention.sdpa_kernel``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainfit.spec.errors import InputError

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Query:
    """Arguments of SDPA; q, k, v are [batch, heads, seq, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    gqa: bool

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.q, self.k, self.v))

    @property
    def heads_match(self) -> bool:
        return self.q.shape[1] == self.k.shape[1] == self.v.shape[1]


def choose_backend(query: Query, capability: tuple[int, int], prefers_cudnn: bool) -> str:
    """Return the first of PyTorch's backends that can run: cudnn, flash, efficient or math.

    Args:
        prefers_cudnn: cuDNN is first (Hopper and datacentre Blackwell).
    Raises:
        InputError: no enabled backend can run it.
    """
    order = ("flash", "efficient", "math")
    order = ("cudnn", *order) if prefers_cudnn else (*order, "cudnn")
    allowed = {
        "flash": torch.backends.cuda.flash_sdp_enabled() and _flash_can(query, capability),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled() and _efficient_can(query, capability),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled() and _cudnn_can(query, capability),
    }
    for backend in order:
        if allowed[backend]:
            return backend
    kind = f"{str(query.q.dtype).removeprefix('torch.')}, head size {query.q.shape[-1]}"
    kind += ", a mask" if query.mask is not None else ""
    kind += "" if query.heads_match else ", grouped key heads"
    kind += ", with deterministic algorithms" if _must_repeat() else ""
    raise InputError(
        f"the enabled SDPA backends have no kernel for {kind}",
        "use attention: sdpa or math"
        + (", or no deterministic algorithms (--no-deterministic)" if _must_repeat() else ""),
        field="attention",
    )


def _common(query: Query) -> bool:
    q, k, v = query.q, query.k, query.v
    return (
        q.dim() == k.dim() == v.dim() == 4
        and q.shape[0] == k.shape[0] == v.shape[0]
        and 0 not in (q.shape[2], k.shape[2])
    )


def _unit_stride(query: Query) -> bool:
    # check_last_dim_stride_equals_1_dense: T5's mask, a bias with heads innermost, falls back to math.
    if query.mask is not None and query.mask.stride(-1) != 1:
        return False
    return all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (query.q, query.k, query.v))


def _heads_fit(query: Query, gqa: bool) -> bool:
    q, k, v = query.q, query.k, query.v
    grouped = gqa and query.gqa and k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    return query.heads_match or grouped


def _flash_can(query: Query, capability: tuple[int, int]) -> bool:
    q, k, v = query.q, query.k, query.v
    if capability < (8, 0) or query.mask is not None or q.dtype not in HALVES or not _common(query):
        return False
    dims_fit = q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    if not dims_fit or not _heads_fit(query, True) or not _unit_stride(query):
        return False
    consumer = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    if consumer and query.trains and q.shape[-1] > 192 and (query.dropout > 0 or q.shape[-1] <= 224):
        return False
    return not (query.causal and q.shape[2] != k.shape[2])


def _efficient_can(query: Query, capability: tuple[int, int]) -> bool:
    q, k, v = query.q, query.k, query.v
    dtypes = {torch.float16, torch.float32} | ({torch.bfloat16} if capability >= (8, 0) else set())
    if q.dtype not in dtypes or not _common(query) or not _unit_stride(query) or not _heads_fit(query, False):
        return False
    half = q.dtype in HALVES
    alignment = max(4 if capability >= (8, 0) else 1, 1)
    if capability >= (8, 0) or (capability >= (7, 0) and half):
        alignment = max(alignment, 8 if half else 4)
    return q.shape[-1] == k.shape[-1] and q.shape[-1] % alignment == 0 and v.shape[-1] % alignment == 0


def _must_repeat() -> bool:
    """Return whether operations without a deterministic implementation are refused, not only warned of."""
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not warns_only


def _cudnn_can(query: Query, capability: tuple[int, int]) -> bool:
    q, k, v = query.q, query.k, query.v
    if _must_repeat():  # check_cudnn_deterministic: even for a forward alone
        return False
    if capability < (8, 0) or q.dtype not in HALVES or not _common(query) or not _heads_fit(query, True):
        return False
    if query.mask is not None and query.mask.requires_grad:
        return False
    if not _unit_stride(query):
        return False
    # Measured on an H200, torch 2.11, cuDNN 9.1x: head size 256 (Gemma) and dropout (GPT-2) run through
    # cuDNN.
    limit = 256 if capability[0] in (9, 10) else 128
    dims_fit = q.shape[-1] <= limit and v.shape[-1] <= limit and q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0
    return dims_fit and k.shape[2] != 1 and not (query.dropout and q.shape[2] == 1)


def attend(query: Query, backend: str, scale: float | None) -> Tensor:
    """Run the backend's operation and return the output, of q's shape with v's head_dim."""
    q, k, v = query.q, query.k, query.v
    if backend == "flash":
        return _flash(query, scale)
    if backend == "efficient":
        return _efficient(query, scale)
    if backend == "cudnn":
        mask = _float_mask(query.mask, q.dtype)
        out = aten._scaled_dot_product_cudnn_attention(
            q, k, v, mask, query.trains, query.dropout, query.causal, False, scale=scale
        )
        return out[0]
    return _math(query, scale)[0]


def _math(query: Query, scale: float | None) -> tuple[Tensor, Tensor]:
    """Run ``_scaled_dot_product_attention_math`` (attention.cpp), which adds the mask in place.

    Its C++ locals live until it returns, its unused second result a little longer.
    """
    query_acc, key_acc, value_acc = query.q, query.k, query.v
    dtype = query_acc.dtype
    if dtype in HALVES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query_acc, key_acc, value_acc = query_acc.float(), key_acc.float(), value_acc.float()
    factor = (query_acc.shape[-1] ** -0.5 if scale is None else abs(scale)) ** 0.5
    q = query_acc * (factor if scale is None or scale >= 0 else -factor)
    mask = _float_mask(query.mask, dtype)
    if query.causal:
        ones = torch.ones(q.shape[-2], key_acc.shape[-2], dtype=torch.bool, device=q.device)
        mask = _float_mask(ones.tril(), q.dtype)
    k, v = key_acc, value_acc
    if query.gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    weights = q @ (k.transpose(-2, -1) * factor)
    if mask is not None:
        weights.add_(mask)
    weights = aten._safe_softmax(weights, -1)
    if query.dropout > 0:
        weights = torch.dropout(weights, query.dropout, True)
    second = weights.to(dtype)  # First: the order in which CUDA builds evaluate the two results.
    return (weights @ v).to(dtype), second


def _flash(query: Query, scale: float | None) -> Tensor:
    # PyTorch pads head sizes to multiples of 8 and slices the output.
    q, k, v = query.q, query.k, query.v
    dim = q.shape[-1]
    scale = dim**-0.5 if scale is None else scale
    pad = -dim % 8
    if pad:
        q, k, v = (torch.nn.functional.pad(t, (0, pad)) for t in (q, k, v))
    flash = aten._scaled_dot_product_flash_attention
    out = flash(q, k, v, query.dropout, query.causal, False, scale=scale)[0]
    return out[..., :dim] if pad else out


def _efficient(query: Query, scale: float | None) -> Tensor:
    q, k, v = query.q, query.k, query.v
    mask = _float_mask(query.mask, q.dtype)
    if mask is not None:
        mask = _aligned_bias(mask, q, k)
    trains = query.trains or (mask is not None and mask.requires_grad and torch.is_grad_enabled())
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, trains, query.dropout, query.causal, scale=scale
    )[0]


def _float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a boolean mask to an additive one of the query's dtype."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))


def _aligned_bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    # PyTorch pads the last dimension to a multiple of 16, slices it and expands.
    pad = -mask.shape[-1] % 16
    if pad:
        mask = torch.nn.functional.pad(mask, (0, pad))[..., : k.shape[2]]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
