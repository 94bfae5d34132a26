"""A step assembled on the CPU and run a few times on one batch."""

from typing import Any

import torch

from tiny_recipe import tiny_recipe
from trainfit.spec.recipe import Recipe
from trainfit.step import Step, assemble


def step_of(**fields: Any) -> Step:
    """Of the tiny recipe in bf16 with these fields."""
    return assemble(tiny_recipe(**{"precision": "bf16", **fields}), torch.device("cpu"))


def learned(recipe: Recipe, num_steps: int = 6) -> tuple[Step, list[float]]:
    """A step of the recipe and its losses on one batch."""
    step = assemble(recipe, torch.device("cpu"))
    batches = step.random_batches()
    return step, [step(batches).item() for _ in range(num_steps)]
