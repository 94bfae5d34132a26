"""The fields in which a planned recipe differs, as its file writes them."""

from typing import Any

import pytest

from tiny_recipe import tiny_recipe
from trainfit.spec.plan import changed_fields
from trainfit.spec.recipe import Recipe

IN_FP8 = {"kind": "fp8", "compute": "fp8"}


def recipe(quantize: Any = None, tensor: int = 1) -> Recipe:
    return tiny_recipe(
        adapter={"kind": "lora"}, quantize=quantize, parallel={"tensor": tensor}, hardware={"count": tensor}
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, IN_FP8, ['quantize: {"kind": "fp8", "compute": "fp8"}']),
        (IN_FP8, None, ["quantize: null"]),
        (IN_FP8, "fp8", ["quantize: fp8"]),
        ("nf4", "fp8", ["quantize: fp8"]),
        (IN_FP8, IN_FP8, []),
    ],
)
def test_a_quantised_base_is_one_field_without_its_defaults(before: Any, after: Any, expected: Any) -> None:
    assert [*changed_fields(recipe(before), recipe(after))] == expected


def test_other_mappings_are_a_field_each() -> None:
    assert changed_fields(recipe(), recipe(tensor=2)) == ("parallel.tensor: 2", "hardware.count: 2")
