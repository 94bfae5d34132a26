"""Find experiments: files of ``bench/experiments/`` and entry points of other packages. Free of torch.

A package adds an experiment with an entry point whose value is a module or an ``Experiment``::

    [project.entry-points."trainfit.experiments"]
    my-kernel = "my_package.my_kernel"
"""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from trainfit.bench.harness.experiment import Experiment
from trainfit.spec.errors import InputError

GROUP = "trainfit.experiments"
PACKAGE = "trainfit.bench.experiments"
FOLDER = Path(__file__).parents[1] / "experiments"


def experiment_names() -> list[str]:
    """Return the names of all experiments, sorted."""
    return sorted({*_own(), *_others()})


def experiment(name: str) -> Experiment:
    """Return the experiment of this name.

    Raises:
        InputError: there is none, or two packages claim the name.
    """
    if name in _own():
        if name in _others():
            raise InputError(
                f"an installed package claims this name ({_others()[name].value})",
                "rename its entry point", field="NAME", value=name,
            )  # fmt: skip
        found = import_module(f"{PACKAGE}.{name}")
    elif name in _others():
        found = _others()[name].load()
    else:
        raise InputError(
            "no such experiment", f"use {', '.join(experiment_names())}", field="NAME", value=name
        )
    return found.EXPERIMENT if isinstance(found, ModuleType) else found


@cache
def _own() -> tuple[str, ...]:
    return tuple(module.name for module in pkgutil.iter_modules([str(FOLDER)]))


def _others() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
