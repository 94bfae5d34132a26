"""The precision that a plan assumes where none is given: fp32 master weights for training all weights."""

from typing import Any

import pytest

from planned_recipe import recipe
from trainfit.api.plans import NO_MASTER, Plan, plan_recipe
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.units import GIB


def planned(given: dict[str, Any] | None = None, **options: Any) -> Plan:
    """Plan a recipe without a precision, its level of recomputation and loss alone left to vary."""
    data = {name: value for name, value in recipe(batch={"micro": 2, "seq": 64}).content().items()}
    del data["precision"]
    fixed = ("model", "attention", "block_kernels", "compile", "offload", "optimizer", "batch", "loss")
    return plan_recipe(recipe_from({**data, **(given or {})}), fixed, processes=0, **options)


@pytest.fixture(scope="module")
def assumed() -> Plan:
    return planned()


def test_pretraining_has_master_weights(assumed: Plan) -> None:
    assert assumed.best.precision == "bf16-master"
    assert "bf16-master: not given; --precision" in assumed.assumed
    assert all(one.as_recipe().precision == "bf16-master" for one in assumed.frontier)
    assert assumed.found[0].numerics == ()


@pytest.mark.parametrize(
    "given",
    [{"precision": "bf16"}, {"adapter": {"kind": "lora"}}, {"optimizer": {"name": "adafactor"}}],
    ids=str,
)
def test_else_it_is_as_before(given: dict[str, Any]) -> None:
    """Where it is given, an adapter trains, or the given optimizer keeps no master weights."""
    assert planned(given).best.precision == "bf16"
    assert planned(vary=("recompute",)).best.precision == "bf16"


def test_without_bf16_it_is_fp16_by_autocast() -> None:
    """A T4 has tensor cores of fp16 alone, and Triton, which updates master weights, does not support it."""
    found = planned({"hardware": {"gpu": "t4"}})
    assert found.best.precision == "amp-fp16"
    assert "amp-fp16: not given; --precision" in found.assumed


def test_bf16_alone_where_nothing_else_fits(assumed: Plan) -> None:
    params = assumed.found[0].estimate.params
    least = min(one.estimate.peak_device_bytes for one in assumed.frontier)
    limit_gib = (least - 4 * params) / GIB
    smaller = planned(memory_gib=limit_gib, margin=0.0)
    assert smaller.best.precision == "bf16"
    assert all(one.numerics[0] == NO_MASTER for one in smaller.found)
    assert "bf16: not given; --precision" in smaller.assumed
    assert not planned(memory_gib=limit_gib, margin=0.0, keep_quality=True).found
