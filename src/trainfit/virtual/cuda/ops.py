"""CUDA's decompositions of composite operations (attention, dropout, norms, softmax) for fake CPU tensors.

PyTorch decomposes them in C++ by device, and fake tensors are CPU tensors. These overrides of the
dispatcher's kernels hold while a virtual GPU is entered, for the tracing thread alone (thread_kernels.py).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.cuda import autocast, recurrent
from trainfit.virtual.cuda.attention_backend import Query, attend, choose_backend
from trainfit.virtual.cuda.thread_kernels import override
from trainfit.virtual.trace.exclusive import exclusive

aten = torch.ops.aten


@contextmanager
def cuda_ops(capability: tuple[int, int], prefers_cudnn: bool) -> Iterator[None]:
    """Decompose composite operations on CPU tensors as on a CUDA GPU of this compute capability."""
    with exclusive():
        library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                # PyTorch warns of every replaced kernel.
                warnings.simplefilter("ignore", UserWarning)
                _install(library, capability, prefers_cudnn)
            _forget_kernels(tuple(library._op_impls))
            yield
        finally:
            replaced = tuple(library._op_impls)
            library._destroy()
            _forget_kernels(replaced)


def _forget_kernels(replaced: tuple[str, ...]) -> None:
    """Clear the Python dispatcher's cache for operations such as "aten/softmax.int/AutogradCPU"."""
    for key in replaced:
        name, _, overload = key.split("/")[1].partition(".")
        getattr(getattr(aten, name), overload or "default")._dispatch_cache.clear()


def _install(library: Any, capability: tuple[int, int], prefers_cudnn: bool) -> None:
    _override(library, "scaled_dot_product_attention", _attention(capability, prefers_cudnn))
    _override(library, "dropout", _dropout)
    _override(library, "linear", _linear)
    _override(library, "softmax.int", _softmax(aten._softmax))
    _override(library, "log_softmax.int", _softmax(aten._log_softmax))
    if hasattr(aten, "_fused_rms_norm"):
        _override(library, "rms_norm", _rms_norm)
    for name, kernel in recurrent.kernels().items():
        _override(library, name, kernel)
    autocast.install(library)


def _override(library: Any, name: str, kernel: Callable[..., Any]) -> None:
    # A composite operation is replaced by an autograd kernel that calls other differentiable operations.
    override(library, name, kernel, "AutogradCPU")


def _attention(capability: tuple[int, int], prefers_cudnn: bool) -> Callable[..., Tensor]:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        query = Query(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
        return attend(query, choose_backend(query, capability, prefers_cudnn), scale)

    return kernel


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    # CUDA's dropout keeps a boolean mask; the CPU's keeps one of the input's dtype.
    if p == 0 or not train or x.numel() == 0:
        return x
    return aten.native_dropout(x, p, train)[0]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # aten/src/ATen/native/Linear.cpp; for subclasses PyTorch adds the bias out of place.
    if bias is not None and x.dim() == 2:
        return aten.addmm(bias, x, weight.t())
    if bias is not None and x.dim() == 3 and x.is_contiguous():
        return aten.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], -1)
    out = aten.matmul(x, weight.t())
    return out if bias is None else out.add_(bias)


def _softmax(op: Any) -> Callable[..., Tensor]:
    def kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        # CUDA fuses the conversion from fp16 to fp32 alone.
        if x.dtype == torch.float16 and dtype == torch.float32:
            return op(x, dim, True)
        return op(x if dtype is None else x.to(dtype), dim, False)

    return kernel


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    # CUDA runs one kernel, unless the weight has another dtype (bf16 queries under autocast, before torch's
    # autocast ran rms_norm in fp32).
    if weight is not None and weight.dtype != x.dtype:
        return _rms_norm_in_steps(x, shape, weight, eps)
    return FusedRmsNorm.apply(x, list(shape), weight, eps)


def _rms_norm_in_steps(x: Tensor, shape: list[int], weight: Tensor, eps: float | None) -> Tensor:
    """Decompose as ``rms_norm_composite`` of PyTorch's aten/src/ATen/native/layer_norm.cpp."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    dims = [x.dim() - 1 - index for index in range(len(shape))]
    mean = wide.pow(2).mean(dims, keepdim=True)
    scale = mean.add_(torch.finfo(wide.dtype).eps if eps is None else eps).rsqrt()
    return wide.mul(scale).mul(weight).contiguous().type_as(x)


class FusedRmsNorm(torch.autograd.Function):
    """``aten::_fused_rms_norm`` with CUDA's backward (derivatives.yaml), which CPU tensors do not reach."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        grad_x, grad_weight = aten._fused_rms_norm_backward.default(
            grads[0], x, ctx.shape, rstd, weight, wanted
        )
        return grad_x, None, grad_weight if wanted[1] else None, None
