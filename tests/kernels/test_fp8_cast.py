"""The cast of a matrix to fp8 in Triton's interpreter, which rounds to fp8 wrongly: outputs in fp32."""

import pytest
import torch

from kernel_runs import interpreted_loops
from trainfit.kernels.custom_op import triton_kernels
from trainfit.kernels.fp8_cast import op

pytestmark = interpreted_loops


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("shape", [(48, 80), (132, 256), (4, 16)], ids=str)
def test_the_kernel_computes_what_is_rounded(shape: tuple[int, int], both: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).bfloat16()
    amax, largest = op.magnitude(x).reshape(1), torch.finfo(op.E4M3).max
    codes, turned, scale = torch.empty(shape), torch.full(shape[::-1], -1.0), torch.empty(1)
    kernels, grid = triton_kernels("kernels.fp8_cast.triton"), (-(-shape[0] // 64), -(-shape[1] // 128))
    constants = {"ROWS": 64, "BLOCK": 128, "LEAST": op.LEAST, "LARGEST": largest, "WORDS": False}
    if both:
        kernels.fp8_cast_both_kernel[grid](
            x, amax, codes, turned, scale, shape[0] // 4, shape[1], **constants
        )
    else:
        kernels.fp8_cast_kernel[grid](x, amax, codes, scale, *shape, **constants)
    _, of_codes = op.rounded(x, amax, op.E4M3)
    torch.testing.assert_close(scale, of_codes)
    torch.testing.assert_close(codes, x.float() / of_codes, rtol=1e-6, atol=0)
    assert codes.abs().max().item() == pytest.approx(largest)
    if both:
        assert torch.equal(turned, codes.t())


def test_nan_reaches_each_code() -> None:
    x = torch.zeros(16, 32)
    x[3, 5] = float("nan")
    codes, scale = torch.empty(16, 32, dtype=op.E4M3), torch.empty(1)
    op.triton_cast(x, op.magnitude(x).reshape(1), codes, codes.new_empty(0), scale)
    assert scale.isnan()


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("rows", [48, 50])
def test_both_layouts_are_allocated(rows: int, e5m2: bool) -> None:
    """Rows that are no multiple of four have the reference's codes."""
    torch.manual_seed(0)
    x = torch.randn(rows, 80).bfloat16()
    for amax in (op.magnitude(x), op.magnitude(x).reshape(1)):
        codes, turned, scale = op.triton_cast_both(x, amax, e5m2)
        expected, expected_turned, expected_scale = op.reference_cast_both(x, amax, e5m2)
        assert codes.dtype == turned.dtype == expected.dtype == (op.E5M2 if e5m2 else op.E4M3)
        torch.testing.assert_close(scale, expected_scale)
        assert torch.equal(turned.float(), codes.float().t())
        assert torch.equal(expected_turned.float(), expected.float().t())
        carries = expected.float().abs().log2().frac() == 0
        steps = codes.view(torch.uint8).int() - expected.view(torch.uint8).int()
        assert steps[~carries].abs().max() <= (1 if rows % 4 == 0 else 0)


def test_a_matrix_without_rows() -> None:
    codes, turned, scale = op.triton_cast_both(torch.empty(0, 8), torch.ones(1), False)
    assert (codes.shape, turned.shape, scale.shape) == ((0, 8), (8, 0), (1,))


@pytest.mark.parametrize("rows", [48, 50])
def test_layouts_apart_are_those_written_at_once(rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 80).bfloat16()
    amax = op.magnitude(x)
    codes, turned, scale = op.triton_cast_both(x, amax, False)
    for found, expected in (
        (op.triton_cast_rows(x, amax), codes),
        (op.triton_cast_transposed(x[:0], x, amax), turned),
    ):
        assert found[0].shape == expected.shape
        assert torch.equal(found[1], scale)
        steps = found[0].view(torch.uint8).int() - expected.view(torch.uint8).int()
        assert not steps[expected.float().abs().log2().frac() != 0].any()
    assert torch.equal(op.triton_cast_transposed(x, x, amax)[0].float(), turned.float())
