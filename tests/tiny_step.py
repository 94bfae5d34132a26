"""A step assembled on the CPU and run a few times on one batch."""

import torch

from trainfit.spec.recipe import Recipe
from trainfit.step import Step, assemble


def learned(recipe: Recipe, num_steps: int = 6) -> tuple[Step, list[float]]:
    """A step of the recipe and its losses on one batch."""
    step = assemble(recipe, torch.device("cpu"))
    batches = step.random_batches()
    return step, [step(batches).item() for _ in range(num_steps)]
