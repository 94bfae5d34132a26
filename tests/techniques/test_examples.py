"""Every technique's examples and variants, from inside the package or outside it."""

import pytest

from tiny_recipe import TINY_LLAMA
from trainfit.spec.errors import InputError
from trainfit.spec.recipe_file import merge, recipe_from
from trainfit.techniques import registry
from trainfit.techniques.base import Data, Technique

MODEL: Data = {"model": {"config": {**TINY_LLAMA, "num_hidden_layers": 16}}, "batch": {"micro": 2, "seq": 16}}


def each(kind: str) -> list[object]:
    return [
        pytest.param(technique, fields, id=f"{technique.name}-{number}")
        for technique in registry.in_order()
        for number, fields in enumerate(getattr(technique, kind))
    ]


@pytest.mark.parametrize(("technique", "example"), each("examples"))
def test_an_example_is_accepted_and_turns_its_technique_on(technique: Technique, example: Data) -> None:
    recipe = recipe_from(merge(merge(MODEL, technique.needs), example))
    registry.check(recipe)
    assert technique.requested(recipe) or technique.applies(recipe)
    assert registry.describe(recipe).startswith(recipe.precision)


@pytest.mark.parametrize(("technique", "variant"), each("variants"))
def test_a_variant_is_accepted_or_refused_in_one_line(technique: Technique, variant: Data) -> None:
    try:
        registry.check(recipe_from(merge(merge(MODEL, technique.needs), variant)))
    except InputError as error:
        assert error.field
        assert "\n" not in str(error)


@pytest.mark.parametrize("technique", registry.in_order(), ids=lambda technique: technique.name)
def test_a_declaration_is_complete(technique: Technique) -> None:
    assert technique.title
    assert technique.fields
    assert technique.examples
    assert technique.draw.alone or technique.draw.weights
