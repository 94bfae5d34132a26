"""Lookup of model and GPU names for recipes; the package provides the catalog's functions on import."""

from collections.abc import Callable
from typing import Any, Protocol


class Names(Protocol):
    """Functions that find the catalog's name of a model or GPU."""

    def gpu_name(self, text: str) -> str:
        """Return the catalog's name, or ``text`` itself."""
        ...

    def gpu_note(self, text: str) -> str | None:
        """Return a line on what ``text`` leaves open."""
        ...

    def find_model(self, text: str) -> str | None:
        """Return the catalog's name, or None."""
        ...


_provided: list[Callable[[], Any]] = []


def provide(load: Callable[[], Any]) -> None:
    """Set the function that loads the implementation of ``Names``, called when a recipe first needs it."""
    _provided[:] = [load]


def names() -> Names:
    """Return the functions that recipes use."""
    return _provided[0]()
