"""Operations without matrix products: elementwise, reductions, data movement, factories. No torch here.

PyTorch tags pointwise operations, reductions and views. Others are listed by name, without the trailing
underscore of in-place variants. Operations in no list are reported.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from trainfit.catalog.collectives import kinds_by_schema

FACTORIES = frozenset(
    """
    arange bartlett_window bernoulli blackman_window cauchy _efficientzerotensor empty empty_like
    empty_permuted empty_strided exponential eye fill full full_like geometric hamming_window
    hann_window kaiser_window linspace log_normal logspace new_empty new_empty_strided new_full new_ones
    new_zeros normal normal_functional ones ones_like rand rand_like randint randint_like randn
    randn_like random randperm range scalar_tensor tril_indices triu_indices uniform zero zeros
    zeros_like
    """.split()
)
"""Write their output and read nothing."""

UNWRITTEN = frozenset("empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split())
"""Allocate without writing."""

FREE = frozenset(
    """
    alias as_strided_ as_strided _assert_async _assert_tensor_metadata detach dim equal_size
    _functional_assert_async _has_same_storage_numel is_pinned is_same_size item lift lift_fresh
    _local_scalar_dense _nnz record_stream _reshape_alias resize resize_as _resize_output set set_
    squeeze sym_numel sym_size sym_storage_offset sym_stride t transpose _unsafe_view unsqueeze _version
    """.split()
)
"""Access no elements."""

BY_ONE = frozenset({"multiply_unless_one"})
"""trainfit's scaling of the loss's gradient: the factor of a step is 1, so no element is accessed."""

MAY_COPY = frozenset({"contiguous", "reshape"})
"""Views if the layout allows it, else copies; seen in the rules of wrapper subclasses, below autograd."""

GATHERS = frozenset(
    """
    add_embedding_gradient embedding gather index index_add index_copy index_fill index_put
    _index_put_impl index_reduce index_select masked_select put scatter scatter_add scatter_reduce take
    _unsafe_index _unsafe_index_put _unsafe_masked_index
    """.split()
)
"""Access the elements that indices select; in the first argument, where nothing is returned."""

MOVES = frozenset(
    """
    alias_copy as_strided_copy as_strided_scatter block_diag cat channel_shuffle _chunk_cat clone col2im
    _conj_copy constant_pad_nd copy detach_copy diag_embed diagonal_backward diagonal_copy
    diagonal_scatter expand_copy flip _fw_primal_copy im2col lift_fresh_copy masked_scatter
    masked_scatter_backward narrow_copy _neg_view_copy _pack_padded_sequence permute_copy _pin_memory
    pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d _reshape_copy roll rot90
    select_backward select_copy select_scatter slice_backward slice_copy slice_scatter split_copy
    split_with_sizes_copy squeeze_copy _stack stack t_copy _to_copy _to_dense to_padded_tensor
    transpose_codes transpose_copy tril triu unbind_copy unfold_backward unfold_copy unsafe_split
    unsafe_split_with_sizes unsqueeze_copy values_copy view_as_complex_copy view_as_real_copy view_copy
    """.split()
)
"""Copy elements and compute nothing."""

VECTOR_WORK = frozenset(
    """
    abs adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d add
    affine_grid_generator all allclose aminmax _aminmax _amp_foreach_non_finite_check_and_unscale
    _amp_update_scale any argmax argmin avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
    batch_norm_backward _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits bincount bitwise_and
    bitwise_or bitwise_xor bucketize celu complex _conj_physical copysign count_nonzero cudnn_batch_norm
    cudnn_batch_norm_backward cummax _cummax_helper cummin _cummin_helper cumprod cumsum dequantize_nf4
    dequantize_rows diag dist div elu elu_backward _embedding_bag _embedding_bag_backward
    _embedding_bag_dense_backward _embedding_bag_forward_only embedding_dense_backward embedding_renorm eq
    equal _fft_c2c _fft_c2r _fft_r2c floor_divide _fused_dropout _fused_rms_norm _fused_rms_norm_backward ge
    gelu gelu_backward glu glu_backward grid_sampler_2d grid_sampler_2d_backward gt hardshrink hardsigmoid
    hardswish hardtanh hardtanh_backward heaviside histc histogram huber_loss huber_loss_backward _is_all_true
    _is_any_true isin isinf isnan kthvalue le leaky_relu leaky_relu_backward log_sigmoid_backward
    log_sigmoid_forward log_softmax _log_softmax _log_softmax_backward_data logcumsumexp _logcumsumexp lt
    masked_fill _masked_scale _masked_softmax _masked_softmax_backward max max_pool2d_with_indices
    max_pool2d_with_indices_backward median min mish mode mse_loss mse_loss_backward mul multinomial nanmedian
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training native_dropout native_dropout_backward native_group_norm
    native_group_norm_backward native_layer_norm native_layer_norm_backward ne nll_loss2d_backward
    nll_loss2d_forward nll_loss_backward nll_loss_forward nonzero nonzero_static norm poisson polar
    _prelu_kernel _prelu_kernel_backward prod quantize_blocks reflection_pad1d_backward
    reflection_pad2d_backward relu remainder renorm replication_pad1d_backward replication_pad2d_backward
    rrelu_with_noise rrelu_with_noise_backward rsub _safe_softmax searchsorted segment_reduce smooth_l1_loss
    smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward softmax _softmax _softmax_backward_data
    softplus softplus_backward sort std_mean sub sum threshold threshold_backward topk trace _unique _unique2
    unique_consecutive unique_dim unique_dim_consecutive _unsafe_masked_index_put_accumulate
    upsample_bicubic2d _upsample_bicubic2d_aa upsample_bicubic2d_backward upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_bilinear2d_backward upsample_linear1d upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d
    upsample_trilinear3d var_mean _weight_norm_interface _weight_norm_interface_backward where xlogy __and__
    __or__ __xor__
    """.split()
)
"""Elementwise work, reductions, norms, losses, pooling, sorting: their FLOPs are not counted."""

CHANNELS_LAST = "channels last"
"""Layout of a convolution or group norm whose input is stored channels last, as tensor cores read it."""
POINTWISE = "pointwise"
"""Layout of a convolution by filters of one point whose input is not stored channels last."""

HOST_COPIES = frozenset({"copy_to_host", "copy_to_device"})
"""Copies between the GPU and pinned host memory (offload/copies.py)."""

COPY_DIRECTIONS = {"trainfit.copy_to_host_.default": "out", "trainfit.copy_to_device_.default": "in"}
"""Name in a ledger -> direction of the copy; each direction has its own bandwidth."""

LIKE = frozenset(
    {"dequantize_nf4", "dequantize_rows", "fp8_cast_transposed", "rms_norm_fp8_transposed", "transpose_codes"}
)
"""trainfit's operations whose first argument only gives a dtype, or an order to a compiler."""

