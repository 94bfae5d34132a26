"""Recipes of docs/results/techniques.md: one model and batch, each technique alone and in combinations.

``python -m benchmarks.technique_suite recipes.jsonl`` writes them, one a line, for ``trainfit sweep``.
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
class Usage:
    """How recipes use a technique.

    Attributes:
        fields: the technique's own; a recipe's control is the same recipe with these at their defaults.
        variants: what is measured, merged into the reference.
        needs: what it cannot be without; the control has it too.
    """

    fields: tuple[str, ...]
    variants: tuple[Data, ...]
    needs: Data


def _usage(fields: tuple[str, ...], *variants: Data, needs: Data | None = None) -> Usage:
    return Usage(fields, variants, needs or {})


def _optimizer(*variants: Data) -> Usage:
    return _usage(OPTIMIZER, *({"optimizer": fields} for fields in variants))


USAGES: dict[str, Usage] = {
    "accumulation": _usage(
        ("batch.micro", "batch.accumulate"), {"batch": {"micro": 1, "accumulate": 4}}
    ),
    "adafactor": _optimizer({"name": "adafactor"}, {"name": "adafactor", "implementation": "fused"}),
    "adamw": _optimizer({"implementation": "foreach"}),
    "adamw_low_bit": _optimizer({"name": "adamw8bit"}, {"name": "adamw4bit"}),
    "attention": _usage(
        ("attention",), *({"attention": name} for name in ("cudnn", "triton", "eager"))
    ),
    "block_kernels": _usage(("block_kernels",), {"block_kernels": "triton"}),
    "chunked_loss": _usage(("loss",), {"loss": "chunked"}),
    "compile_block": _usage(("compile",), {"compile": "block"}),
    "compile_model": _usage(("compile",), {"compile": "model"}),
    "empty_cache": _usage(("empty_cache_every",), {"empty_cache_every": 1}),
    "fp8": _usage(("precision",), {"precision": "fp8"}, needs={"compile": "block"}),
    "fused_loss": _usage(("loss",), {"loss": "fused"}),
    "gradient_clipping": _usage(("optimizer.clip_norm",), {"optimizer": {"clip_norm": 1.0}}),
    "loader": _usage(("loader",), {"loader": {"workers": 2}}),
    "loss_terms": _usage(("loss_terms",), {"loss_terms": {"label_smoothing": 0.1, "z_loss": 1e-4}}),
    "lora": _usage(("adapter",), LORA),
    "muon": _optimizer({"name": "muon"}),
    "offload_activations": _usage(
        ("offload.activations",), {"offload": {"activations": True}}, needs=FULL
    ),
    "offload_weights": _usage(
        ("offload.weights",),
        {"offload": {"weights": True}},
        needs={**FULL, "optimizer": {"in_backward": True}},
    ),
    "optimizer_in_backward": _usage(("optimizer.in_backward",), {"optimizer": {"in_backward": True}}),
    "precision": _usage(("precision",), {"precision": "fp32"}, {"precision": "amp-bf16"}),
    "prefix_tuning": _usage(("adapter",), {"adapter": {"kind": "prefix"}}),
    "quantize": _usage(("quantize",), {"quantize": "nf4"}, needs=LORA),
    "recompute_budget": _usage(
        ("recompute",), {"recompute": {"budget": 0.5}}, needs={"compile": "model"}
    ),
    "recompute_every": _usage(("recompute",), {"recompute": {"every": 2}}),
    "recompute_full": _usage(("recompute",), FULL),
    "recompute_layers": _usage(
        ("recompute",),
        {"recompute": {"layers": [{"recompute": "elementwise", "count": BLOCKS_OF_REFERENCE}]}},
    ),
    "recompute_selective": _usage(("recompute",), {"recompute": "selective"}),
    "sgd": _optimizer({"name": "sgd"}),
    "soft_prompts": _usage(("adapter",), {"adapter": {"kind": "prompt"}}),
    "stochastic_rounding": _usage(
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
"""Further variants, which are not measured."""

VARIANTS = {name: (*usage.variants, *MORE.get(name, ())) for name, usage in USAGES.items()}
"""The variants that the table of refusals tries."""

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
        **CHUNKED, **USAGES["recompute_layers"].variants[0],
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


def alone(technique: str) -> list[Recipe]:
    """Return the reference with each variant of the technique, and what it cannot be without."""
    usage = USAGES[technique]
    return [recipe_from(merge(merge(REFERENCE, usage.needs), variant)) for variant in usage.variants]


def suite() -> list[Recipe]:
    """Return every recipe of the page, each once: controls first, then combinations."""
    recipes = [recipe_from(REFERENCE)]
    for technique in USAGES:
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
    for field in USAGES[technique].fields:
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
    plain = Optimizer(name=recipe.optimizer.name)  # Its implementation and momentum follow from its name.
    data["optimizer"] = {
        name: value
        for name, value in recipe.optimizer.model_dump(mode="json", exclude=LEFT_OUT_OF_OPTIMIZER).items()
        if value != getattr(plain if name != "name" else Optimizer(), name)
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
WITH_FIELDS_OF_THEIR_OWN = ("batch", "optimizer", "offload", "loader", "parallel")


def as_yaml(fields: dict[str, Any]) -> str:
    """Return fields as a recipe writes them: ``loss: chunked, optimizer.name: muon``."""
    return ", ".join(f"{name}: {_flow(value)}" for name, value in fields.items())


def in_a_recipe(technique: str) -> str:
    """Return the variants of a technique as Markdown, with a value of each field that it covers."""
    ways = [as_yaml(differences(recipe, USAGES[technique].fields)) for recipe in alone(technique)]
    for field, values in registry.techniques()[technique].COVERS.items():
        missing = [value for value in values if not any(_flow(value) in way for way in ways)]
        ways += [f"{field}: {WRITTEN_OUT.get(value, _flow(value))}" for value in missing]
    return ", ".join(f"`{way}`" for way in ways)


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
        prog="python -m benchmarks.technique_suite",
        description="Write the recipes of docs/results/techniques.md."
    )  # fmt: skip
    parser.add_argument("into", type=Path, help="JSON Lines to write, one recipe each")
    into: Path = parser.parse_args(arguments).into
    recipes = suite()
    into.write_text("".join(json.dumps(recipe.content()) + "\n" for recipe in recipes), encoding="utf-8")
    say(f"{len(recipes)} recipes in {into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
