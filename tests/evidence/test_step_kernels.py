"""Kernels of a recorded step beside its ledger's."""

import gzip
import json
from typing import Any

import pytest

from evidence.scripts.step_kernels import RECIPES, compared, names_of, recipe_of, table
from evidence.scripts.step_products import expected, measured, rows_of
from page_claims import ROOT
from trainfit.prediction.predict import ledger_of
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe

TRACES = ROOT / "evidence/records/profiled-steps"
NAME, STEPS = "as-it-should-be", 3
"""A recorded trace of three steps of a compiled model on an H200."""


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    recorded = map(json.loads, (TRACES / "profiled-steps.jsonl").read_text("utf-8").splitlines())
    content = next(row["recipe"] for row in recorded if row["name"] == NAME)
    return recipe_from(content | {"hardware": {"gpu": "h200"}})


@pytest.fixture(scope="module")
def rows(recipe: Recipe) -> dict[str, dict[str, float]]:
    found = compared(TRACES / f"{NAME}.json.gz", ledger_of(recipe), recipe, active=STEPS)
    return {row["name"]: row for row in found["kinds"]} | {"": found}


def test_kinds_take_the_expected_time(rows: dict[str, dict[str, float]]) -> None:
    for kind in ("matrix products", "attention", "compiled, other", "optimizer", "loss"):
        assert rows[kind]["seconds"] == pytest.approx(rows[kind]["expected_s"], rel=0.25), kind
        assert 0 < rows[kind]["share"] < 1, kind


def test_products_are_counted_once_with_the_ledgers_flops(
    rows: dict[str, dict[str, float]], recipe: Recipe
) -> None:
    ledger = ledger_of(recipe)
    products = [op for op in ledger.steady_ops if op.causal_flops and not op.kernel]
    flops = sum(ledger.times(op) * op.causal_flops for op in products)
    assert rows["matrix products"]["flops"] == pytest.approx(flops, rel=1e-6)
    assert rows["matrix products"]["num_kernels"] >= sum(map(ledger.times, products))


def test_products_by_shape_are_those_of_the_ledger(recipe: Recipe) -> None:
    with gzip.open(TRACES / f"{NAME}.json.gz", "rt") as file:
        found = measured(json.load(file))
    calls = dict[tuple[Any, ...], int]()
    for shape, row in found.items():
        key = (*shape[:3], shape.dtype)
        calls[key] = calls.get(key, 0) + row["num_calls"]
    known = expected(ledger_of(recipe), recipe)
    assert calls == {shape: count for shape, (count, _) in known.items()}


def test_products_by_shape_are_sorted_and_below_the_peak(recipe: Recipe) -> None:
    rows = list(rows_of(TRACES / f"{NAME}.json.gz", recipe))
    assert all(0 < row["share"] < 1 for row in rows)
    assert any(row["adds"] for row in rows)  # The loss adds to the head's gradient.
    assert rows[0]["measured_s"] == max(row["measured_s"] for row in rows)


def test_each_gpu_has_recipes_of_its_own() -> None:
    of_h100, of_h200 = names_of("h100-sxm"), names_of("h200")
    assert of_h200 == ["8b-bf16-8k", "8b-fp8-8k"]
    assert sorted(of_h100 + of_h200) == sorted(RECIPES)


def test_recipes_and_table() -> None:
    for name in RECIPES:
        recipe = recipe_of(name, "h100-sxm", tiny=True)
        assert (recipe.batch.micro, recipe.precision) == (1, name.split("-")[1])
    kind = {"name": "attention", "seconds": 0.1, "expected_s": 0.2, "share": 0.5, "num_kernels": 1234}
    row = {"name": "7b-fp8", "tokens_per_s": 1e4, "step_s": 1.0, "predicted_s": 2.0, "clock": ""}
    assert table([row | {"kinds": [kind]}]).splitlines()[1:] == [
        "7b-fp8 10,000 tokens/s       1000.0   2000.0  ",
        "  attention                   100.0    200.0      50%    1,234",
    ]
