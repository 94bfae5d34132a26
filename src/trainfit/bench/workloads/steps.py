"""Training steps that several experiments run: the course's models on the native decoder with AdamW."""

from typing import Any, Literal, NamedTuple

import torch

from trainfit.spec.hardware import PeakDtype
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe

SIZES = ("small", "medium", "large", "xl", "2.7b")  # The course's models in the catalog, smallest first


class Precision(NamedTuple):
    """A recipe's precision, how fp32 products are computed, and the data sheet's row for it."""

    recipe: str
    products: Literal["fp32", "tf32"]
    peak: PeakDtype


PRECISIONS = {
    "fp32": Precision("fp32", "fp32", "fp32"),
    "tf32": Precision("fp32", "tf32", "tf32"),
    "amp-bf16": Precision("amp-bf16", "fp32", "bf16"),
    "bf16": Precision("bf16", "fp32", "bf16"),
}


def native_recipe(
    model: str, precision: Precision, micro: int, seq: int, device: torch.device, **others: Any
) -> Recipe:
    """Return the recipe of a step: native implementation, fused AdamW on a GPU."""
    return recipe_from(
        {
            "model": {"config": model, "implementation": "native"},
            "batch": {"micro": micro, "seq": seq},
            "precision": precision.recipe,
            "optimizer": {"name": "adamw", "implementation": "fused" if device.type == "cuda" else "foreach"},
            **others,
        }
    )
