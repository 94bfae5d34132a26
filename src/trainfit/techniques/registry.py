"""Finds the techniques and tells what is there. Imports no torch, so a recipe can be refused early.

A technique is a module of this package with four names (and ``NAME``, where it is not the file's):

- ``COVERS``: field of the recipe -> the values of it that this file makes work,
- ``applies(recipe) -> bool``: does this recipe ask for it,
- ``check(recipe)``: raises InputError where it cannot go together with the rest of the recipe,
- ``apply(recipe, draft)``: changes the draft; torch is imported here,

and, where a real device may lack something, ``check_device(recipe, device_type)``.

A new technique is one new file and its place in ``step.ORDER``.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

import trainfit.techniques
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe

if TYPE_CHECKING:
    from trainfit.techniques.base import Draft

PLAIN: dict[str, tuple[Any, ...]] = {
    "loss": ("standard",),
    "block_kernels": ("standard",),
    "recompute": ("none",),
    "compile": (False,),
    "adapter.kind": (None,),
    "quantize": (None,),
    "optimizer.in_backward": (False,),
    "optimizer.stochastic_rounding": (False,),
    "offload.activations": (False,),
    "offload.weights": (False,),
    "parallel.replicate": (1,),
    "parallel.shard": (1,),
    "parallel.tensor": (1,),
}
"""What a step does where no technique is asked for: field -> the values that need no file of their own."""


class Technique(Protocol):
    """The shape of a technique's file."""

    COVERS: dict[str, tuple[Any, ...]]

    def applies(self, recipe: Recipe) -> bool: ...

    def check(self, recipe: Recipe) -> None: ...

    def apply(self, recipe: Recipe, draft: Draft) -> None: ...


@cache
def techniques() -> dict[str, Technique]:
    """Return every technique by its name."""
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(trainfit.techniques.__path__, f"{trainfit.techniques.__name__}.")
    ]
    return {_name(module): cast(Technique, module) for module in modules if hasattr(module, "COVERS")}


def _name(module: ModuleType) -> str:
    missing = [part for part in ("applies", "check", "apply") if not hasattr(module, part)]
    assert not missing, f"{module.__name__} lacks {missing}"
    return getattr(module, "NAME", module.__name__.rpartition(".")[2])


def covered() -> dict[str, tuple[Any, ...]]:
    """Every field that a technique or a plain step answers for -> its values that work now."""
    values: dict[str, list[Any]] = {field: list(plain) for field, plain in PLAIN.items()}
    for technique in techniques().values():
        for field, more in technique.COVERS.items():
            values.setdefault(field, []).extend(more)
    return {field: tuple(found) for field, found in values.items()}


def check(recipe: Recipe) -> None:
    """Nothing, if a step can be assembled from this recipe.

    Raises:
        InputError: a value that no technique covers yet, or techniques that exclude each other, in one line.
    """
    for field, values in covered().items():
        value = value_at(recipe, field)
        if value not in values:
            there = ", ".join(_shown(known) for known in values)
            raise InputError("not there yet", f"there is now: {there}", field=field, value=value)
    for technique in techniques().values():
        if technique.applies(recipe):
            technique.check(recipe)


def check_device(recipe: Recipe, device_type: str) -> None:
    """Nothing, if a real device of this type ("cuda", "cpu") can run the recipe; not for the virtual GPU.

    Raises:
        InputError: what the device lacks, in one line.
    """
    for technique in techniques().values():
        refuse = getattr(technique, "check_device", None)
        if refuse is not None and technique.applies(recipe):
            refuse(recipe, device_type)


def value_at(recipe: Recipe, field: str) -> Any:
    """The value of a dotted field as COVERS writes it: ``{every: 2}`` is its key, ``every``."""
    value: Any = recipe
    for part in field.split("."):
        value = getattr(value, part, None)
    if hasattr(value, "model_dump"):
        return next(iter(value.model_dump()))
    return value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
