"""Scratch memory of CUDA kernels: numbers worked out by hand from PyTorch's source, at real shapes."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfit.catalog.load import gpus
from trainfit.spec.errors import InputError
from trainfit.virtual.cuda.scratch import GpuTraits, copied_bytes, output_bytes, scratch_bytes
from trainfit.virtual.cuda.scratch.attention import flash_splits, head_dim_rounded
from trainfit.virtual.cuda.scratch.call import Registry
from trainfit.virtual.cuda.scratch.libraries import (
    cublas_workspace_bytes,
    cublaslt_workspace_bytes,
    uses_cublas,
    uses_cublaslt,
)

aten = torch.ops.aten
MIB = 1 << 20
H200 = GpuTraits(torch_version=(2, 11))
A100 = GpuTraits((8, 0), 108, 2048, 163 * 1024, torch_version=(2, 11))
L40S = GpuTraits((8, 9), 142, 1536, 99 * 1024, 96 << 20, (2, 11))


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def scratch(func, *args, out=None, gpu: GpuTraits = H200, **kwargs) -> tuple[int, ...]:
    return scratch_bytes(func, args, kwargs, func(*args, **kwargs) if out is None else out, gpu=gpu)


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


# -- workspaces ----------------------------------------------------------------------------------------------


def test_workspaces_by_gpu_and_version() -> None:
    """32 MiB on Hopper and ":4096:2:16:8" elsewhere; a second one of cuBLASLt before torch 2.12."""
    blackwell = GpuTraits((10, 0), 148, torch_version=(2, 13))
    assert [cublas_workspace_bytes(gpu) for gpu in (H200, A100, blackwell)] == [32 * MIB, 8_519_680, 32 * MIB]
    assert (cublaslt_workspace_bytes(H200), cublaslt_workspace_bytes(blackwell)) == (MIB, 0)


def test_which_products_use_cublaslt() -> None:
    bias, x, w = bf16(64), bf16(128, 32), bf16(32, 64)
    assert uses_cublaslt(aten.addmm.default, (bias, x, w))
    assert not uses_cublaslt(aten.addmm.default, (bf16(128, 64), x, w))
    assert not uses_cublaslt(aten.addmm.default, (bias, x, w), {"beta": 0.5})
    assert not uses_cublaslt(aten.mm.default, (x, w))
    assert uses_cublas(aten.mm.default, (x, w), H200)
    assert not uses_cublas(aten.add.Tensor, (x, x), H200)


def test_traits_of_a_catalog_row() -> None:
    assert GpuTraits.of(gpus()["l40s"], (2, 11)) == L40S
    with pytest.raises(InputError, match="hardware.gpu"):
        GpuTraits.of(gpus()["tpu-v5p"])


# -- embedding and indexing ----------------------------------------------------------------------------------


def test_embedding_backward_of_many_tokens_keeps_partial_sums_in_fp32() -> None:
    args = (bf16(3, 1024, 4096), torch.empty(3, 1024, dtype=torch.int64), 128256, -1, False)
    assert scratch(aten.embedding_dense_backward.default, *args) == ()
    # 4096 tokens of width 4096: at most 4096 segments and 409 + 4096 partial sums.
    args = (bf16(1, 4096, 4096), torch.empty(1, 4096, dtype=torch.int64), 128256, -1, False)
    found = scratch(aten.embedding_dense_backward.default, *args)
    indices = 4096 * 8
    assert found == (indices, indices, indices, 8, indices, indices, 8, 4505 * 8, 4505 * 4096 * 4)
    # A small vocabulary bounds the segments: 8192 // 10 + 1000.
    args = (bf16(8192, 64), torch.empty(8192, dtype=torch.int64), 1000, -1, False)
    assert scratch(aten.embedding_dense_backward.default, *args)[-1] == 1819 * 64 * 4


def test_accumulating_index_put_sorts_its_indices() -> None:
    target, values, index = bf16(1000, 64), bf16(500, 64), torch.empty(500, dtype=torch.int64)
    found = scratch(aten._index_put_impl_.default, target, [index], values, True, True)
    assert found == (4000, 4000, 4000, 4000, 8000)
    assert scratch(aten.index_put_.default, target, [index], values) == ()
    assert scratch(aten.index_put_.default, target, [torch.empty(1000, dtype=torch.bool)], bf16(1)) == ()


# -- matrix products -----------------------------------------------------------------------------------------


def test_products_copy_only_what_cublas_cannot_take() -> None:
    x, w = bf16(256, 512), bf16(512, 128)
    assert scratch(aten.mm.default, x, w) == ()
    assert scratch(aten.mm.default, x, bf16(128, 512).t()) == ()
    assert scratch(aten.mm.default, bf16(256, 1024)[:, :512], w) == ()
    assert scratch(aten.mm.default, bf16(256, 1024)[:, ::2], w) == (256 * 512 * 2,)
    assert scratch(aten.mm.default, bf16(512).expand(256, 512), w) == (256 * 512 * 2,)
    assert scratch(aten.addmm.default, bf16(128), x, w) == ()
    # Batched products support expanded batches but not strided rows.
    keys = bf16(2, 64, 128)
    assert scratch(aten.bmm.default, bf16(1, 32, 64).expand(2, 32, 64), keys) == ()
    assert scratch(aten.bmm.default, bf16(2, 32, 128)[:, :, ::2], keys) == (2 * 32 * 64 * 2,)


def test_experts_products_are_one_kernel_on_hopper() -> None:
    tokens, experts = bf16(4096, 512), bf16(8, 512, 256)
    args = (tokens, experts, torch.empty(8, dtype=torch.int32))
    func = aten._grouped_mm.default
    # 8 groups: 3 pointers, 3 strides of 8 bytes, 3 sizes of 4; 4 tensor maps of 128 bytes an SM.
    assert scratch(func, *args, out=tokens) == (8 * (24 + 24 + 12), 4 * 128 * 132)
    assert scratch(func, *args, out=tokens, gpu=A100) == ()
    assert uses_cublas(func, args, A100)
    assert not uses_cublas(func, args, H200)


# -- reductions ----------------------------------------------------------------------------------------------


def test_a_bias_gradient_is_summed_through_a_large_staging_buffer() -> None:
    # [8192, 4096] over rows: 4 outputs a thread, blocks of 32 x 4, 32 blocks wide; 132 SMs x 16 blocks / 32 =
    # 66 blocks an output, each with 32 x 4 values of 4 bytes (Reduce.cuh global_memory_size), 32 semaphores.
    found = scratch(aten.sum.dim_IntList, bf16(8192, 4096), [0], True)
    assert found == (4 * 4096 * 66 * 32 * 4, 4 * 32)
    assert found[0] == 132 * MIB
    # The same through three dimensions, which join into two.
    assert scratch(aten.sum.dim_IntList, bf16(4, 2048, 4096), [0, 1], True) == found
    # Few rows need no second block: 512 / 4 = 128 values a thread.
    assert scratch(aten.sum.dim_IntList, bf16(512, 4096), [0], True) == ()


def test_a_row_mean_needs_no_buffer_and_a_whole_sum_a_small_one() -> None:
    x = torch.empty(4096, 4096)
    assert scratch(aten.mean.dim, x, [-1], True) == ()
    # 2**24 values, all reduced: 512 threads x 4 loaded at once: width 512, one block high; 32768 values a
    # thread. target 132 x 4 = 528 blocks; max(min(528, 2048), 128) = 528.
    assert scratch(aten.sum.default, x) == (4 * 528, 4)


def test_a_mask_is_converted_before_it_is_summed() -> None:
    mask = torch.empty(8, 512, dtype=torch.bool)
    assert scratch(aten.sum.default, mask)[0] == 8 * 512 * 8
    # 16-bit floats summed into fp32 are not.
    assert scratch(aten.sum.dim_IntList, bf16(8, 512), [1], dtype=torch.float32) == ()
    # A list's norm keeps one partial per chunk of the largest tensor.
    tensors = [bf16(1000, 1000), bf16(10)]
    assert scratch(aten._foreach_norm.Scalar, tensors, 2) == (2 * 16 * 4,)


def test_the_maximum_of_a_whole_transposed_tensor_is_taken_of_a_copy() -> None:
    """ReduceAllOps.cpp: ``self.contiguous()``; ``amax`` reads it as it lies."""
    x = bf16(64, 4112)
    buffers = scratch(aten.max.default, x)
    assert scratch(aten.max.default, x.t()) == (2 * 64 * 4112, *buffers)
    assert scratch(aten.amax.default, x.t(), [0, 1]) == buffers


# -- norms ---------------------------------------------------------------------------------------------------


def test_layer_norm_statistics_are_fp32() -> None:
    x, w = bf16(4, 512, 768), bf16(768)
    out = aten.native_layer_norm.default(x, [768], w, w, 1e-5)
    assert output_bytes(aten.native_layer_norm.default, (x, [768], w, w, 1e-5), {}, out) == {1: 8192, 2: 8192}


def test_layer_norm_backward_sums_blocks_of_very_many_rows() -> None:
    def backward(rows: int, columns: int) -> tuple[int, ...]:
        x, w, stat = bf16(rows, columns), bf16(columns), torch.empty(rows, 1)
        args = (x, x, [columns], stat, stat, w, w, [True, True, True])
        return scratch(aten.native_layer_norm_backward.default, *args, out=(x, w, w))

    assert backward(65536, 768) == ()
    # 768 / 32 = 24 blocks wide; min(32768 / 24, 131072 / 32) = 1365 blocks high.
    partial, result, (buffer, semaphores) = 1365 * 768 * 2, 768 * 2, backward(131072, 768)[4:]
    assert backward(131072, 768) == (partial, partial, result, result, buffer, semaphores)
    assert buffer % (768 * 4) == 0  # Sums in fp32
    assert backward(131072, 4096) == ()


@pytest.mark.parametrize(("rows", "partial", "buffer"), [(131072, 2**20, 2**22), (524288, 2**21, 2**23)])
def test_rms_norm_backward_adds_up_its_blocks_as_on_an_h200(rows: int, partial: int, buffer: int) -> None:
    """Sizes of Qwen3-4B's norms of keys and queries with 16,384 tokens, from the allocator's history."""
    x, w = bf16(rows, 128), bf16(128)
    args = (x, x, [128], torch.empty(rows, 1), w, [True, True])
    found = scratch(aten._fused_rms_norm_backward.default, *args, out=(x, w))
    assert found == (partial, 128 * 2, buffer, 4)
    args = (*args[:5], [True, False])
    assert scratch(aten._fused_rms_norm_backward.default, *args, out=(x, w)) == ()


def test_norms_copy_strided_inputs_before_they_allocate_results() -> None:
    x, w = bf16(512, 2, 64)[:, 0], bf16(64)
    size, stat = 512 * 64 * 2, torch.empty(512, 1)
    for func, args in (
        (aten._fused_rms_norm.default, (x, [64], w, 1e-6)),
        (aten._fused_rms_norm_backward.default, (x.contiguous(), x, [64], stat, w, [True, True])),
        (aten.native_layer_norm.default, (x, [64], w, w, 1e-5)),
    ):
        assert copied_bytes(func, args, {}, gpu=H200) == (size,)
        assert scratch_bytes(func, args, {}, None, gpu=H200) == ()
    assert copied_bytes(aten.mm.default, (x, x.t()), {}, gpu=H200) == ()


# -- attention -----------------------------------------------------------------------------------------------


def heads(
    batch: int, num_heads: int, seq: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.empty(batch, seq, num_heads, head_dim, dtype=dtype).transpose(1, 2)


def flash_backward(q: torch.Tensor, k: torch.Tensor, grad: torch.Tensor | None = None) -> tuple[int, ...]:
    lse, none = torch.empty(q.shape[:3]), torch.empty(0)
    grad = q if grad is None else grad
    args = (grad, q, k, k, q, lse, none, none, q.shape[2], k.shape[2], 0.0, True, none, none)
    return scratch(aten._scaled_dot_product_flash_attention_backward.default, *args, out=(q, k, k))


def test_flash_backward_accumulates_dq_in_fp32() -> None:
    assert [head_dim_rounded(dim) for dim in (64, 80, 128, 144, 256)] == [64, 96, 128, 192, 256]
    q = heads(2, 32, 1000, 128)
    assert flash_backward(q, q) == (2 * 32 * 1024 * 4, 2 * 32 * 1024 * 128 * 4)


def test_flash_backward_of_grouped_heads_expands_dk_and_dv() -> None:
    q, k = heads(1, 32, 4096, 128), heads(1, 8, 4096, 128)
    expanded = 32 * 4096 * 128 * 2
    assert flash_backward(q, k) == (32 * 4096 * 4, 32 * 4096 * 128 * 4, expanded, expanded)
    grad = bf16(1, 32, 4096, 128)  # Heads outside, as a gradient that was not transposed back.
    assert flash_backward(q, k, grad)[0] == expanded


def test_flash_forward_splits_keys_when_the_gpu_would_idle() -> None:
    assert flash_splits(32, 4096, 4096, 128, num_sms=132) == 1
    # 8 heads x 4 row blocks = 32 of 264 slots; 4 key blocks of 128: only 1, 2 and 4 parts differ.
    assert flash_splits(8, 256, 512, 128, num_sms=132) == 4
    q = heads(1, 8, 256, 128)
    found = scratch(aten._scaled_dot_product_flash_attention.default, q, q, q, out=(q,))
    assert found == (2 * 8 * 256 * 4, 2 * 8 * 256 * 128 * 4)


def test_flash_outputs_on_the_gpu() -> None:
    q = heads(2, 4, 100, 64)
    out = aten._scaled_dot_product_flash_attention.default(q, q, q, 0.0, True)
    sizes = output_bytes(aten._scaled_dot_product_flash_attention.default, (q, q, q, 0.0, True), {}, out)
    tensors = [t for t in out if isinstance(t, torch.Tensor)]
    assert sorted(sizes.values()) == [8, 16, 2 * 4 * 100 * 4]
    assert all(position < len(tensors) for position in sizes)


def test_efficient_attention_pads_its_statistics_to_32() -> None:
    q = heads(2, 4, 100, 64, torch.float32)
    args = (q, q, q, None, True)
    out = aten._scaled_dot_product_efficient_attention.default(*args)
    sizes = output_bytes(aten._scaled_dot_product_efficient_attention.default, args, {}, out)
    assert sizes == {1: 2 * 4 * 128 * 4, 2: 0, 3: 0}
    wide = heads(1, 8, 512, 256)
    found = scratch(aten._scaled_dot_product_efficient_attention.default, wide, wide, wide, None, True)
    assert found == (8 * 512 * 256 * 4,)


def efficient_backward(q: torch.Tensor, gpu: GpuTraits) -> tuple[int, ...]:
    lse, none = torch.empty(*q.shape[:3]), torch.empty(0)
    args = (q, q, q, q, None, q, lse, none, none, 0.0, [True, True, True, False], True)
    return scratch(
        aten._scaled_dot_product_efficient_attention_backward.default, *args, out=(q, q, q), gpu=gpu
    )


def test_efficient_backward_keeps_dq_tiles_and_their_locks() -> None:
    # bf16, head size 128 on Hopper: tiles of 128 x 128 floats and 16 bytes; 8 of them cover 1024 rows.
    delta, workspace = efficient_backward(heads(1, 16, 1024, 128), H200)
    assert delta == 16 * 1024 * 4
    assert workspace == 16 * 8 * (128 * 128 + 4) * 4
    # On an L40S tiles are 64 x 64, and dk and dv leave the registers: 200 / 16 = 12 splits.
    _, workspace = efficient_backward(heads(1, 16, 1024, 128), L40S)
    assert workspace == 16 * (16 * 2 * (64 * 64 + 4) + 12 * 64 * (128 + 128)) * 4


def test_cudnn_backward_workspace_and_outputs() -> None:
    q, k = heads(1, 32, 4096, 128), heads(1, 8, 4096, 128)
    lse, none = torch.empty(q.shape[:3]), torch.empty(0)
    args = (q, q, k, k, q, lse, none, none, None, none, none, 4096, 4096, 0.0, True)
    func = aten._scaled_dot_product_cudnn_attention_backward.default
    plain = (q, q, q, q, *args[4:])
    assert scratch(func, *plain, out=(q, q, q)) == (32 * 4096 * 129 * 4 + 1,)
    assert scratch(func, *args, out=(q, k, k)) == (32 * 4096 * 129 * 4 + 2 * 32 * 4096 * 128 * 2 + 1,)


# -- the rest ------------------------------------------------------------------------------------------------


def test_sorts_scans_and_losses() -> None:
    scores = torch.empty(4096, 64)
    assert scratch(aten.topk.default, scores, 8) == ()
    chosen = torch.empty(4096 * 8, dtype=torch.int64)
    assert scratch(aten.sort.default, chosen) == (4096 * 8 * 8, 4096 * 8 * 16)
    assert scratch(aten.sort.default, torch.empty(10, 4096)) == ()
    assert scratch(aten.cumsum.default, torch.empty(64, dtype=torch.int32), 0) == (64 * 8,)
    # An averaged loss keeps its elements.
    x = torch.empty(8, 1000)
    assert scratch(aten.mse_loss.default, x, x) == (8 * 1000 * 4,)
    assert scratch(aten.mse_loss.default, x, x, 0) == ()


def test_two_rules_for_one_op_are_refused() -> None:
    registry: Registry[tuple[int, ...]] = Registry()
    registry.rule("mm")(lambda call: ())
    with pytest.raises(ValueError, match="aten::mm has a rule already"):
        registry.rule("mm")(lambda call: ())
