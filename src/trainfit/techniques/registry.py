"""Discovery of techniques, and the checks of a recipe against them. Imports no torch.

Every module of this package with a ``TECHNIQUE`` is one technique. Installed packages add theirs by entry
points of the group ``trainfit.techniques``, each naming a ``Technique``.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections import Counter
from functools import cache
from typing import Any

import trainfit.techniques
from trainfit.catalog.load import gpu as find_gpu
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import LEAST_FOR_TRITON, Gpu
from trainfit.spec.outside import outside_techniques
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import OptimizerFacts, Technique, refusal, value_at

DESCRIBED = (
    "precision", "model.implementation", "attention", "block_kernels", "loss", "loss_terms", "recompute",
    "offload.activations", "offload.weights", "offload.optimizer", "compile", "optimizer", "adapter",
    "quantize",
)  # fmt: skip
"""Order of the recipe's fields in a description; techniques of other fields follow."""


@cache
def in_order() -> tuple[Technique, ...]:
    """Return every technique in the order in which they are applied.

    Raises:
        InputError: an installed package declares a name or place that is taken.
    """
    path, prefix = trainfit.techniques.__path__, f"{trainfit.techniques.__name__}."
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(path, prefix)]
    found = [module.TECHNIQUE for module in modules if hasattr(module, "TECHNIQUE")]
    found += [outside for outside in outside_techniques() if isinstance(outside, Technique)]
    for key in ("name", "order"):
        for value, count in Counter(getattr(technique, key) for technique in found).items():
            if count > 1:
                problem, remedy = f"two techniques have the {key} {value!r}", f"give one another {key}"
                raise InputError(problem, remedy, field="TECHNIQUE")
    return tuple(sorted(found, key=lambda technique: technique.order))


def techniques() -> dict[str, Technique]:
    """Return every technique by its name, in the order of their application."""
    return {technique.name: technique for technique in in_order()}


def optimizer_facts(name: str) -> OptimizerFacts | None:
    """Return the facts of a value of ``optimizer.name``; None: its technique has none."""
    found = (one.optimizer for one in in_order() if name in one.covers.get("optimizer.name", ()))
    return next(found, None)


def optimizers_sharded_by(technique: str) -> tuple[str, ...]:
    """Return the values of ``optimizer.name`` that work on the shards of a technique."""
    return tuple(
        name
        for one in in_order()
        if one.optimizer is not None and technique in one.optimizer.sharded_by
        for name in one.covers.get("optimizer.name", ())
    )


def covered() -> dict[str, tuple[Any, ...]]:
    """Return the values that work now, by field: the default and the values that techniques cover."""
    default = Recipe.model_construct()
    values: dict[str, tuple[Any, ...]] = {}
    for technique in in_order():
        for name, more in technique.covers.items():
            values[name] = (*values.get(name, ()), *more)
    for name, known in values.items():
        plain = value_at(default, name)
        values[name] = known if plain in known else (plain, *known)
    return values


def check(recipe: Recipe, gpu: Gpu | None = None) -> None:
    """Refuse a recipe from which no step can be assembled.

    Args:
        gpu: the catalog's row of the recipe's GPU; None: it is looked up.

    Raises:
        InputError: a value that no technique covers, or techniques that exclude each other.
    """
    for name, values in covered().items():
        value = value_at(recipe, name)
        if value not in values:
            there = ", ".join(known if isinstance(known, str) else json.dumps(known) for known in values)
            raise InputError("not supported", f"use one of {there}", field=name, value=value)
    gpu = gpu or find_gpu(recipe.hardware.gpu)
    for technique in _applied_by_name(recipe):
        _refuse_old_gpu(technique, recipe, gpu)
        technique.check_gpu(recipe, gpu)
        technique.check(recipe)


def _refuse_old_gpu(technique: Technique, recipe: Recipe, gpu: Gpu) -> None:
    """Refuse an NVIDIA GPU older than Triton supports, where the technique runs Triton kernels."""
    for field, values in technique.triton.items():
        if gpu.gfx and value_at(recipe, field) in values:
            remedy = f"use {field}: {Recipe.model_fields[field].default}, or an NVIDIA GPU"
            raise refusal(recipe, field, f"trainfit's kernels were not tested on {gpu.title}", remedy)
        capability, least = gpu.compute_capability, LEAST_FOR_TRITON
        if value_at(recipe, field) in values and capability is not None and capability < least:
            has = f"{gpu.title} has compute capability {capability[0]}.{capability[1]}"
            problem = f"{has}, and Triton supports {least[0]}.0 and later"
            remedy = f"use {field}: {Recipe.model_fields[field].default}, or a newer GPU"
            raise refusal(recipe, field, problem, remedy)


def applied(recipe: Recipe) -> list[Technique]:
    """Return the techniques that a recipe applies, in the order of their application."""
    return [technique for technique in in_order() if technique.applies(recipe)]


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse a recipe that a real device of this type ("cuda", "cpu") cannot run. Not for the virtual GPU.

    Raises:
        InputError: naming the feature that the device lacks.
    """
    for technique in _applied_by_name(recipe):
        technique.check_device(recipe, device_type)


def _applied_by_name(recipe: Recipe) -> list[Technique]:
    """Return the techniques that apply, by name: so the first refusal does not depend on their order."""
    return sorted(applied(recipe), key=lambda technique: technique.name)


def describe(recipe: Recipe) -> str:
    """Describe the recipe's techniques in few words: ``bf16, recompute full, lora 16``."""
    native = "" if recipe.model.implementation == "hf" else recipe.model.implementation
    parts = [("precision", recipe.precision), ("model.implementation", native)]
    for technique in in_order():
        if technique.requested(recipe) or technique.applies(recipe):
            parts.append((technique.fields[0], technique.describe(recipe)))
    return ", ".join(text for _, text in sorted(parts, key=lambda part: _position(part[0])) if text)


def _position(field: str) -> int:
    """Return the position of a field in a description."""
    found = (at for at, name in enumerate(DESCRIBED) if f"{field}.".startswith(f"{name}."))
    return next(found, len(DESCRIBED))
