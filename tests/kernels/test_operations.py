"""Custom operators follow PyTorch's rules: declared mutations, and fake results like the real ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tiny_step import quantized_layer
from trainfit.kernels.cross_entropy import fused, gradients_in_forward
from trainfit.kernels.cross_entropy.chunked import Head, linear_cross_entropy
from trainfit.kernels.cross_entropy.fused import fused_linear_cross_entropy
from trainfit.kernels.decode_attention import op as decode_attention
from trainfit.kernels.flash_attention import op as flash_attention
from trainfit.kernels.fp8_cast import op as fp8_cast
from trainfit.kernels.quantize import nf4, rowwise
from trainfit.kernels.rms_norm import fp8 as rms_norm_fp8
from trainfit.kernels.rms_norm import op as rms_norm
from trainfit.kernels.rope import op as rope
from trainfit.kernels.sampling import op as sampling
from trainfit.kernels.stochastic_rounding import op as stochastic_rounding
from trainfit.kernels.swiglu import fp8 as swiglu_fp8
from trainfit.kernels.swiglu import op as swiglu
from trainfit.optim import adafactor, adamw
from trainfit.virtual.cuda.bytes_moved import bytes_moved
from trainfit.virtual.cuda.flops import NONE, count


def test_operators_keep_the_rules_of_pytorch():
    """Fake results have the real shapes, dtypes and strides, and only declared arguments are written."""
    for room in (
        adamw,
        adafactor,
        stochastic_rounding,
        fused,
        gradients_in_forward,
        rms_norm,
        rms_norm_fp8,
        fp8_cast,
        swiglu,
        swiglu_fp8,
        rope,
        decode_attention,
        sampling,
        nf4,
        rowwise,
    ):
        room.register()
    p, g, m, v = (torch.rand(1, 6, 8, dtype=torch.bfloat16) for _ in range(4))
    row, col, mean = torch.rand(1, 6), torch.rand(1, 8), torch.rand(1)
    y, targets = torch.randn(4, 9), torch.tensor([1, -100, 3, 8])
    x, w, scale = torch.randn(3, 8), torch.randn(8), torch.rand(3)
    q, k, angles = torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 8), torch.rand(4, 4)
    four_bits, like = quantized_layer("nf4", 33, 7), torch.empty(2, dtype=torch.bfloat16)
    for name, *arguments in (
        ("adamw_", p, g, m, v, [1e-3, 0.0, 0.1, 0.01, 1e-8, 0.1, 0.1], False, 1),
        ("add_rounded_", p, g, 0.9, 0.1, 3),
        ("adafactor_squares", p, g),
        ("adafactor_update_squares", g, row, col, mean),
        ("adafactor_apply_", p, g, row, col, mean, torch.tensor(0.1), 1.0, False, 1),
        ("cross_entropy_", y, targets, torch.tensor(0.25), 1.0, 0.0, 0.1, 0.0, -100, True),
        ("multiply_unless_one_", torch.rand(3, 2).t(), torch.tensor(0.5)),
        ("own_rms_norm", x, w, 1e-6),
        ("own_rms_norm_backward", x, x, w, scale),
        ("rms_norm_amax", x, w, 1e-6),
        ("add_rms_norm_amax", x, x, w, 1e-6),
        ("rms_norm_fp8_rows", x, w, scale, scale[:1]),
        ("rms_norm_fp8_transposed", w, x, w, scale, scale[:1]),
        ("rms_norm_backward_add", x, x, w, scale, x),
        ("fp8_cast_both", x, scale[:1], True),
        ("fp8_cast_rows", x, scale[:1]),
        ("fp8_cast_transposed", w, x, torch.tensor(0.5)),
        ("fp8_cast_both", x, torch.tensor(0.5), False),
        ("swiglu", x, x),
        ("swiglu_backward", x, x, x),
        ("swiglu_amax", x),
        ("swiglu_fp8", x, w[:1].abs()),
        ("swiglu_backward_amax", x[:, :4].contiguous(), x),
        ("swiglu_backward_fp8", x[:, :4].contiguous(), x, scale[:1], w[:1].abs()),
        ("rotate_pairs", q, k, angles, angles, True),
        ("decode_attention", q[..., 0, :], q, q, torch.tensor([1, 4], dtype=torch.int32), 0, None),
        (
            "sample_tokens",
            torch.randn(2, 9),
            torch.arange(4).view(2, 2),
            0.5,
            True,
            torch.tensor([-2.0, -9.0]),
        ),
        ("quantize_blocks", torch.randn(7, 33), four_bits.levels),
        ("dequantize_nf4", like, *four_bits.buffers(), 7, 33),
        ("dequantize_rows", like, *quantized_layer("int8", 33, 7).buffers()),
    ):
        torch.library.opcheck(getattr(torch.ops.trainfit, name), tuple(arguments))


def test_norms_in_fp8_move_each_tensor_once_and_multiply_no_matrices():
    """Bytes of bf16 in and out, of codes in both layouts, and of the partial sums; n rows of e."""
    rms_norm_fp8.register()
    fp8_cast.register()
    ours, (n, e) = torch.ops.trainfit, (4096, 1536)
    with FakeTensorMode():
        x, w = torch.empty(n, e, dtype=torch.bfloat16), torch.empty(e, dtype=torch.bfloat16)
        rstd, amax = torch.empty(n), torch.empty(1)
        calls: list[tuple[int, Any, tuple[Any, ...]]] = [
            (2 * n * e + 2 * e + 4 * n + 4, ours.rms_norm_amax.default, (x, w, 1e-6)),
            (6 * n * e + 2 * e + 4 * n + 4, ours.add_rms_norm_amax.default, (x, x, w, 1e-6)),
            (3 * n * e + 2 * e + 4 * n + 8, ours.rms_norm_fp8_rows.default, (x, w, rstd, amax)),
            (3 * n * e + 2 * e + 4 * n + 8, ours.rms_norm_fp8_transposed.default, (x, x, w, rstd, amax)),
            (
                8 * n * e + 2 * e + 4 * n + 4 * e * rms_norm_fp8.num_parts(n, e),
                ours.rms_norm_backward_add.default,
                (x, x, w, rstd, x),
            ),
            (4 * n * e + 8, ours.fp8_cast_both.default, (x, amax, True)),
        ]
        for num_bytes, func, args in calls:
            out = func(*args)
            assert bytes_moved(func, args, {}, out) == num_bytes, func
            assert count(func, args, {}, out) == NONE, func


def test_a_backward_that_needs_the_old_weight_says_so():
    """An update between forward and backward is a mistake of the step's; the gradients would be of another
    weight."""
    stochastic_rounding.register()
    weight = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
    loss = (x @ weight).sum()
    with torch.no_grad():
        stochastic_rounding.add_rounded(weight, torch.ones_like(weight), 1.0, 0.5, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


LABELS = torch.arange(4)
WITH_A_BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: flash_attention.flash_attention(x[None], x[None], x[None], True),
    "its class": lambda x: flash_attention.FlashAttention.apply(x[None], x[None], x[None], True),
    "its reference": lambda x: flash_attention.TiledAttention.apply(x[None], x[None], x[None], True),
    "norm": lambda x: rms_norm.rms_norm(x, torch.ones(16), 1e-6),
    "gate": swiglu.swiglu,
    "gate of two": lambda x: swiglu.swiglu(x, x),
    "rotation": lambda x: rope.rope(x[None, None], x[None, None], torch.ones(4, 8), torch.ones(4, 8))[0],
    "loss in chunks": lambda x: linear_cross_entropy(x, Head(torch.eye(16)), LABELS),
    "fused loss": lambda x: fused_linear_cross_entropy(x, Head(torch.eye(16)), LABELS),
}


@pytest.mark.parametrize("name", WITH_A_BACKWARD)
def test_a_second_derivative_is_refused(name: str):
    """Also where the gradient that comes in is a constant: autograd would take ours for one, too."""
    x = torch.rand(4, 16, requires_grad=True)
    (given,) = torch.autograd.grad(WITH_A_BACKWARD[name](x).sum(), x)
    assert given.any()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(WITH_A_BACKWARD[name](x).sum(), x, create_graph=True)
