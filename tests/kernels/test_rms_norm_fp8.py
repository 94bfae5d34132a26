"""RMSNorm rounded to fp8, sums before it and their backward, in Triton's interpreter, against fp64.

The interpreter cuts off where it rounds to bf16, and its cast to fp8 (Triton 3.7) loses a carry into the
exponent. So kernels are compared in fp32, whose results are not rounded, and codes only where no carry is;
tests/gpu compares all of them.
"""

import pytest
import torch
from torch import Tensor

from kernel_runs import interpreted_loops
from trainfit.kernels.fp8_cast.op import E4M3
from trainfit.kernels.rms_norm import fp8

pytestmark = interpreted_loops
EPS = 1e-6
SHAPES = [(48, 80), (7, 16), (30, 896), (9, 1543), (5, 2048), (7, 3584), (4, 5120), (1, 1)]
"""Rows that do not fill a program's tile, more than programs take at once, in one to seven chunks."""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs, which take several tiles one after another."""
    for name in ("forward_rows", "backward_rows"):
        rows = getattr(fp8, name)
        monkeypatch.setattr(fp8, name, lambda e, rows=rows: rows(e)._replace(programs=3))


def given(n: int, e: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, a, gradient = (torch.randn(n, e).to(dtype) for _ in range(3))
    return x, a, gradient, torch.randn(e).to(dtype)


def normed(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm and the rows' factors, in fp64."""
    rstd = (x.double().square().mean(1) + EPS).rsqrt()
    return x.double() * rstd[:, None] * weight.double(), rstd


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_factors_and_the_largest_magnitude(shape: tuple[int, int]) -> None:
    x, a, _, weight = given(*shape)
    h, *of_sum = fp8.triton_add_amax(x, a, weight, EPS)
    assert torch.equal(h, x + a)
    for summed, found in ((h, of_sum), (x, fp8.triton_amax(x, weight, EPS))):
        y, rstd = normed(summed, weight)
        expected = rstd, y.abs().amax().reshape(1)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=0)


def test_the_magnitude_is_of_what_is_rounded() -> None:
    """To the norm's dtype: by the reference, whose sums in bf16 are rounded too."""
    x, a, _, weight = given(64, 96, torch.bfloat16)
    h, rstd, amax = fp8.reference_add_amax(x, a, weight, EPS)
    assert torch.equal(h, (x.float() + a.float()).bfloat16())
    y = torch.nn.functional.rms_norm(h, weight.shape, weight, EPS)
    assert amax == amax.bfloat16()
    assert amax == y.abs().max()
    codes, scale = fp8.reference_rows(h, weight, rstd, amax)
    transposed, _ = fp8.reference_transposed(h, h, weight, rstd, amax)
    assert codes.float().abs().max() == torch.finfo(E4M3).max
    assert torch.equal(codes.float(), (y.float() / scale).to(E4M3).float())
    assert torch.equal(transposed.float(), codes.float().t())


