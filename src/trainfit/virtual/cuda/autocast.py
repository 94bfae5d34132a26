"""CUDA's autocast policy for fake CPU tensors.

The lists are those of PyTorch's aten/src/ATen/autocast_mode.h (AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE,
AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE, AT_FORALL_PROMOTE). CPU autocast differs: it keeps norms, softmax,
pow and sums in the low precision.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.cuda.thread_kernels import override, skip
from trainfit.virtual.trace.tensors import tensors_of

FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss multilabel_margin_loss multi_margin_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss
    mse_loss margin_ranking_loss soft_margin_loss triplet_margin_loss binary_cross_entropy_with_logits dist
    cdist renorm logsumexp pdist upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""".split()
FP32_OUTPUT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()
PROMOTE = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
LOWER = """
    addmv addr mv chain_matmul linalg_multi_dot einsum lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _thnn_fused_lstm_cell _thnn_fused_gru_cell _convolution convolution _scaled_dot_product_flash_attention
""".split()
"""In CUDA's low-precision list but not in the CPU's."""


def install(library: "torch.library.Library") -> None:
    """Register CUDA's policy for the CPU's autocast key, until the library is destroyed."""
    for names, policy in POLICIES:
        for name in names:
            if (op := _find(name)) is not None and has_policy(f"aten::{name}", "AutocastCUDA"):
                override(library, name, policy(op), "AutocastCPU")
    for name in _of_the_cpu_alone():
        skip(library, name, "AutocastCPU")
    # PyTorch has this policy in builds with cuDNN alone (aten/src/ATen/cudnn/AutocastRNN.cpp).
    override(library, "_cudnn_rnn", _casting(_low)(torch.ops.aten._cudnn_rnn.default), "AutocastCPU")


@cache
def _of_the_cpu_alone() -> list[str]:
    """Return the operations of aten that autocast casts on the CPU and not on CUDA."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    found = [one for one in names if has_policy(one, "AutocastCPU") and not has_policy(one, "AutocastCUDA")]
    return [name.removeprefix("aten::") for name in found]


def has_policy(name: str, key: str) -> bool:
    """Return whether an operation (``aten::name.overload``) has an autocast kernel for a key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _find(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


def _off() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    # Autocast keeps fp64 and integers.
    if isinstance(value, Tensor):
        casts = value.is_floating_point() and value.dtype not in (dtype, torch.float64)
        return value.to(dtype) if casts else value
    if isinstance(value, list | tuple):
        return [_cast(item, dtype) for item in value]
    return value


def _casting(dtype_for: Callable[[tuple[Any, ...]], torch.dtype]) -> Callable[[Any], Callable[..., Any]]:
    """Return the policy that casts an operation's arguments to the dtype that ``dtype_for`` returns."""

    def policy(op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _off():
                dtype = dtype_for(args)
                return op(
                    *_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()}
                )

        return kernel

    return policy


def _fp32_output(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    position = names.index("dtype")
    keyword_only = op._schema.arguments[position].kwarg_only

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _off():
            first = args[0]
            given = kwargs.get("dtype") if keyword_only or len(args) <= position else args[position]
            if given is not None or not (first.is_floating_point() and first.dtype != torch.float64):
                return op(*args, **kwargs)
            positional = args if keyword_only else args[:position]
            return op(*positional, **{**kwargs, "dtype": torch.float32})

    return kernel


def _norm(_: Any) -> Callable[..., Any]:
    """Return the policy of ``norm`` without a dtype: that overload with fp32."""

    def kernel(x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        with _off():
            if dim is None:
                return torch.ops.aten.norm.ScalarOpt_dtype(x, p, dtype=dtype)
            return torch.ops.aten.norm.ScalarOpt_dim_dtype(x, p, dim, keepdim, dtype=dtype)

    return kernel


def _refused(op: Any) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: combine "
            "the sigmoid with the loss by binary_cross_entropy_with_logits, or leave autocast"
        )

    return kernel


def _low(_: Any = None) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    return torch.float32 if any(t.dtype == torch.float32 for t in tensors_of(args)) else _low()


POLICIES = (
    (FP32, _casting(lambda _: torch.float32)),
    (FP32_OUTPUT, _fp32_output),
    (PROMOTE, _casting(_widest)),
    (LOWER, _casting(_low)),
    (["norm.Scalar", "norm.ScalarOpt_dim"], _norm),
    (["binary_cross_entropy"], _refused),
)
