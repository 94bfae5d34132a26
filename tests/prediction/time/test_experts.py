"""Products of experts' tokens: padded tiles in bf16, a loop of products in other dtypes."""

import math

import pytest

from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Op
from trainfit.prediction.time.calibrated import calibrated
from trainfit.prediction.time.experts import is_looped, num_groups, one_group, padding

GROUPS, TOKENS, M, N = 64, 32768, 2048, 1024


def product(dtype: str, tokens: int = TOKENS, groups: int = GROUPS, *, of_weights: bool = False) -> Op:
    """Return a product of tokens with experts' weights, or the sum over tokens that is their gradient."""
    size = 4 if dtype == "float32" else 2
    shape = (1, M, N, tokens) if of_weights else (groups, tokens, M, N)
    flops, num_bytes = 2 * tokens * M * N, size * (tokens * (M + N) + groups * M * N)
    layout = "tn" if of_weights else "nt"
    return Op(
        "aten._grouped_mm.default", "", 0, 0, flops, flops, 0, 0, num_bytes, dtype, shape=shape, layout=layout
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("of_weights", [False, True])
def test_the_groups_of_each_product_are_known(dtype: str, of_weights: bool) -> None:
    op = product(dtype, of_weights=of_weights)
    assert num_groups(op) == GROUPS
    assert is_looped(op) == (dtype != "bfloat16")
    assert one_group(op).causal_flops * GROUPS == op.causal_flops


@pytest.mark.parametrize("of_weights", [False, True])
def test_few_tokens_pay_for_whole_tiles(of_weights: bool) -> None:
    shares = [
        padding(product("bfloat16", GROUPS * tokens, of_weights=of_weights)) for tokens in (4096, 512, 129)
    ]
    assert 1 < shares[0] < 1.06 < shares[1] < shares[2]
    if not of_weights:  # A group of 8 tokens takes a cluster's 128 rows.
        assert math.isclose(padding(product("bfloat16", GROUPS * 8)), 16, rel_tol=0.001)


def test_more_tokens_reach_a_higher_rate() -> None:
    times = calibrated(gpu("h200")).times
    few, many = (times.seconds(product("bfloat16", tokens)) for tokens in (TOKENS, 4 * TOKENS))
    assert few is not None
    assert many is not None
    assert 3 * few < many < 3.8 * few


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_loop_takes_what_its_products_take(dtype: str) -> None:
    times, op = calibrated(gpu("h200")).times, product(dtype)
    alone = times.seconds(one_group(op))
    assert alone is not None
    assert times.seconds(op) == pytest.approx(GROUPS * alone)


def test_a_loop_in_fp32_takes_what_was_measured() -> None:
    known = calibrated(gpu("h200"))
    # olmoe-1b-7b, 4,096 tokens in amp-fp16, as `calibrate` timed both products.
    for of_weights, measured_s in ((False, 4.452e-3), (True, 3.523e-3)):
        assert known.times.seconds(product("float32", of_weights=of_weights)) == pytest.approx(
            measured_s, rel=0.2
        )
