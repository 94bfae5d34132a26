"""The libraries that a recipe's step runs, with the versions that are installed. No torch here."""

from collections.abc import Iterable

from trainfit.ledger.ledger import Ledger
from trainfit.spec.provenance import installed_version, release
from trainfit.spec.recipe import Recipe

LIBRARIES = ("torch", "transformers", "peft", "triton", "torchao", "bitsandbytes")
"""The libraries whose version can change a ledger."""
TRITON_OPS = ("triton_", "trainfit")
"""Prefixes of operations that Triton runs on a GPU: Inductor's kernels and ours."""


def libraries_of(recipe: Recipe, ledger: Ledger) -> tuple[str, ...]:
    """Return the names of the libraries that the recipe's step runs, torch first."""
    uses = {
        "torch": True,
        "transformers": recipe.model.implementation == "hf" or recipe.optimizer.name == "adafactor",
        "peft": recipe.adapter is not None,
        "triton": any(op.name.startswith(TRITON_OPS) for op in ledger.ops),
        "torchao": recipe.precision == "fp8"
        or recipe.optimizer.name.startswith("torchao-")
        or (recipe.base is not None and recipe.base.library == "torchao"),
        "bitsandbytes": any(op.name.startswith("bitsandbytes") for op in ledger.ops),
    }
    return tuple(name for name in LIBRARIES if uses[name])


def versions_of(libraries: Iterable[str]) -> dict[str, str]:
    """Return the installed versions by library; one that is not installed is left out.

    The build is left out too (``release``).
    """
    found = {name: installed_version(name) for name in libraries}
    return {name: release(version) for name, version in found.items() if version is not None}
