"""Draw recipes at random, and keep those that techniques allow and a card can run.

Drawn are the model, the batch and the fields that techniques give weights.
"""

import json
import random
from typing import Any

from trainfit.catalog.families import FAMILIES
from trainfit.catalog.load import model as find_model
from trainfit.prediction.machine import machine_of
from trainfit.prediction.predict import predict
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import say
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from trainfit.techniques.base import Technique
from trainfit.techniques.registry import check, in_order, optimizer_facts

FIELDS = (
    "batch.accumulate", "precision", "attention", "recompute", "optimizer.name", "optimizer.in_backward",
    "adapter.kind", "compile",
)  # fmt: skip
"""Order in which fields are drawn (it decides every seed's recipes). Other fields follow."""

SMALLEST = 500_000_000
LARGEST_STEP_S = 4.0  # Longer steps are not drawn: a suite must end


def draw(chance: random.Random, gpu: str, compiled_share: float) -> dict[str, Any]:
    """Return one recipe as plain data.

    Args:
        compiled_share: probability of a compiled step.
    """
    family = chance.choice(sorted(FAMILIES))
    seq = 2 ** chance.randint(7, 15)
    if chance.random() < 0.2:
        seq = max(128, seq - 8 * chance.randint(1, 15))  # Not only powers of two.
    config = chance.choice(FAMILIES[family])
    recipe: dict[str, Any] = {
        "model": {"config": config, "implementation": "native" if family == "native" else "hf"},
        "batch": {"micro": 2 ** chance.randint(0, 5), "seq": seq, "accumulate": 1},
        "precision": "bf16",
        "attention": "sdpa",
        "recompute": "none",
        "optimizer": {"name": "adamw", "in_backward": False},
        "hardware": {"gpu": gpu},
    }
    weighted = {field for technique in in_order() for field in technique.draw.weights}
    for field in (*FIELDS, *sorted(weighted - {*FIELDS})):
        _draw_field(chance, recipe, field, compiled_share if field == "compile" else None)
    return recipe


def _draw_field(chance: random.Random, recipe: dict[str, Any], field: str, share: float | None) -> None:
    """Set one field, and the options of the technique whose value it is."""
    drawn_by: dict[Any, Technique] = {}
    values: list[Any] = []
    for technique in in_order():
        for value, weight in technique.draw.weights.get(field, {}).items():
            drawn_by[value] = technique
            values += [value] * weight
            share = technique.draw.share if share is None else share
    if share is not None and chance.random() >= share:
        return
    value = values[0] if len(values) == 1 else chance.choice(values)
    *outer, key = field.split(".")
    holder = recipe
    for part in outer:
        holder = holder.setdefault(part, {})
    holder[key] = value
    options = drawn_by[value].draw.options
    holder.update(options(chance) if options else {})


def allowed(data: dict[str, Any]) -> tuple[Recipe, Estimate] | None:
    """Return an allowed recipe and its prediction; None if its step is too long or too small."""
    try:
        recipe = recipe_from(data)
        machine = machine_of(recipe.hardware)
        check(recipe, machine.row)
        if smallest_state_bytes(recipe) > machine.gpu.usable_bytes:
            return None
        estimate = predict(recipe, machine)
    except InputError:
        return None
    except Exception as error:  # A bug of ours must not end the drawing, nor stay unseen.
        say(f"failed: {json.dumps(data)}: {type(error).__name__}: {error}", err=True)
        return None
    if estimate.peak_allocated_bytes < SMALLEST or (estimate.step_s or 0) > LARGEST_STEP_S:
        return None
    return recipe, estimate


def smallest_state_bytes(recipe: Recipe) -> int:
    """Return the least bytes of weights, gradients and moments, by the published parameter count."""
    if recipe.quantize or recipe.offload.weights:
        return 0  # Less than any published count implies.
    row = find_model(recipe.model.config) if isinstance(recipe.model.config, str) else None
    size = recipe.weight_bytes
    facts = optimizer_facts(recipe.optimizer.name)
    moments = sum(facts.moments(recipe, size)) if facts else 0.0
    gradients = 0 if recipe.optimizer.in_backward else size
    a_parameter = size if recipe.adapter else size + gradients + moments
    return int((row.published_params or 0) * a_parameter) if row else 0
