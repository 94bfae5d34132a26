"""Recipes drawn by a seed for one technique: half with it alone, half with it and whatever else is drawn.

Each technique declares its draw, variants included (``Technique.draw``). The truth suite checks and predicts
the recipes.
"""

import random
from typing import Any

from trainfit.catalog.families import FAMILIES
from trainfit.spec.parsing.recipe_file import merge
from trainfit.techniques.registry import techniques
from trainfit.verification.draws import draw

Data = dict[str, Any]

NATIVE_SHARE = 0.35
"""Of the draws: one family of nineteen would be too few for what native does by code of its own."""
LONGEST_STEP_S = 1.5
"""A suite for every technique must end."""


PARTNERS = (
    "recompute_every", "recompute_selective", "recompute_budget", "recompute_layers", "offload_activations",
    "offload_weights", "chunked_loss", "adamw_low_bit", "muon", "stochastic_rounding", "adafactor",
    "optimizer_in_backward", "gradient_clipping", "soft_prompts", "prefix_tuning", "quantize", "fp8",
    "loader", "empty_cache",
)  # fmt: skip
"""What a technique is combined with; without later techniques, so that older seeds draw what they drew."""


def drawn_techniques() -> tuple[str, ...]:
    """Return the techniques that have a draw of their own; ``verification.draws`` draws the others."""
    return tuple(name for name, technique in techniques().items() if technique.draw.alone)


def draw_for(technique: str, chance: random.Random, gpu: str, *, combined: bool) -> Data:
    """One recipe as plain data that asks for the technique; it may turn out not to be allowed.

    Args:
        combined: with everything else as drawn, and one further technique.
    """
    data = draw(chance, gpu, 0.25 if combined else 0.0)
    if data.get("compile") == "model":
        # Minutes each to predict, and in the first suite already; ``recompute_budget`` asks for it itself.
        data["compile"] = "block"
    if chance.random() < NATIVE_SHARE:
        data["model"] = {"config": chance.choice(FAMILIES["native"]), "implementation": "native"}
    if combined:
        partner = chance.choice([name for name in PARTNERS if name != technique])
        data = asked_for(partner, chance, data)
    else:
        data = _plain(chance, data)
    return asked_for(technique, chance, data)


def asked_for(technique: str, chance: random.Random, data: Data) -> Data:
    """``data`` with the technique given; another optimizer or adapter replaces the one that was there."""
    draw_alone = techniques()[technique].draw.alone
    assert draw_alone is not None, technique
    own = draw_alone(chance, data)
    kept = {
        key: value
        for key, value in data.items()
        if not (key == "adapter" and "adapter" in own)
        and not (key == "optimizer" and "name" in own.get("optimizer", {}))
    }
    return merge(kept, own)


def _plain(chance: random.Random, data: Data) -> Data:
    """The same model and batch, with nothing else given."""
    kept = {key: data[key] for key in ("model", "batch", "hardware")}
    kept["batch"] = {**kept["batch"], "accumulate": 1}
    return {**kept, "precision": chance.choice(("bf16", "bf16", "bf16", "amp-bf16", "fp32"))}
