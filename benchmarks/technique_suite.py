"""Recipes of docs/results/techniques.md: one model and batch, each technique alone and in combinations.

``python -m benchmarks.technique_suite recipes.jsonl`` writes these recipes, one a line, for ``trainfit sweep``.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.printable import say
from trainfit.spec.recipe import Optimizer, Recipe
from trainfit.spec.recipe_file import merge, recipe_from, set_field
from trainfit.techniques import registry

Data = dict[str, Any]

REFERENCE: Data = {
    "model": {"config": "llama-3.2-1b"},
    "batch": {"micro": 4, "seq": 2048},
    "hardware": {"gpu": "h200"},
}
"""With every other field at its default: bf16, fused AdamW."""

OPTIMIZER = ("optimizer.name", "optimizer.implementation", "optimizer.momentum")
LORA: Data = {"adapter": {"kind": "lora"}}
FULL: Data = {"recompute": "full"}
BLOCKS_OF_REFERENCE = 16


@dataclass(frozen=True)
class Asking:
    """What asks for a technique."""

    fields: tuple[str, ...]
    """The fields that are its own: a recipe's control is the same recipe with these at their defaults."""
    variants: tuple[Data, ...]
    """What its page shows, laid on the reference."""
    beside: Data
    """What it cannot be without; the control has it too."""


def _asking(fields: tuple[str, ...], *variants: Data, beside: Data | None = None) -> Asking:
    return Asking(fields, variants, beside or {})


def _optimizer(*variants: Data) -> Asking:
    return _asking(OPTIMIZER, *({"optimizer": fields} for fields in variants))


ASKINGS: dict[str, Asking] = {
    "accumulation": _asking(
        ("batch.micro", "batch.accumulate"), {"batch": {"micro": 1, "accumulate": 4}}
    ),
    "adafactor": _optimizer({"name": "adafactor"}, {"name": "adafactor", "implementation": "fused"}),
    "adamw": _optimizer({"implementation": "foreach"}),
    "adamw_low_bit": _optimizer({"name": "adamw8bit"}, {"name": "adamw4bit"}),
    "attention": _asking(
        ("attention",), *({"attention": name} for name in ("cudnn", "triton", "eager"))
    ),
    "block_kernels": _asking(("block_kernels",), {"block_kernels": "triton"}),
    "chunked_loss": _asking(("loss",), {"loss": "chunked"}),
    "compile_block": _asking(("compile",), {"compile": "block"}),
    "compile_model": _asking(("compile",), {"compile": "model"}),
    "empty_cache": _asking(("empty_cache_every",), {"empty_cache_every": 1}),
    "fp8": _asking(("precision",), {"precision": "fp8"}, beside={"compile": "block"}),
    "fused_loss": _asking(("loss",), {"loss": "fused"}),
    "gradient_clipping": _asking(("optimizer.clip_norm",), {"optimizer": {"clip_norm": 1.0}}),
    "loader": _asking(("loader",), {"loader": {"workers": 2}}),
    "loss_terms": _asking(("loss_terms",), {"loss_terms": {"label_smoothing": 0.1, "z_loss": 1e-4}}),
    "lora": _asking(("adapter",), LORA),
    "muon": _optimizer({"name": "muon"}),
    "offload_activations": _asking(
        ("offload.activations",), {"offload": {"activations": True}}, beside=FULL
    ),
    "offload_weights": _asking(
        ("offload.weights",),
        {"offload": {"weights": True}},
        beside={**FULL, "optimizer": {"in_backward": True}},
    ),
    "optimizer_in_backward": _asking(("optimizer.in_backward",), {"optimizer": {"in_backward": True}}),
    "precision": _asking(("precision",), {"precision": "fp32"}, {"precision": "amp-bf16"}),
    "prefix_tuning": _asking(("adapter",), {"adapter": {"kind": "prefix"}}),
    "quantize": _asking(("quantize",), {"quantize": "nf4"}, beside=LORA),
    "recompute_budget": _asking(
        ("recompute",), {"recompute": {"budget": 0.5}}, beside={"compile": "model"}
    ),
    "recompute_every": _asking(("recompute",), {"recompute": {"every": 2}}),
    "recompute_full": _asking(("recompute",), FULL),
    "recompute_layers": _asking(
        ("recompute",),
        {"recompute": {"layers": [{"recompute": "elementwise", "count": BLOCKS_OF_REFERENCE}]}},
    ),
    "recompute_selective": _asking(("recompute",), {"recompute": "selective"}),
    "sgd": _optimizer({"name": "sgd"}),
    "soft_prompts": _asking(("adapter",), {"adapter": {"kind": "prompt"}}),
    "stochastic_rounding": _asking(
        ("optimizer.stochastic_rounding",), {"optimizer": {"stochastic_rounding": True}}
    ),
}  # fmt: skip
"""By the technique's file."""

