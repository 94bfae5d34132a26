"""SwiGLU rounded to fp8, in Triton's interpreter, against fp64.

The interpreter's cast to fp8 (Triton 3.7) loses a carry into the exponent. So what the kernels round is
compared as they store it in fp32, and the codes only where no carry is; tests/gpu compares all of them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_runs import interpreted_loops
from trainfit.kernels.swiglu import fp8
from trainfit.kernels.swiglu.fp8 import E4M3, E5M2

pytestmark = interpreted_loops
SHAPES = [(48, 80), (300, 144), (4, 16), (132, 256)]


def given(n: int, f: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(n, 2 * f).to(dtype), torch.randn(n, f).to(dtype)


def hidden(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, 1)
    return gate * gate.sigmoid() * up


def gradients(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """Autograd's, in fp64."""
    leaf = gate_up.double().requires_grad_()
    return torch.autograd.grad(hidden(leaf), leaf, gradient.double())[0]


def forward_in_fp32(gate_up: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the forward's kernel with its output in fp32, which it does not round."""
    out, scale = (one.float() for one in fp8._fake_forward(gate_up, amax))
    fp8._launch("swiglu_fp8_kernel", fp8.FORWARD, gate_up, amax, out, scale)
    return out, scale


def backward_in_fp32(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward's kernel so."""
    out, transposed, scale, hidden = (one.float() for one in fp8._fake_backward(*tensors))
    fp8._launch("swiglu_backward_fp8_kernel", fp8.Tile(), *tensors, out, transposed, scale, hidden)
    return out, transposed, scale, hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_compute_what_is_rounded(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up, gradient = given(*shape, dtype)
    amax, d_amax = fp8.triton_amax(gate_up), fp8.triton_backward_amax(gradient, gate_up)
    out, scale = forward_in_fp32(gate_up, amax)
    d_out, transposed, d_scale, again = backward_in_fp32(gradient, gate_up, scale, d_amax)
    for values, found, largest, of_codes, code in (
        (hidden(gate_up), out, amax, scale, E4M3),
        (gradients(gradient, gate_up), d_out, d_amax, d_scale, E5M2),
    ):
        torch.testing.assert_close(largest.double(), values.abs().amax().reshape(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(of_codes, largest / torch.finfo(code).max)
        off = (found.double() * of_codes.double() - values).abs().max() / values.abs().max()
        assert off < 1e-6, code
    assert torch.equal(transposed, d_out.t())
    assert torch.equal(again, out.t())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_are_the_nearest_where_no_carry_is(shape: tuple[int, int]) -> None:
    gate_up, gradient = given(*shape, torch.bfloat16)
    amax, d_amax = fp8.triton_amax(gate_up), fp8.triton_backward_amax(gradient, gate_up)
    found, wanted = fp8.triton_forward(gate_up, amax), fp8.reference_forward(gate_up, amax)
    d_given = (gradient, gate_up, wanted[1], d_amax)
    d_found, d_wanted = fp8.triton_backward(*d_given), fp8.reference_backward_fp8(*d_given)
    for forward, backward in ((found, d_found), (wanted, d_wanted)):
        assert torch.equal(backward[1].float(), backward[0].float().t())
        assert torch.equal(backward[3].float(), forward[0].float().t())
    pairs = ((found, wanted), ((d_found[0], d_found[2]), (d_wanted[0], d_wanted[2])))
    for (codes, scale), (expected, expected_scale) in pairs:
        assert codes.dtype == expected.dtype
        assert torch.equal(scale, expected_scale)
        # A carry makes the nearest code a power of two. Few values lie so near the middle of two codes
        # that the last bit of fp32 decides.
        carries = expected.float().abs().log2().frac() == 0
        steps = codes.view(torch.uint8).int() - expected.view(torch.uint8).int()
        assert steps[~carries].abs().max() <= 1
        assert (steps[~carries] != 0).float().mean() < 0.005


def test_the_nearest_codes_are_within_half_a_step() -> None:
    """Of the reference: e4m3 has 3 fraction bits, e5m2 has 2; the largest magnitude is the largest code."""
    gate_up, gradient = given(64, 128, torch.float32)
    codes, scale = fp8.reference_forward(gate_up, fp8.reference_amax(gate_up))
    exact = hidden(gate_up)
    assert codes.float().abs().max() == torch.finfo(E4M3).max
    normal = exact.abs() > 2**-6 * scale.double()
    off = (codes.double() * scale.double() - exact).abs() / exact.abs()
    assert off[normal].max() <= 2**-4 + 1e-6
    d_codes, _, d_scale, _ = fp8.reference_backward_fp8(
        gradient, gate_up, scale, fp8.reference_backward_amax(gradient, gate_up)
    )
    exact = gradients(gradient, gate_up)
    normal = exact.abs() > 2**-14 * d_scale.double()
    off = (d_codes.double() * d_scale.double() - exact).abs() / exact.abs()
    assert off[normal].max() <= 2**-3 + 1e-6


def test_zeros_and_larger_values_than_expected() -> None:
    """A tensor of zeros has codes of 0; what is beyond the given magnitude becomes the largest code."""
    zeros = torch.zeros(16, 32)
    codes, scale = fp8.triton_forward(zeros, fp8.triton_amax(zeros))
    assert scale > 0
    assert not codes.float().any()
    gate_up, _ = given(16, 32, torch.float32)
    codes, scale = fp8.triton_forward(gate_up, fp8.reference_amax(gate_up) / 4)
    assert codes.float().abs().max() == torch.finfo(E4M3).max
    again = fp8.triton_backward(gate_up[:, 32:].contiguous(), gate_up, scale, scale)[3]
    assert torch.equal(again.float(), codes.float().t())


def test_the_scale_of_the_step_before() -> None:
    """The first step measures; the next rounds by it whatever comes, and notes what came."""
    gate_up, gradient = given(132, 144, torch.float32)
    of_hidden = torch.tensor([0.01])
    cases: list[tuple[Any, ...]] = [
        (fp8.triton_delayed, fp8.reference_delayed, fp8.reference_amax(gate_up), (gate_up,)),
        (fp8.triton_backward_delayed, fp8.reference_backward_delayed,
         fp8.reference_backward_amax(gradient, gate_up), (gradient, gate_up, of_hidden)),
    ]  # fmt: skip
    for run, reference, amax, tensors in cases:
        for before, since in ((0.0, 0.0), (0.0, 2 * amax.item()), (amax.item() / 4, 0.0), (1e4, 0.5)):
            found, expected = (torch.tensor([before, since]) for _ in range(2))
            codes, *transposed, scale = run(*tensors, found)[:3]
            expected_scale = reference(*tensors, expected)[:3][-1]
            torch.testing.assert_close(found, expected)
            assert found.tolist() == pytest.approx([before, max(since, amax.item())])
            torch.testing.assert_close(scale, expected_scale)
            used = before or max(since, amax.item())
            assert scale.item() == pytest.approx(used / torch.finfo(codes.dtype).max)
            for one in transposed:
                assert torch.equal(one.float(), codes.float().t())


def test_the_backward_repeats_codes_of_a_delayed_scale() -> None:
    gate_up, gradient = given(132, 144, torch.bfloat16)
    codes, scale = fp8.triton_delayed(gate_up, torch.tensor([1.5, 0.0]))
    for run in (fp8.triton_backward_delayed, fp8.triton_backward):
        hidden = run(gradient, gate_up, scale, torch.tensor([2.0, 0.0]))[3]
        assert torch.equal(hidden.float(), codes.float().t())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_in_a_step_is_infinite_in_the_next(value: float) -> None:
    gate_up, _ = given(16, 32, torch.float32)
    gate_up[3, 5] = value
    for run in (fp8.triton_delayed, fp8.reference_delayed):
        history = torch.tensor([1.0, 0.0])
        run(gate_up, history)
        assert history.tolist() == [1.0, float("inf")]


def test_tokens_that_are_no_multiple_of_four_have_the_codes_of_the_reference() -> None:
    gate_up, gradient = given(130, 48, torch.bfloat16)
    amax, d_amax = fp8.reference_amax(gate_up), fp8.reference_backward_amax(gradient, gate_up)
    given_d = (gradient, gate_up, amax / 448, d_amax)
    for found, expected in (
        (fp8.triton_forward(gate_up, amax), fp8.reference_forward(gate_up, amax)),
        (fp8.triton_backward(*given_d), fp8.reference_backward_fp8(*given_d)),
    ):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.float(), other.float())
