"""FlashAttention given what callers give: a course's adapter, gradients and keys of stride 0, hard scores, no
keys at all.

Each on a CPU (tiles in PyTorch), in Triton's interpreter, and on a GPU for real. Shapes that break tiles are
in test_flash_attention.py, more than 2^31 elements in test_beyond_32_bits.py.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_flash_attention import BF16, FP16, FP32, Interpreted, computed, inputs, plain, wrong_results
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_runs import interpreted
from trainfit.kernels.flash_attention import dispatch as choice
from trainfit.kernels.flash_attention import op as flash
from trainfit.kernels.flash_attention.triton_launch import triton_backward, triton_forward

ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
CLASSES = [flash.FlashAttention, flash.TiledAttention]


# -- the interface


def one_head(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """Scores of [b, n, d] tensors."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    n, m = scores.shape[-2:]
    unseen = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(unseen, -math.inf) if is_causal else scores


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_courses_adapter_is_the_class(kind: Any, is_causal: bool, device: str) -> None:
    """What the public tests of Stanford's CS336, assignment 2, ask of an adapter: ``.apply`` of [b, n, d]
    tensors; among what the result's node keeps exactly one tensor of shape (b, n), the log-sum-exp;
    gradients."""
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(4, 128, 64, device=device) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = kind.apply(q, k, v, is_causal)
    (lse,) = (x for x in out.grad_fn.saved_tensors if x.shape == (4, 128))
    scores = one_head(q, k, is_causal)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    wanted = scores.softmax(-1) @ v
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    out.backward(gradient)
    for leaf, right in zip(leaves, torch.autograd.grad(wanted, leaves, gradient), strict=True):
        torch.testing.assert_close(leaf.grad, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", CLASSES)
def test_with_heads_it_keeps_a_number_for_each_of_their_rows(kind: Any) -> None:
    q, k, v, _ = inputs(2, 4, 2, 33, 50, 16, FP32)
    out = kind.apply(q.requires_grad_(), k, v)
    assert [x.shape for x in out.grad_fn.saved_tensors] == [q.shape, k.shape, v.shape, q.shape, (2, 4, 33)]


@pytest.mark.parametrize("kind", CLASSES)
def test_the_class_compiles_into_one_graph(kind: Any, fresh_compiler: None) -> None:
    flash.register()
    *leaves, gradient = (x[:, 0] for x in inputs(2, 1, 1, 40, 40, 16, FP32))
    leaves = [x.requires_grad_() for x in leaves]
    runs = []
    for call in (kind.apply, torch.compile(kind.apply, backend="aot_eager", fullgraph=True)):
        out = call(*leaves, True)
        runs.append([out, *torch.autograd.grad(out, leaves, gradient)])
    for found, wanted in zip(*runs, strict=True):
        assert torch.equal(found, wanted)


# -- stride 0


def ones_expanded(tensors: list[Tensor]) -> list[Tensor]:
    """As ``out.sum().backward()`` has it: one number for all."""
    q, k, v, gradient = tensors
    return [q, k, v, torch.ones((), dtype=q.dtype, device=q.device).expand_as(gradient)]


def shared_keys(tensors: list[Tensor]) -> list[Tensor]:
    """One head's keys for all of them, one sequence's values for the batch."""
    q, k, v, gradient = tensors
    return [q, k[:, :1].expand_as(k), v[:1].expand_as(v), gradient]


GIVEN = [ones_expanded, shared_keys]
GROUPED = (2, 4, 2, 77, 77)
"""b, h, k, n, m"""


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("is_causal", [False, True])
def test_stride_0_on_a_cpu(given: Callable[..., Any], is_causal: bool) -> None:
    tensors = given(inputs(*GROUPED, 16, FP32))
    for run in (flash.flash_attention, flash.TiledAttention.apply):
        assert wrong_results(run, tensors, is_causal) == []


@interpreted
@pytest.mark.parametrize("given", GIVEN)
def test_stride_0_in_the_interpreter(given: Callable[..., Any]) -> None:
    assert wrong_results(Interpreted.apply, given(inputs(1, 4, 2, 40, 40, 16, FP32)), True) == []


def test_out_sum_backward() -> None:
    """By autograd itself, whose gradient is expanded."""
    q, k, v, _ = (x.requires_grad_() for x in inputs(*GROUPED, 16, FP32))
    flash.flash_attention(q, k, v, True).sum().backward()
    wanted = torch.autograd.grad(plain(q, k, v, True).sum(), (q, k, v))
    for leaf, right in zip((q, k, v), wanted, strict=True):
        torch.testing.assert_close(leaf.grad, right, rtol=1e-4, atol=1e-4)


def test_what_tma_cannot_carry_takes_the_plain_kernels() -> None:
    """On a Hopper: an expanded gradient changes the backward alone, expanded keys both."""
    machine = choice.Machine((9, 0))
    with FakeTensorMode():
        x = torch.empty(2, 4, 77, 128, dtype=BF16)
        q, k, v, gradient = ones_expanded([x, x, x, x])
        assert choice.forward_launch(q, k, v, True, 0.1, machine).how == choice.FORWARD[128]
        assert choice.backward_launch(x, q, k, v, x, x, True, 0.1, machine).how == choice.BACKWARD[128]
        assert choice.backward_launch(gradient, q, k, v, x, x, True, 0.1, machine).function is triton_backward
        _, k, v, _ = shared_keys([x, x, x, x])
        assert choice.forward_launch(q, k, x, True, 0.1, machine).function is triton_forward
        assert choice.forward_launch(q, x, v, True, 0.1, machine).function is triton_forward


@pytest.mark.gpu
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(("d", "dtype"), [(64, BF16), (128, BF16), (80, FP16)], ids=str)
def test_stride_0_on_a_gpu(d: int, dtype: torch.dtype, given: Callable[..., Any]) -> None:
    tensors = given(inputs(*GROUPED, d, dtype, "cuda"))
    wrong = wrong_results(flash.flash_attention, tensors, True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_out_sum_backward_on_a_gpu(d: int) -> None:
    tensors = inputs(*GROUPED, d, BF16, "cuda")
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    flash.flash_attention(q, k, v, True).sum().backward()
    expected = torch.autograd.grad(
        flash.flash_attention(q, k, v, True), (q, k, v), torch.ones_like(tensors[3])
    )
    # Gluon's for the last ones: other sums, as near to fp64 (the test above).
    for leaf, right in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(leaf.grad, right, rtol=2e-2, atol=2e-2)


# -- hard scores


def certain(tensors: list[Tensor]) -> list[Tensor]:
    """Of each row its own key has all the probability: keys of +-1, queries 16 times those, so its score is
    16 sqrt(d)."""
    q, k, v, gradient = tensors
    k = k.sign()
    return [(16 * k).repeat_interleave(q.shape[1] // k.shape[1], 1), k, v, gradient]


def wrong_of_certain(run: Any, tensors: list[Tensor], is_causal: bool) -> list[str]:
    """As ``wrong_results``, but what of the scores' gradients is left of rounding is a difference of two
    equal sums of d numbers: written out, it is 0 to the last bit."""
    _, dq, dk, _ = (x.abs().max().item() for x in computed(run, tensors, is_causal, tensors[0].dtype))
    scores = [f"{name} is {size:.2g}" for name, size in (("dq", dq), ("dk", dk)) if not size < 1e-3]
    return scores + wrong_results(run, tensors, is_causal, ("out", "dv"))


@pytest.mark.parametrize("is_causal", [False, True])
def test_certain_keys(is_causal: bool) -> None:
    tensors = certain(inputs(1, 4, 2, 60, 60, 64, FP32))
    found = flash.flash_attention(*tensors[:3], is_causal)
    torch.testing.assert_close(found, tensors[2].repeat_interleave(2, 1), rtol=1e-4, atol=1e-4)
    assert wrong_of_certain(flash.flash_attention, tensors, is_causal) == []


@interpreted
def test_certain_keys_in_the_interpreter() -> None:
    tensors = certain(inputs(1, 4, 2, 40, 40, 64, FP32))
    assert wrong_of_certain(Interpreted.apply, tensors, True) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "dtype"), [(64, BF16), (128, BF16), (128, FP16), (80, BF16)], ids=str)
def test_certain_keys_on_a_gpu(d: int, dtype: torch.dtype) -> None:
    tensors = certain(inputs(1, 4, 2, 331, 331, d, dtype, "cuda"))
    wrong = wrong_of_certain(flash.flash_attention, tensors, True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
def test_rows_without_keys_are_zeros(device: str) -> None:
    """All of them (no key at all), and under a causal mask those before the first key; their gradients,
    too."""
    flash.register()
    dtype = FP32 if device == "cpu" else BF16
    q, k, v, gradient = (x.requires_grad_() for x in inputs(1, 2, 1, 70, 50, 64, dtype, device))
    for keys, rows in ((0, 70), (50, 20)):
        for run in (torch.ops.trainfit.flash_attention, *([triton_forward] if device == "cuda" else [])):
            out, lse = run(q, k[:, :, :keys], v[:, :, :keys], True, 0.1)
            assert not out[:, :, :rows].any()
            assert (lse[:, :, :rows] == -math.inf).all()
            assert lse[:, :, rows:].isfinite().all()
        out = flash.flash_attention(q, k[:, :, :keys], v[:, :, :keys], True)
        dq, dk = torch.autograd.grad(out, (q, k), gradient)
        assert not dq[:, :, :rows].any()
        assert dk.isfinite().all()
        assert dk.any() == (keys > 0)
