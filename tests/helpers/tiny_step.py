"""A step assembled on the CPU and run a few times on one batch."""

from typing import Any

import torch

from tiny_recipe import tiny_recipe
from trainfit.spec.recipe import Recipe
from trainfit.step import Step, assemble


def step_of(**fields: Any) -> Step:
    """Of the tiny recipe in bf16 with these fields."""
    return assemble(tiny_recipe(**{"precision": "bf16", **fields}), torch.device("cpu"))


def gradients(recipe: Recipe, **how: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one micro-batch and the gradients of the trainable parameters by name, on this CPU."""
    step = assemble(recipe, torch.device("cpu"), **how)
    torch.manual_seed(1)  # of dropout
    (batch,) = step.random_batches()
    loss = step.loss(batch)
    step._backward(loss)
    return loss.item(), {n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal, in number too; compiled modules may rename parameters."""
    return len(found) == len(expected) and all(map(torch.equal, found.values(), expected.values()))


def learned(recipe: Recipe, num_steps: int = 6) -> tuple[Step, list[float]]:
    """A step of the recipe and its losses on one batch."""
    step = assemble(recipe, torch.device("cpu"))
    batches = step.random_batches()
    return step, [step(batches).item() for _ in range(num_steps)]
