"""Lookup of model and GPU names for recipes; the package provides the catalog's functions on import."""

from collections.abc import Callable
from typing import Any

_provided: list[Callable[[], Any]] = []


def provide(load: Callable[[], Any]) -> None:
    """Set the function that loads ``trainfit.catalog.names``, called when a recipe first needs it."""
    _provided[:] = [load]


def names() -> Any:
    """Return the module of ``find_model``, ``gpu_name`` and ``gpu_note``."""
    return _provided[0]()
