"""Recipes of plans: of a small native model, and by block."""

from typing import Any

from tiny_recipe import TINY_LLAMA
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import LayerRun, Layers

CONFIG = {
    **TINY_LLAMA,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "vocab_size": 8192,
}
MODEL = {"config": CONFIG, "implementation": "native"}
VARIED = ("batch", "recompute", "loss", "optimizer.in_backward")


def recipe(**fields: Any) -> Recipe:
    return recipe_from({"model": MODEL, "batch": {"seq": 512}, **fields})


def layers(*runs: tuple[Any, float, int]) -> Layers:
    """Return a plan by block: (level, share to offload, number of blocks) of each run."""
    return Layers(layers=tuple(LayerRun(recompute=level, offload=share, count=n) for level, share, n in runs))
