"""Draw recipes at random: model, batch and the fields that techniques give weights.

Not all are allowed: feasible.py keeps those that are.
"""

import random
from typing import Any

from trainfit.catalog.families import FAMILIES
from trainfit.techniques.base import Technique
from trainfit.techniques.registry import in_order

FIELDS = (
    "batch.accumulate", "precision", "attention", "recompute", "optimizer.name", "optimizer.in_backward",
    "adapter.kind", "compile",
)  # fmt: skip
"""Order in which fields are drawn (it decides every seed's recipes). Other fields follow."""


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
