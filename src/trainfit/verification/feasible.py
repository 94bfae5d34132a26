"""Recipes worth a trial: allowed by the techniques, likely to fit, with a step neither tiny nor long."""

import json
from typing import Any

from trainfit.catalog.load import gpu as find_gpu
from trainfit.catalog.load import model as find_model
from trainfit.prediction.estimate import predict
from trainfit.spec.errors import InputError
from trainfit.spec.printable import say
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import recipe_from
from trainfit.spec.result import Estimate
from trainfit.techniques.registry import check

SMALLEST = 500_000_000
LARGEST_STEP_S = 4.0
"""Longer steps are not drawn: a suite must end."""


def allowed(data: dict[str, Any]) -> tuple[Recipe, Estimate] | None:
    """Return an allowed recipe and its prediction; None if its step is too long or too small."""
    try:
        recipe = recipe_from(data)
        check(recipe)
        if smallest_state_bytes(recipe) > find_gpu(recipe.hardware.gpu).usable_bytes:
            return None
        estimate = predict(recipe)
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
    size = 2 if recipe.precision in ("bf16", "fp8") else 4
    moments = {"adamw": 2, "sgd": 1 if recipe.optimizer.momentum else 0}.get(recipe.optimizer.name, 0)
    copies = 1 if recipe.adapter else 1 + (0 if recipe.optimizer.in_backward else 1) + moments
    return (row.published_params or 0) * size * copies if row else 0
