"""RMSNorm, SwiGLU and RoPE against their definitions in PyTorch's autograd, in PyTorch and in Triton."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from block_definitions import EPS, angles, gated, randn, results, rms, turned
from kernel_runs import interpreted_loops
from trainfit.kernels import custom_op
from trainfit.kernels.rms_norm import op as rms_norm
from trainfit.kernels.rope import op as rope
from trainfit.kernels.rope import split
from trainfit.kernels.swiglu import op as swiglu
from trainfit.spec.errors import InputError

ERROR = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TRITON = (torch.float32, torch.float16)


def agree(
    run: Callable[..., Any], definition: Callable[..., Any], given: list[Tensor], dtype: torch.dtype
) -> None:
    """Compare results and gradients, relative to the largest."""
    for got, want in results(run, definition, given, dtype):
        assert got.dtype == dtype
        assert got.shape == want.shape
        # A row of one element has a norm of 1: its gradient is a difference of numbers of size 1.
        assert (got.double() - want).abs().max() <= ERROR[dtype] * max(want.abs().max().item(), 1.0)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the Triton bodies."""
    monkeypatch.setattr(custom_op, "uses_triton", lambda x: True)


def check_norm(n: int, e: int, dtype: torch.dtype) -> None:
    given = [randn(n, e, dtype=dtype), randn(e, dtype=dtype)]
    agree(lambda x, w: rms_norm.rms_norm(x, w, EPS), rms, given, dtype)


def check_swiglu(n: int, f: int, dtype: torch.dtype) -> None:
    both = randn(n, 2 * f, dtype=dtype)
    agree(swiglu.swiglu, gated, list(both.chunk(2, 1)), dtype)
    agree(swiglu.swiglu, lambda x: gated(*x.chunk(2, -1)), [both], dtype)


def check_rope(n: int, d: int, half: int, dtype: torch.dtype) -> None:
    """Queries as a model has them: adjacent heads in memory."""
    q, k = randn(2, n, 6, d, dtype=dtype).transpose(1, 2), randn(2, 2, n, d, dtype=dtype)
    cos, sin = angles(n, half, dtype)
    wide = cos.double(), sin.double()
    agree(lambda a, b: rope.rope(a, b, cos, sin), lambda a, b: turned(a, b, *wide), [q, k], dtype)
    each = cos.repeat(2, 1, 1), sin.repeat(2, 1, 1)
    for one, other in zip(rope.rope(q, k, cos, sin), rope.rope(q, k, *each), strict=True):
        assert torch.equal(one, other)


def split_and_turned(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int) -> tuple[Tensor, ...]:
    q, k, v = qkv.unflatten(-1, (heads + 2 * groups, -1)).split([heads, groups, groups], 2)
    q, k = turned(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2), v


def check_split(n: int, d: int, heads: int, groups: int, dtype: torch.dtype) -> None:
    """As shared and as each sequence's own angles, and with gradients whose heads come first in memory."""
    split.register()
    qkv = randn(2, n, (heads + 2 * groups) * d, dtype=dtype)
    cos, sin = angles(n, d // 2, dtype)
    wide = cos.double(), sin.double()
    for shared in (True, False):
        given = (cos, sin) if shared else (cos.repeat(2, 1, 1), sin.repeat(2, 1, 1))
        agree(
            lambda x, given=given: split.split_rotated(x, *given, heads, groups),
            lambda x: split_and_turned(x, *wide, heads, groups),
            [qkv], dtype,
        )  # fmt: skip
    gradients = [randn(2, h, n, d, dtype=dtype).transpose(1, 2) for h in (heads, groups, groups)]
    found = torch.ops.trainfit.split_rotated_backward(*gradients, cos, sin)
    copies = [gradient.contiguous() for gradient in gradients]
    assert torch.equal(found, torch.ops.trainfit.split_rotated_backward(*copies, cos, sin))


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_bodies_are_the_definitions(dtype: torch.dtype):
    for n, e in ((1, 1), (3, 16), (7, 131), (1030, 5)):
        check_norm(n, e, dtype)
        check_swiglu(n, e, dtype)
    for n, d, half in ((1, 2, 1), (7, 16, 8), (5, 12, 3)):
        check_rope(n, d, half, dtype)
    for n, d, heads, groups in ((1, 2, 1, 1), (7, 16, 6, 2), (5, 12, 9, 3)):
        check_split(n, d, heads, groups, dtype)


def test_gradients_of_the_bodies_are_differences():
    """The PyTorch bodies, whose backward is written by hand."""
    wide = torch.float64
    x, w, both = (randn(*shape, dtype=wide).requires_grad_() for shape in ((5, 7), (7,), (5, 6)))
    q, k = (randn(2, heads, 3, 6, dtype=wide).requires_grad_() for heads in (2, 1))
    cos, sin = angles(3, 2, wide)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm.rms_norm(x, w, EPS), (x, w))
    assert torch.autograd.gradcheck(swiglu.swiglu, (both,))
    assert torch.autograd.gradcheck(swiglu.swiglu, (both[:, :3], both[:, 3:]))
    assert torch.autograd.gradcheck(lambda q, k: rope.rope(q, k, cos, sin), (q, k))
    split.register()
    qkv, (cos, sin) = randn(2, 3, 16, dtype=wide).requires_grad_(), angles(3, 2, wide)
    assert torch.autograd.gradcheck(lambda qkv: split.split_rotated(qkv, cos, sin, 2, 1), (qkv,))


