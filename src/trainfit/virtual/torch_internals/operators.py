"""PyTorch's private operators whose arguments, results or layouts decide bytes and FLOPs."""

from trainfit.spec.private_names import entry
from trainfit.virtual.torch_internals import calls

# fmt: off
OPERATORS = (
    entry(
        "torch:ops.aten._scaled_dot_product_flash_attention", "tensors saved by attention",
        "default(query, key, value, dropout_p=, is_causal=, return_debug_mask=, scale=) -> 9; "
        "quantized(query, key, value, q_descale, k_descale, v_descale, dropout_p=, is_causal=, "
        "return_debug_mask=, scale=) -> 9",
        call=calls.flash, result=[(1, 2, 96, 64), (1, 2, 96), (2,), (), (0,)],
    ),
    entry(
        "torch:ops.aten._scaled_dot_product_flash_attention_backward", "scratch of attention's backward",
        "default(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, "
        "dropout_p, is_causal, philox_seed, philox_offset, scale=) -> 3",
    ),
    entry(
        "torch:ops.aten._scaled_dot_product_efficient_attention", "tensors saved by attention",
        "default(query, key, value, attn_bias, compute_log_sumexp, dropout_p=, is_causal=, scale=) -> 4",
        call=calls.biased, result=[(1, 2, 96, 64), (1, 2, 96), (), ()],
    ),
    entry(
        "torch:ops.aten._scaled_dot_product_efficient_attention_backward", "scratch of attention's backward",
        "default(grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset,"
        " dropout_p, grad_input_mask, is_causal=, scale=) -> 4",
    ),
    entry(
        "torch:ops.aten._scaled_dot_product_cudnn_attention", "tensors saved by attention",
        "default(query, key, value, attn_bias, compute_log_sumexp, dropout_p=, is_causal=, "
        "return_debug_mask=, scale=) -> 9",
        call=calls.biased, result=[(1, 2, 96, 64), (1, 2, 96, 1), (), ()],
    ),
    entry(
        "torch:ops.aten._scaled_dot_product_cudnn_attention_backward", "scratch of attention's backward",
        "default(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, "
        "cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale=) -> 3",
    ),
    entry(
        "torch:ops.aten._softmax", "softmax as on CUDA", "default(self, dim, half_to_float) -> 1",
        call=calls.softmax, result=["torch.float32", "torch.bfloat16"],
    ),
    entry(
        "torch:ops.aten._softmax_backward_data", "scratch of softmax",
        "default(grad_output, output, dim, input_dtype) -> 1",
    ),
    entry(
        "torch:ops.aten._log_softmax", "softmax as on CUDA", "default(self, dim, half_to_float) -> 1",
        call=calls.softmax, result=["torch.float32", "torch.bfloat16"],
    ),
    entry(
        "torch:ops.aten._log_softmax_backward_data", "scratch of softmax",
        "default(grad_output, output, dim, input_dtype) -> 1",
    ),
    entry("torch:ops.aten._safe_softmax", "softmax of eager attention", "default(self, dim, dtype=) -> 1"),
    entry(
        "torch:ops.aten._fused_rms_norm", "RMSNorm as on CUDA",
        "default(input, normalized_shape, weight, eps) -> 2", call=calls.rms_norm,
        result=[("torch.bfloat16", (2, 4)), ("torch.float32", (2, 1))],
    ),
    entry(
        "torch:ops.aten._fused_rms_norm_backward", "RMSNorm as on CUDA",
        "default(grad_out, input, normalized_shape, rstd, weight, output_mask) -> 2",
    ),
    entry(
        "torch:ops.aten._addmm_activation", "FLOPs and workspaces of matrix products",
        "default(self, mat1, mat2, beta=, alpha=, use_gelu=) -> 1",
    ),
    entry(
        "torch:ops.aten._scaled_mm", "FLOPs and workspaces of fp8 products",
        "default(self, mat2, scale_a, scale_b, bias=, scale_result=, out_dtype=, use_fast_accum=) -> 1",
    ),
    entry(
        "torch:ops.aten._scaled_mm_v2", "FLOPs and workspaces of fp8 products",
        "default(self, mat2, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, "
        "out_dtype, contraction_dim=, use_fast_accum=) -> 1",
    ),
    entry(
        "torch:ops.aten._grouped_mm", "FLOPs of the products of experts",
        "default(self, mat2, offs=, bias=, out_dtype=) -> 1",
    ),
    entry(
        "torch:ops.aten._scaled_grouped_mm", "FLOPs of the products of experts",
        "default(self, mat2, scale_a, scale_b, offs=, bias=, scale_result=, out_dtype=, "
        "use_fast_accum=) -> 1",
    ),
    entry(
        "torch:ops.aten._scaled_grouped_mm_v2", "FLOPs of the products of experts",
        "default(self, mat2, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, offs=, "
        "bias=, out_dtype=, contraction_dim=, use_fast_accum=) -> 1",
    ),
    entry("torch:ops.aten._int_mm", "FLOPs and workspaces of int8 products", "default(self, mat2) -> 1"),
    entry("torch:ops.aten._weight_int8pack_mm", "FLOPs of int8 products", "default(self, mat2, scales) -> 1"),
    entry(
        "torch:ops.aten._convolution", "FLOPs of convolutions",
        "default(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, "
        "benchmark, deterministic, cudnn_enabled, allow_tf32) -> 1; deprecated(input, weight, bias, "
        "stride, padding, dilation, transposed, output_padding, groups, benchmark, deterministic, "
        "cudnn_enabled) -> 1",
    ),
    entry(
        "torch:ops.aten._cudnn_rnn", "recurrent layers as on CUDA",
        "default(input, weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, proj_size, "
        "num_layers, batch_first, dropout, train, bidirectional, batch_sizes, dropout_state) -> 5",
        call=calls.recurrent, result=[(5, 2, 4), (1, 2, 4), (0,), (0,)],
    ),
    entry(
        "torch:ops.aten._cudnn_rnn_backward", "recurrent layers as on CUDA",
        "default(input, weight, weight_stride0, weight_buf, hx, cx, output, grad_output, grad_hy, "
        "grad_cy, mode, hidden_size, proj_size, num_layers, batch_first, dropout, train, "
        "bidirectional, batch_sizes, dropout_state, reserve, output_mask) -> 4",
    ),
    entry("torch:ops.aten._foreach_max", "scratch of foreach functions", "default(self) -> 1"),
    entry("torch:ops.aten._foreach_norm", "scratch of foreach functions", "Scalar(self, ord=, dtype=) -> 1"),
    entry(
        "torch:ops.aten._foreach_powsum", "scratch of foreach functions", "Scalar(self, ord=, dtype=) -> 1",
    ),
    entry(
        "torch:ops.aten._index_put_impl_", "scratch of indexing",
        "default(self, indices, values, accumulate=, unsafe=) -> 1; hacked_twin(self, indices, "
        "values, accumulate=, unsafe=) -> 1",
    ),
    entry(
        "torch:ops.aten._unsafe_index", "scratch of indexing",
        "Tensor(self, indices) -> 1; Tensor_hacked_twin(self, indices) -> 1",
    ),
    entry(
        "torch:ops.aten._unsafe_index_put", "scratch of indexing",
        "default(self, indices, values, accumulate=) -> 1; hacked_twin(self, indices, values, "
        "accumulate=) -> 1",
    ),
    entry("torch:ops.aten._local_scalar_dense", "values that are read on the host", "default(self) -> 1"),
    entry(
        "torch:ops.aten._thnn_fused_gru_cell", "CUDA's autocast policy",
        "default(input_gates, hidden_gates, hx, input_bias=, hidden_bias=) -> 2",
    ),
    entry(
        "torch:ops.aten._thnn_fused_lstm_cell", "CUDA's autocast policy",
        "default(input_gates, hidden_gates, cx, input_bias=, hidden_bias=) -> 3",
    ),
    entry(
        "torch:ops.aten._to_copy", "copies between dtypes and devices",
        "default(self, dtype=, layout=, device=, pin_memory=, non_blocking=, memory_format=) -> 1",
    ),
    entry("torch:ops.aten._unsafe_view", "views of products", "default(self, size) -> 1"),
    entry(
        "torch:ops.aten._upsample_nearest_exact1d", "CUDA's autocast policy",
        "default(self, output_size, scales=) -> 1; vec(input, output_size, scale_factors) -> 1",
    ),
    entry(
        "torch:ops.aten._upsample_nearest_exact2d", "CUDA's autocast policy",
        "default(self, output_size, scales_h=, scales_w=) -> 1; vec(input, output_size, scale_factors) -> 1",
    ),
    entry(
        "torch:ops.aten._upsample_nearest_exact3d", "CUDA's autocast policy",
        "default(self, output_size, scales_d=, scales_h=, scales_w=) -> 1; vec(input, output_size, "
        "scale_factors) -> 1",
    ),
    entry(
        "torch:ops.aten._upsample_bilinear2d_aa", "CUDA's autocast policy",
        "default(self, output_size, align_corners, scales_h=, scales_w=) -> 1; vec(input, "
        "output_size, align_corners, scale_factors) -> 1",
    ),
    entry(
        "torch:ops.aten._upsample_bicubic2d_aa", "CUDA's autocast policy",
        "default(self, output_size, align_corners, scales_h=, scales_w=) -> 1; vec(input, "
        "output_size, align_corners, scale_factors) -> 1",
    ),
    entry(
        "torch:ops.profiler._record_function_enter_new", "leaving profiler ranges unrecorded",
        "default(name, args=) -> 1",
    ),
    entry(
        "torch:ops.profiler._record_function_exit", "leaving profiler ranges unrecorded",
        "_RecordFunction(record) -> 0; default(handle) -> 0",
    ),
)
