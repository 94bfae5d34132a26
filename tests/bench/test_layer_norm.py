"""The layer norm in 16 bits: where its parts leave a dtype's range, and what each costs, by closed forms."""

import pytest
import torch

from trainfit.bench.experiments import layer_norm
from trainfit.bench.experiments.layer_norm import DTYPES, KERNEL, PARTS, chained, inputs_of, parts_of, ranges

SHAPE = (8, 1024)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_parts_are_those_of_pytorch_with_one_rounding_each(dtype: str) -> None:
    """torch computes an elementwise operation of 16-bit tensors in fp32 and rounds it once."""
    kind = DTYPES[dtype]
    x = inputs_of(2.0, 1, kind, SHAPE)
    found, low = parts_of(x, kind), x.to(kind)
    difference = low - found["mean"].to(kind)
    assert torch.equal(found["difference"], difference.double())
    assert torch.equal(found["square"], difference.square().double())
    product = difference * found["reciprocal root"].to(kind)
    assert torch.equal(found["product"], product.double())


def test_in_fp64_the_parts_are_a_layer_norm() -> None:
    x = inputs_of(3.0, 2, torch.float32, SHAPE)
    expected = torch.nn.functional.layer_norm(x, (SHAPE[1],), eps=layer_norm.EPS)
    torch.testing.assert_close(parts_of(x, None)["product"], expected, rtol=1e-12, atol=1e-12)


def test_only_fp16_has_a_range_that_inputs_leave() -> None:
    """Squares overflow where four deviations are 256, which few elements reach. Half of them underflow below
    2^-12. A sum of 1,024 squares overflows at a deviation of 8."""
    half = ranges(torch.float16, SHAPE)
    assert half["square"]["greatest_scale"] in (32, 64)
    assert half["sum of squares"]["greatest_scale"] == 4
    assert half["mean of squares"]["greatest_scale"] == 128
    assert 2.0**-10 <= half["square"]["least_scale"] <= 2.0**-8
    for part in PARTS:
        assert ranges(torch.bfloat16, SHAPE)[part]["greatest_scale"] == 2.0**13
        assert ranges(torch.bfloat16, SHAPE)[part]["least_scale"] == 2.0**-16


def test_a_rounding_costs_its_fraction_bits() -> None:
    """bf16 has 3 bits of fraction fewer than fp16, fp32 13 more."""
    errors = {name: ranges(kind, SHAPE)["difference"]["own_error"] for name, kind in DTYPES.items()}
    assert errors["bf16"] / errors["fp16"] == pytest.approx(8, rel=0.1)
    assert errors["fp16"] / errors["fp32"] == pytest.approx(2**13, rel=0.3)


def test_where_fp16_breaks_the_output_is_zero_and_fp32_inside_is_not() -> None:
    broken = chained(256.0, 0, torch.float16, SHAPE)
    assert broken["breaks"] == f"{_share(broken)}; product 100% zero"
    assert broken["product"] == pytest.approx(1.0)
    assert "square" not in broken
    assert broken[KERNEL] == pytest.approx(2e-4, rel=0.3)
    assert chained(4096.0, 16, torch.float16, SHAPE).keys() == {"std", "breaks"}


def _share(broken: dict) -> str:
    return str(broken["breaks"]).split("; ")[0]


def test_bf16_needs_fp32_inside_for_its_precision() -> None:
    """With a mean of 16 deviations the difference loses four bits: ten times the error of rounding once."""
    found = chained(1.0, 16, torch.bfloat16, SHAPE)
    assert found["product"] > 8 * found[KERNEL]
    assert found["product"] > 0.015