@interpreted_loops
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("dtype", TRITON, ids=str)
def test_kernels_in_the_interpreter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rms_norm, "MAX_PARTS", 4)
    for n, e in ((1, 1), (3, 16), (7, 131)):
        check_norm(n, e, dtype)
        check_swiglu(n, e, dtype)
    check_swiglu(2, 1500, dtype)
    for n, d, half in ((1, 2, 1), (7, 16, 8), (5, 12, 3)):
        check_rope(n, d, half, dtype)
    for n, d, heads, groups in ((1, 2, 1, 1), (7, 16, 6, 2), (5, 12, 9, 3)):
        check_split(n, d, heads, groups, dtype)


@interpreted_loops
@pytest.mark.usefixtures("triton")
def test_the_weights_gradient_of_many_rows_repeats_itself():
    x, w, g = randn(41, 8), randn(8), randn(41, 8)
    scale = rms_norm.reference_forward(x, w, EPS)[1]
    runs = [rms_norm.triton_backward(g, x, w, scale)[1] for _ in range(2)]
    assert torch.equal(*runs)


def test_large_and_zero_inputs():
    """fp16's largest square is beyond fp16; a row of zeros has the norm zero and finite gradients."""
    x = torch.tensor([[60000.0, -60000.0], [0.0, 0.0]], dtype=torch.float16).requires_grad_()
    y = rms_norm.rms_norm(x, torch.ones(2, dtype=torch.float16), EPS)
    assert y.tolist() == [[1.0, -1.0], [0.0, 0.0]]
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    extreme = torch.tensor([[1e4, -1e4, 0.0]])
    assert swiglu.swiglu(extreme, torch.ones(1, 3)).tolist() == [[1e4, 0.0, 0.0]]


def test_empty_tensors_stay_empty():
    x = torch.empty(0, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    rms_norm.rms_norm(x, weight, EPS).sum().backward()
    assert not weight.grad.any()
    assert swiglu.swiglu(torch.empty(0, 8)).shape == (0, 4)


def test_they_compile_and_recompute():
    """In one graph, and through checkpointing: the same gradients."""
    rms_norm.register(), swiglu.register()
    w, x = randn(16).requires_grad_(), randn(5, 16).requires_grad_()

    def block(x: Tensor) -> Tensor:
        return swiglu.swiglu(rms_norm.rms_norm(x, w, EPS)).sum()

    expected = torch.autograd.grad(block(x), (x, w))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    again = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    for found in (torch.autograd.grad(compiled(x), (x, w)), torch.autograd.grad(again, (x, w))):
        for want, got in zip(expected, found, strict=True):
            assert torch.equal(want, got)


@pytest.mark.parametrize(
    "call",
    [
        lambda: rms_norm.rms_norm(randn(2, 8), randn(7), EPS),
        lambda: swiglu.swiglu(randn(2, 7)),
        lambda: swiglu.swiglu(randn(2, 8), randn(2, 7)),
        lambda: rope.rope(randn(1, 2, 3, 8), randn(1, 2, 4, 8), *angles(3, 4, torch.float32)),
        lambda: rope.rope(randn(1, 2, 3, 8), randn(1, 2, 3, 8), *angles(3, 5, torch.float32)),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any]):
    with pytest.raises(InputError):
        call()
