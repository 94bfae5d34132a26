"""What 16 bits lose in a training step, by closed forms of rounding."""

import pytest
import torch

from trainfit.bench.experiments import rounding
from trainfit.bench.experiments.rounding import Moment, of_logits, of_update, of_values, squares, trained


@pytest.fixture(scope="module")
def moment() -> Moment:
    return trained(32, 4)


def test_values_lose_zeros_below_the_least_and_infinities_above_the_largest() -> None:
    """fp16 holds 2^-24 and 65,504; half of the least value is rounded to 0."""
    exact = torch.tensor([0.0, 2.0**-25, 2.0**-24, 1.0, 65504.0, 65536.0])
    assert of_values(exact, torch.float16) == {
        "zero_share": pytest.approx(1 / 5), "infinite_share": pytest.approx(1 / 5), "relative_error": 0.0,
    }  # fmt: skip
    scaled = of_values(exact, torch.float16, 2.0**16)
    assert (scaled["zero_share"], scaled["infinite_share"]) == (0.0, pytest.approx(3 / 5))
    assert of_values(exact, torch.bfloat16)["zero_share"] == 0.0


def test_bf16_rounds_eight_times_as_much(moment: Moment) -> None:
    half, brain = (of_logits(moment, dtype)["relative_error"] for dtype in rounding.DTYPES.values())
    assert isinstance(half, float)
    assert isinstance(brain, float)
    assert 5 < brain / half < 12


def test_squares_of_gradients_vanish_in_fp16_alone(moment: Moment) -> None:
    half, brain = (of_values(squares(moment), dtype) for dtype in rounding.DTYPES.values())
    assert half["zero_share"] > 0.5  # pyright: ignore[reportOperatorIssue]
    assert brain["zero_share"] == 0.0


def test_an_update_arrives_if_it_is_half_a_step_of_the_dtype() -> None:
    """Weights of 1: steps below it are 2^-8 in bf16 and 2^-11 in fp16, and half of one is lost."""
    one = torch.ones(4096)
    here = Moment(None, {}, one, one, one)  # pyright: ignore[reportArgumentType]
    assert of_update(here, "bf16", 2.0**-9 - 2.0**-12) == {"unmoved_share": 1.0, "kept_share": 0.0}
    assert of_update(here, "bf16", 2.0**-8) == {"unmoved_share": 0.0, "kept_share": 1.0}
    assert of_update(here, "fp16", 2.0**-11) == {"unmoved_share": 0.0, "kept_share": 1.0}
    rounded = of_update(here, rounding.STOCHASTIC, 2.0**-10)
    assert rounded["kept_share"] == pytest.approx(1.0, abs=0.1)
    assert rounded["unmoved_share"] == pytest.approx(0.75, abs=0.03)
