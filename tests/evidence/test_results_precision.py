"""Figures in the sentences of the pages on precision, layer norms and autocast are those of the records."""

import math

import pytest

from evidence.scripts.tables import bench
from page_claims import check
from trainfit.bench.workloads.autocast_list import OPERATIONS
from trainfit.spec.bench import Cell

PRECISION, LAYER_NORM = "evidence/pages/precision.md", "evidence/pages/layer-norm.md"


def number(experiment: str, name: str, **point: Cell) -> float:
    found = bench.newest(experiment, next(iter(point)), needs_gpu=False)
    assert found is not None
    (row,) = bench.having(found.rows, point)
    return float(row.numbers[name])


def kept(dtype: str, lr: float) -> float:
    return 100 * number("rounding", "kept_share", quantity="update of weights", dtype=dtype, lr=lr)


def test_what_reaches_the_weights() -> None:
    figures = kept("bf16", 1e-4), kept("fp16", 1e-4), kept("bf16", 1e-5), kept("fp16", 1e-5)
    pattern = r"# % of the update reaches bf16 weights and # % fp16 weights; at 1e-5, # % and # %"
    check(PRECISION, pattern, figures)
    for lr in (1e-3, 1e-4, 1e-5, 1e-6):
        assert kept("bf16, stochastic", lr) == pytest.approx(100, abs=1)


def test_squares_vanish_and_products_round_eight_times_as_much() -> None:
    zero = 100 * number("rounding", "zero_share", quantity="squares of gradients", dtype="fp16")
    check(PRECISION, r"as # % of the squares", [zero])
    half, brain = (
        number("rounding", "relative_error", quantity="logits", dtype=dtype) for dtype in ("fp16", "bf16")
    )
    assert brain / half == pytest.approx(8, rel=0.1)


def test_the_distance_of_values_near_a_weight() -> None:
    """2^(exponent - bits of fraction): of 0.02 the exponent is -6."""
    exponent = math.floor(math.log2(0.02))
    distances = [2.0 ** (exponent - 7) * 1e4, 2.0 ** (exponent - 10) * 1e5]
    check(PRECISION, r"bf16's values are #e-4 apart and fp16's #e-5", distances)


def output(name: str, dtype: str, power: int, offset: int = 0) -> float:
    return number("layer_norm", name, power=power, dtype=dtype, offset=offset)


def test_the_error_of_a_layer_norm() -> None:
    errors = [100 * output("product", "bf16", 0), 100 * output("product", "bf16", 0, 16)]
    check(LAYER_NORM, r"the output is off by # %, and by # % where", errors)
    check(LAYER_NORM, r"fp32 inside it is # % in both", [100 * output("kernel", "bf16", 0)])
    assert output("kernel", "bf16", 0) == pytest.approx(output("kernel", "bf16", 0, 16), rel=0.1)


def test_where_fp16_breaks() -> None:
    def edge(part: str, name: str) -> float:
        return number("layer_norm", name, part=part, dtype="fp16")

    assert edge("square", "greatest_scale") == 32
    assert edge("sum of squares", "greatest_scale") == 4
    assert edge("square", "least_scale") == 2.0**-9
    for part in ("mean", "difference", "reciprocal root", "product"):
        assert (edge(part, "least_scale"), edge(part, "greatest_scale")) == (2.0**-16, 2.0**13)
    assert output("product", "fp16", 8) == pytest.approx(1.0)  # The output is 0.


def test_the_numbers_of_operations() -> None:
    rules = [one.published for one in OPERATIONS.values()]
    assert (rules.count("widest"), rules.count("error")) == (10, 1)
