"""A recipe and its numbers in words, as every command prints them."""

import json
from collections.abc import Callable, Mapping

from trainfit.catalog.names import CPU
from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import Layers, Recompute
from trainfit.spec.result import Estimate
from trainfit.spec.units import format_bytes, format_count, format_flops, format_seconds
from trainfit.techniques import registry

UNITS: dict[str, Callable[[float], str]] = {
    "_bytes": format_bytes, "_per_s": "{:,.0f}".format, "_s": format_seconds, "_flops": format_flops,
    "mfu": "{:.1%}".format, "hfu": "{:.1%}".format, "": "{:.4g}".format,
}  # fmt: skip
"""Formats of numbers by the ending of the field's name; the first that matches counts."""


def describe(recipe: Recipe, ran_on: str | None = None) -> str:
    """Return one line: model, batch, technique and hardware; ``ran_on``: the machine it ran on instead."""
    size = batch_text(recipe) + (" accumulated" if recipe.batch.accumulate > 1 else "")
    nodes = recipe.hardware.nodes
    hosts = f" in {nodes} host{'s' * (nodes > 1)}" if nodes else ""
    hardware = f"{recipe.hardware.count} x {recipe.hardware.gpu}{hosts}"
    if ran_on is not None:
        hardware = ran_on if hardware == f"1 x {CPU}" else f"{ran_on} (the recipe's: {hardware})"
    return f"{recipe.model.display_name}, batch {size}, {registry.describe(recipe)}, on {hardware}"


def assumed(recipe: Recipe, *, varies_batch: bool = False, precision: str | None = None) -> str:
    """Return one line with the fields at their defaults that the answer depends on; empty: none.

    Args:
        recipe: as it was given, before anything in it is planned or changed.
        varies_batch: the micro-batch is searched for, so it is not assumed.
        precision: the one that is assumed where none is given; None: the recipe's.
    """
    batch, given = recipe.batch, recipe.batch.model_fields_set | ({"micro"} if varies_batch else set())
    seq, micro = f"{batch.seq:,} tokens", f"{batch.micro} sequence{'s' * (batch.micro > 1)}"
    sizes = {
        (False, False): (f"batch {batch.micro} x {seq}", "--batch, --seq"),
        (True, False): (f"sequences of {seq}", "--seq"),
        (False, True): (f"{micro} in a micro-batch", "--batch"),
    }
    trained = f"{recipe.optimizer.name} on all weights" if recipe.adapter is None else recipe.optimizer.name
    candidates = [
        ("gpu" in recipe.hardware.model_fields_set, f"GPU {recipe.hardware.gpu}", "--gpu"),
        ({"micro", "seq"} <= given, *sizes.get(("micro" in given, "seq" in given), ("", ""))),
        ("precision" in recipe.model_fields_set, precision or recipe.precision, "--precision"),
        (
            bool(recipe.model_fields_set & {"optimizer", "adapter"}),
            trained,
            "--lora" if recipe.adapter is None else "--set optimizer.name",
        ),
    ]
    open_ones = [(text, option) for is_given, text, option in candidates if not is_given]
    if not open_ones:
        return ""
    texts, names = zip(*open_ones, strict=True)
    return f"{', '.join(texts)}: not given; {', '.join(names)}"


def batch_text(recipe: Recipe) -> str:
    """Return ``micro x seq``, and ``x accumulate`` where there is accumulation; ``micro pairs x seq``."""
    batch, pairs = recipe.batch, f" pair{'s' * (recipe.batch.micro > 1)}" * recipe.has_pairs
    more = f" x {batch.accumulate}" if batch.accumulate > 1 else ""
    return f"{batch.micro}{pairs} x {batch.seq}{more}"


def parameters(estimate: Estimate) -> str:
    """Return the number of parameters, of a mixture those active for a token, and those trained of some."""
    text = f"{format_count(estimate.params)} parameters"
    active = estimate.active_params or estimate.params
    if active != estimate.params:
        text += f", {format_count(active)} of them active for a token"
    if estimate.trainable_params != estimate.params:
        text += f", {format_count(estimate.trainable_params)} trained"
    return text


def recompute_written(recompute: Recompute) -> str:
    """Return recomputation as a recipe writes it, on one line."""
    if isinstance(recompute, str):
        return recompute
    data = recompute.model_dump(mode="json")
    if isinstance(recompute, Layers):
        data = {"layers": [{"recompute": run.recompute, **run.model_dump(exclude_defaults=True)}
                           for run in recompute.layers]}  # fmt: skip
    return json.dumps(data).replace('"', "")


def holds_for(*versions: Mapping[str, str]) -> str:
    """Return the libraries and versions that predictions hold for; empty where none are known."""
    found: dict[str, dict[str, None]] = {}
    for name, version in (pair for libraries in versions for pair in libraries.items()):
        found.setdefault(name, {})[version] = None
    named = ", ".join(f"{name} {' and '.join(numbers)}" for name, numbers in found.items())
    return f"holds for {named}" if named else ""


def quantity(name: str, value: float) -> str:
    """Return a number in the unit that its field's name ends with."""
    return next(form for ending, form in UNITS.items() if name.endswith(ending))(value)