def test_kernels_in_bf16() -> None:
    """Within a step of bf16, of the rounding that the interpreter leaves out."""
    x, a, gradient, weight = given(37, 144, torch.bfloat16)
    h, rstd, amax = fp8.triton_add_amax(x, a, weight, EPS)
    torch.testing.assert_close(h, x + a, rtol=2**-7, atol=0)
    y, expected = normed(h, weight)
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(amax.double(), y.abs().amax().reshape(1), rtol=2**-7, atol=0)
    dx, parts = fp8.triton_backward_add(gradient, h, weight, rstd, a)
    wanted, sums = fp8.reference_backward_add(gradient, h, weight, rstd, a)
    torch.testing.assert_close(dx, wanted, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(parts.sum(0), sums.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_autograd_in_fp64(shape: tuple[int, int]) -> None:
    x, added, gradient, weight = given(*shape)
    leaves = x.double().requires_grad_(), weight.double().requires_grad_()
    dx, dw = torch.autograd.grad(normed(*leaves)[0], leaves, gradient.double())
    _, rstd = normed(x, weight)
    for run in (fp8.triton_backward_add, fp8.reference_backward_add):
        found, parts = run(gradient, x, weight, rstd.float(), added)
        assert parts.shape == (fp8.num_parts(*shape), shape[1])
        off = (found.double() - dx - added.double()).abs().max()
        assert off < 3e-6 * (dx.abs().max() + 1 + rstd.max())
        assert (parts.double().sum(0) - dw).abs().max() < 3e-6 * dw.abs().max() * shape[0] ** 0.5


@pytest.mark.parametrize("shape", [(48, 80), (300, 144), (4, 16), (132, 256)], ids=str)
def test_the_kernel_computes_what_is_rounded(shape: tuple[int, int]) -> None:
    x, _, _, weight = given(*shape)
    y, rstd = normed(x, weight)
    amax, largest = y.abs().amax().reshape(1).float(), torch.finfo(E4M3).max
    for kernel, turn in (("rms_norm_fp8_rows_kernel", False), ("rms_norm_fp8_transposed_kernel", True)):
        out, scale = torch.empty(shape[::-1] if turn else shape), torch.empty(1)
        fp8._launch_fp8(kernel, (x, weight, rstd.float(), amax, out, scale), fp8.Tile())
        torch.testing.assert_close(scale, amax / largest)
        found = (out.t() if turn else out).double() * scale.double()
        assert (found - y).abs().max() < 1e-6 * y.abs().max()


def test_codes_are_the_nearest_where_no_carry_is() -> None:
    x, _, _, weight = given(132, 144)
    rstd, amax = fp8.reference_amax(x, weight, EPS)
    codes, scale = fp8.triton_rows(x, weight, rstd, amax)
    transposed, again = fp8.triton_transposed(x[:0], x, weight, rstd, amax)
    expected, expected_scale = fp8.reference_rows(x, weight, rstd, amax)
    assert torch.equal(transposed.float(), codes.float().t())
    assert torch.equal(scale, expected_scale)
    assert torch.equal(again, expected_scale)
    carries = expected.float().abs().log2().frac() == 0
    steps = codes.view(torch.uint8).int() - expected.view(torch.uint8).int()
    assert steps[~carries].abs().max() <= 1
    assert (steps[~carries] != 0).float().mean() < 0.005


def test_rows_that_are_no_multiple_of_four_have_the_codes_of_the_reference() -> None:
    x, _, _, weight = given(130, 48, torch.bfloat16)
    rstd, amax = fp8.reference_amax(x, weight, EPS)
    codes, scale = fp8.reference_rows(x, weight, rstd, amax)
    for found, expected in (
        (fp8.triton_rows(x, weight, rstd, amax), codes),
        (fp8.triton_transposed(x[:0], x, weight, rstd, amax), codes.float().t()),
    ):
        assert torch.equal(found[0].float(), expected.float())
        assert torch.equal(found[1], scale)


def test_zeros_have_codes_of_zero() -> None:
    x, weight = torch.zeros(16, 32), torch.ones(32)
    h, rstd, amax = fp8.triton_add_amax(x, x, weight, EPS)
    assert not h.any()
    assert not amax.any()
    torch.testing.assert_close(rstd, torch.full((16,), EPS**-0.5))
    codes, scale = fp8.triton_rows(h, weight, rstd, amax)
    assert scale > 0
    assert not codes.float().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (46, 143)], ids=str)
def test_what_is_not_finite_makes_the_magnitude_infinite(place: tuple[int, int], value: float) -> None:
    """So is the scale, and no value of the part is finite, whatever its code."""
    x, a, gradient, weight = given(48, 144)
    a[place] = value
    h, rstd, amax = fp8.triton_add_amax(x, a, weight, EPS)
    assert amax.isinf().all()
    assert fp8.triton_amax(h, weight, EPS)[1].isinf().all()
    assert not fp8.reference_add_amax(x, a, weight, EPS)[2].isfinite().any()
    codes, scale = fp8.triton_rows(h, weight, rstd, amax)
    assert not (codes.float() * scale).isfinite().any()
    dx, _ = fp8.triton_backward_add(gradient, h, weight, rstd, x)
    assert dx[place[0]].isnan().any()
    others = torch.arange(48) != place[0]
    assert dx[others].isfinite().all()


def test_compiled_they_are_one_graph() -> None:
    fp8.register()
    ours = torch.ops.trainfit
    x, a, gradient, weight = given(12, 32, torch.bfloat16)

    def run(x: Tensor, a: Tensor, gradient: Tensor, weight: Tensor) -> list[Tensor]:
        h, rstd, amax = ours.add_rms_norm_amax(x, a, weight, EPS)
        again, _ = ours.rms_norm_amax(h, weight, EPS)
        codes, scale = ours.rms_norm_fp8_rows(h, weight, rstd, amax)
        transposed, _ = ours.rms_norm_fp8_transposed(gradient, h, weight, rstd, amax)
        dx, parts = ours.rms_norm_backward_add(gradient, h, weight, again, a)
        return [h, codes.float(), transposed.float(), scale, dx, parts.sum(0)]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(x, a, gradient, weight), run(x, a, gradient, weight), strict=True):
        assert torch.equal(found, expected)
