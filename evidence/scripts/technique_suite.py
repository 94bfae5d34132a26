"""Recipes of evidence/pages/techniques.md: one model and batch, each technique alone and in combinations.

``python -m evidence.scripts.technique_suite recipes.jsonl`` writes them, one a line, for ``trainfit sweep``.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import merge, recipe_from, set_field
from trainfit.spec.printable import say
from trainfit.spec.recipe import Optimizer, Recipe
from trainfit.techniques import registry

Data = dict[str, Any]

REFERENCE: Data = {
    "model": {"config": "llama-3.2-1b"},
    "batch": {"micro": 4, "seq": 2048},
    "hardware": {"gpu": "h200"},
}
"""With every other field at its default: bf16, fused AdamW."""

LORA: Data = {"adapter": {"kind": "lora"}}
FULL: Data = {"recompute": "full"}
LAYERS = registry.techniques()["recompute_layers"].examples[0]

CHUNKED: Data = {"loss": "chunked"}
COMBINED: tuple[Data, ...] = (
    {**CHUNKED, "compile": "block", "attention": "cudnn"},
    {**CHUNKED, "compile": "block", "precision": "fp8"},
    {**CHUNKED, "compile": "block", "recompute": "selective", "optimizer": {"in_backward": "block"}},
    {**CHUNKED, "compile": "model", "recompute": {"budget": 0.5}, "optimizer": {"name": "muon"}},
    {**CHUNKED, **FULL, "optimizer": {"name": "adamw4bit", "stochastic_rounding": True, "in_backward": True}},
    {
        **CHUNKED, **FULL, "offload": {"activations": True, "weights": True},
        "optimizer": {"name": "adafactor", "stochastic_rounding": True, "in_backward": True},
    },
    {**CHUNKED, "recompute": {"every": 2}, "loader": {"workers": 2},
     "optimizer": {"name": "adamw8bit", "clip_norm": 1.0}},
    {
        **CHUNKED, **LAYERS,
        "optimizer": {"name": "sgd", "momentum": 0.9, "in_backward": True},
    },
    {**CHUNKED, **FULL, "batch": {"micro": 1, "accumulate": 4}, "empty_cache_every": 1},
    {**CHUNKED, "compile": "block", "adapter": {"kind": "lora", "dtype": "base"}},
    {**CHUNKED, **FULL, **LORA, "quantize": "nf4"},
    {"block_kernels": "triton", "loss": "fused", "attention": "cudnn"},
    {
        "block_kernels": "triton", "loss": "fused", **FULL, "offload": {"activations": True},
        "loss_terms": {"label_smoothing": 0.1, "z_loss": 1e-4}, "optimizer": {"in_backward": True},
    },
    {"block_kernels": "triton", "loss": "fused", "compile": "block"},
    {"block_kernels": "triton", "loss": "fused", "attention": "triton"},
    {**FULL, "quantize": "nf4", "adapter": {"kind": "prompt"}},
    {"compile": "model", "quantize": "nf4", "adapter": {"kind": "prefix"}},
)  # fmt: skip
"""Combinations, merged into the reference: fast ones, small ones, and each technique at least once."""


NOT_MEASURED = (
    "adamw_bitsandbytes", "adamw_torchao", "decay_groups", "fp8_block", "fp8_scaling",
    "fp8_weights", "fused_accumulation", "offload_optimizer", "packed_documents", "policy_loss",
    "preference_loss", "swiglu_kernels",
)  # fmt: skip
"""Techniques that are younger than the measurements of the page."""


def alone(technique: str) -> list[Recipe]:
    """Return the reference with each of the technique's examples and what it needs."""
    found = registry.techniques()[technique]
    return [recipe_from(merge(merge(REFERENCE, found.needs), example)) for example in found.examples]


def suite() -> list[Recipe]:
    """Return every recipe of the page, each once: controls first, then combinations."""
    recipes = [recipe_from(REFERENCE)]
    for technique in sorted(registry.techniques()):
        for recipe in alone(technique):
            recipes += [found for found in (control(technique, recipe), recipe) if found is not None]
    recipes += [recipe_from(merge(REFERENCE, partners)) for partners in COMBINED]
    return list({recipe.id: recipe for recipe in recipes}.values())