LIBRARY_UPDATES = frozenset({"optimizer_update_8bit_blockwise", "optimizer_update_32bit"})
"""Updates of bitsandbytes' optimizers."""

MOVED_ONCE: dict[str, tuple[int, ...]] = {
    "adamw_master": (0,), "fp8_cast": (2, 3), "optimizer_update_8bit_blockwise": (1, 12, 13),
    "optimizer_update_32bit": (1,),
}  # fmt: skip
"""Operations in place -> positions of arguments that their schema says are written, and that are only written
(bf16 weights with master weights), or only read (gradients, tables of codes)."""

OWN_VECTOR_WORK = frozenset(
    """
    adafactor_apply adafactor_squares adafactor_update_squares adamw adamw_coded adamw_master
    add_rms_norm_amax add_rounded cross_entropy fp8_cast_both fp8_cast_rows fp8_cast_transposed
    multiply_unless_one own_rms_norm own_rms_norm_backward rms_norm_amax rms_norm_backward_add
    rms_norm_fp8_rows rms_norm_fp8_transposed rotate_pairs sample_tokens split_rotated
    split_rotated_backward swiglu swiglu_backward
    """.split()
)
"""trainfit's kernels without matrix products."""

LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
ELSEWHERE = (
    "prim::", "profiler::", "c10d::", "_c10d_functional::", "c10d_functional::",
    "_c10d_functional_autograd::", "fsdp::",
)  # fmt: skip
"""Namespaces of collectives, which are modelled separately, and of queries."""
TAGS = ("pointwise", "reduction", "view_copy")


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call that the operation writes into: tensors or lists of them."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if value is not None:
                found.append(value)
    return found


@lru_cache(maxsize=4096)
def base_name(func: Any) -> str:
    """Return ``add`` for ``aten::add_.Tensor``: no namespace, overload and trailing underscore."""
    name = func._schema.name.partition("::")[2]
    return name if name.endswith("__") else name.rstrip("_") or name


_NO_MATRIX_WORK = (
    FACTORIES | FREE | GATHERS | MOVES | VECTOR_WORK | HOST_COPIES | OWN_VECTOR_WORK | LIBRARY_UPDATES
)


def is_elsewhere(func: Any) -> bool:
    """Return whether an operation is a collective, which is modelled separately, or a query."""
    return func._schema.name.startswith(ELSEWHERE) or func._schema.name in kinds_by_schema()


@lru_cache(maxsize=4096)
def does_no_matrix_work(func: Any) -> bool:
    """Return whether an operation is known to multiply no matrices."""
    name = base_name(func)
    if func.is_view or name in _NO_MATRIX_WORK:
        return True
    if name.startswith(LISTS) or is_elsewhere(func):
        return True
    return any(tag.name in TAGS for tag in func.tags)