MORE: dict[str, tuple[Data, ...]] = {
    "adafactor": tuple(
        {"optimizer": {"name": "adafactor", "implementation": way, "momentum": momentum}}
        for way in ("foreach", "fused")
        for momentum in (0.0, 0.9)
    ),
    "adamw": tuple({"optimizer": {"name": "adamw", "implementation": way}} for way in ("fused", "forloop")),
    "adamw_low_bit": ({"optimizer": {"name": "adamw4bit", "implementation": "forloop"}},),
    "attention": tuple({"attention": name} for name in ("flash", "efficient", "math", "triton")),
    "loader": ({"loader": {"prefetch": 4}},),
    "muon": ({"optimizer": {"name": "muon", "momentum": 0.0}},),
    "lora": ({"adapter": {"kind": "lora", "dtype": "base"}},),
    "offload_weights": (
        {"offload": {"weights": True}, "recompute": "full"},
        {"offload": {"weights": True}, "recompute": "full", **LORA},
    ),
    "optimizer_in_backward": ({"optimizer": {"in_backward": "block"}},),
    "precision": ({"precision": "amp-fp16"},),
    "prefix_tuning": ({"adapter": {"kind": "prefix", "dtype": "base"}},),
    "quantize": (
        {"quantize": "int8"},
        {"quantize": "fp8"},
        {"quantize": "nf4", "adapter": {"kind": "lora", "dtype": "base"}},
    ),
    "recompute_layers": (
        {"recompute": {"layers": [{"recompute": "none", "offload": 0.5, "count": BLOCKS_OF_REFERENCE}]}},
        {"recompute": {"budget_gib": 20}},
    ),
    "recompute_selective": ({"recompute": {"selective": {"save": ["attention"]}}},),
    "sgd": ({"optimizer": {"name": "sgd", "implementation": "foreach"}},),
    "soft_prompts": ({"adapter": {"kind": "p-tuning"}}, {"adapter": {"kind": "prompt", "dtype": "base"}}),
}  # fmt: skip
"""Further ways to ask for a technique, which are not measured."""

VARIANTS = {name: (*asking.variants, *MORE.get(name, ())) for name, asking in ASKINGS.items()}
"""Every way to ask for a technique that the table of refusals tries."""

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
        **CHUNKED, **ASKINGS["recompute_layers"].variants[0],
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
"""Partners, laid on the reference: fast ones, small ones, and each technique in one at least."""


def alone(technique: str) -> list[Recipe]:
    """The reference with each of the technique's variants, and what it cannot be without."""
    asking = ASKINGS[technique]
    return [recipe_from(merge(merge(REFERENCE, asking.beside), variant)) for variant in asking.variants]


def suite() -> list[Recipe]:
    """Every recipe that the pages show of the reference, each once: controls first, then combinations."""
    recipes = [recipe_from(REFERENCE)]
    for technique in ASKINGS:
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
    for field in ASKINGS[technique].fields:
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


def told(recipe: Recipe, fields: Sequence[str] | None = None) -> dict[str, Any]:
    """Dotted field -> value, of what is not at its default.

    Model, batch, hardware, seed, learning rate and decay are not told; ``fields``: these alone.
    """
    data = recipe.model_dump(mode="json", exclude_defaults=True, exclude=NOT_TOLD)
    plain = Optimizer(name=recipe.optimizer.name)  # Its implementation and momentum follow from its name.
    data["optimizer"] = {
        name: value
        for name, value in recipe.optimizer.model_dump(mode="json", exclude=NOT_TOLD_OF_OPTIMIZER).items()
        if value != getattr(plain if name != "name" else Optimizer(), name)
    }
    if recipe.batch.accumulate > 1:
        data["batch"] = {"micro": recipe.batch.micro, "accumulate": recipe.batch.accumulate}
    said: dict[str, Any] = {}
    for key, value in data.items():
        if key in WITH_FIELDS_OF_THEIR_OWN:
            said |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            said[key] = value
    return {name: value for name, value in said.items() if fields is None or name.startswith(tuple(fields))}


NOT_TOLD = {"model", "hardware", "seed", "batch", "optimizer"}
NOT_TOLD_OF_OPTIMIZER = {"lr", "weight_decay"}
WITH_FIELDS_OF_THEIR_OWN = ("batch", "optimizer", "offload", "loader", "parallel")


def written(said: dict[str, Any]) -> str:
    """What ``told`` tells as one writes it in a recipe: ``loss: chunked, optimizer.name: muon``."""
    return ", ".join(f"{name}: {_flow(value)}" for name, value in said.items())


def in_a_recipe(technique: str) -> str:
    """Every way to ask for it, as Markdown."""
    ways = [written(told(recipe, ASKINGS[technique].fields)) for recipe in alone(technique)]
    for field, values in registry.techniques()[technique].COVERS.items():
        missing = [value for value in values if not any(_flow(value) in way for way in ways)]
        ways += [f"{field}: {WRITTEN_OUT.get(value, _flow(value))}" for value in missing]
    return ", ".join(f"`{way}`" for way in ways)


WRITTEN_OUT = {"budget_gib": "{budget_gib: 20}"}


def _flow(value: Any) -> str:
    """YAML's flow style, as short as it gets."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def main(arguments: list[str] | None = None) -> int:
    """Write the suite; exit code 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.technique_suite", description="Write the recipes of the techniques' pages."
    )  # fmt: skip
    parser.add_argument("into", type=Path, help="JSON Lines to write, one recipe each")
    into: Path = parser.parse_args(arguments).into
    recipes = suite()
    into.write_text("".join(json.dumps(recipe.content()) + "\n" for recipe in recipes), encoding="utf-8")
    say(f"{len(recipes)} recipes in {into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