def control(technique: str, recipe: Recipe) -> Recipe | None:
    """Return the same recipe with the technique's fields at their defaults.

    For accumulation: with one micro-batch of all tokens. None where there is no such recipe: the technique is
    the default, or the rest needs it.
    """
    data = recipe.model_dump(mode="json")
    for field in registry.techniques()[technique].fields:
        data = set_field(data, field, _default(field))
    if technique == "accumulation":
        data["batch"]["micro"] = recipe.batch.micro * recipe.batch.accumulate
    try:
        found = recipe_from(data)
    except InputError:
        return None
    return None if found.id == recipe.id else found


def _default(field: str) -> Any:
    value: Any = _reference_data()
    for part in field.split("."):
        value = value[part]
    return value


@cache
def _reference_data() -> Data:
    return recipe_from({"model": REFERENCE["model"]}).model_dump(mode="json")


def differences(recipe: Recipe, fields: Sequence[str] | None = None) -> dict[str, Any]:
    """Return dotted field -> value of what is not at its default, or of ``fields`` alone.

    Model, hardware, seed, the size of the batch, learning rate and weight decay are left out.
    """
    data = recipe.model_dump(mode="json", exclude_defaults=True, exclude=LEFT_OUT)
    # The implementation and the momentum follow from the name.
    named, default = (
        one.model_dump(mode="json") for one in (Optimizer(name=recipe.optimizer.name), Optimizer())
    )
    data["optimizer"] = {
        name: value
        for name, value in recipe.optimizer.model_dump(mode="json", exclude=LEFT_OUT_OF_OPTIMIZER).items()
        if value != (named if name != "name" else default)[name]
    }
    if recipe.batch.accumulate > 1:
        data["batch"] = {"micro": recipe.batch.micro, "accumulate": recipe.batch.accumulate}
    found: dict[str, Any] = {}
    for key, value in data.items():
        if key in WITH_FIELDS_OF_THEIR_OWN:
            found |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            found[key] = value
    return {name: value for name, value in found.items() if fields is None or name.startswith(tuple(fields))}


LEFT_OUT = {"model", "hardware", "seed", "batch", "optimizer"}
LEFT_OUT_OF_OPTIMIZER = {"lr", "weight_decay"}
WITH_FIELDS_OF_THEIR_OWN = ("batch", "data", "objective", "optimizer", "offload", "loader", "parallel")


def as_yaml(fields: dict[str, Any]) -> str:
    """Return fields as a recipe writes them: ``loss: chunked, optimizer.name: muon``."""
    return ", ".join(f"{name}: {_flow(value)}" for name, value in fields.items())


def in_a_recipe(technique: str) -> str:
    """Return the examples of a technique as Markdown, with a value of each field that it covers."""
    ways = [
        as_yaml(differences(recipe, registry.techniques()[technique].fields)) for recipe in alone(technique)
    ]
    for field, values in registry.techniques()[technique].covers.items():
        missing = [value for value in values if not any(_flow(value) in way for way in ways)]
        ways += [f"{field}: {WRITTEN_OUT.get(value, _flow(value))}" for value in missing]
    return ", ".join(f"`{way}`" for way in _without_repeated_fields(ways))


def _without_repeated_fields(ways: list[str]) -> Iterator[str]:
    """Yield each example; of a field's second and further values the value alone."""
    before = ""
    for way in ways:
        field, _, value = way.partition(": ")
        is_one = ", " not in value and ": " not in value
        yield value if is_one and field == before else way
        before = field if is_one else ""


WRITTEN_OUT = {"budget_gib": "{budget_gib: 20}"}


def _flow(value: Any) -> str:
    """Return a value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def main(arguments: list[str] | None = None) -> int:
    """Write the suite; exit code 0."""
    parser = argparse.ArgumentParser(
        prog="python -m evidence.scripts.technique_suite",
        description="Write the recipes of evidence/pages/techniques.md."
    )  # fmt: skip
    parser.add_argument("into", type=Path, help="JSON Lines to write, one recipe each")
    into: Path = parser.parse_args(arguments).into
    recipes = suite()
    into.write_text("".join(json.dumps(recipe.content()) + "\n" for recipe in recipes), encoding="utf-8")
    say(f"{len(recipes)} recipes in {into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
