"""Absolute steps: Adafactor's rate alone sets a step's size, not the rate times the weight's.

``scale_parameter=False`` of transformers' Adafactor, with which the Hugging Face Trainer runs it. A bf16
weight loses steps below half the distance to its neighbour, 2^-9 of its size: large weights, such as a
norm's, lose all steps of a rate that small weights follow.
"""

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Technique, refusal


def check(recipe: Recipe) -> None:
    """Refuse another optimizer, whose steps are absolute anyway."""
    name = recipe.optimizer.name
    if name != "adafactor":
        problem = f"only Adafactor scales its steps by the weights, and this is {name}"
        raise refusal(recipe, "optimizer.scale_parameter", problem, "leave it out")


TECHNIQUE = Technique(
    name="absolute_steps",
    order=275,
    title="Absolute steps",
    covers={"optimizer.scale_parameter": (False,)},
    check=check,
    describe=lambda recipe: "absolute steps",
    needs={"optimizer": {"name": "adafactor", "implementation": "fused", "lr": 2e-4}},
)
