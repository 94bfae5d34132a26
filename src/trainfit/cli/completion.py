"""What a shell completes: names of models, recipes, GPUs, precisions and experiments, and recipe fields.

``trainfit --install-completion`` installs it for the shell that runs it. Free of torch.
"""

from collections.abc import Iterable
from typing import get_args


def recipes(incomplete: str) -> list[str]:
    """Complete RECIPE: shipped recipes and the catalog's models; the shell itself completes files."""
    from trainfit.catalog import load

    return _starting(incomplete, (*load.recipes(), *load.model_names()))


def models(incomplete: str) -> list[str]:
    """Complete a model of the catalog."""
    from trainfit.catalog.load import model_names

    return _starting(incomplete, model_names())


def gpus(incomplete: str) -> list[str]:
    """Complete a GPU of the catalog; after a comma, the next one."""
    from trainfit.catalog.load import gpus as every

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _starting(last, every())]


def precisions(incomplete: str) -> list[str]:
    """Complete a recipe's precision."""
    from trainfit.spec.recipe import Precision

    return _starting(incomplete, get_args(Precision))


def experiments(incomplete: str) -> list[str]:
    """Complete an experiment of ``bench``."""
    from trainfit.bench.harness.discovery import experiment_names

    return _starting(incomplete, experiment_names())


def fields(incomplete: str) -> list[str]:
    """Complete the field of ``--set FIELD=VALUE``."""
    from trainfit.spec.parsing.recipe_file import flat, recipe_from

    content = recipe_from({"model": {"config": "gpt2"}}).model_dump(mode="json")
    return _starting(incomplete, (f"{name}=" for name in flat(content)))


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    typed = incomplete.lower()
    return sorted(name for name in dict.fromkeys(names) if name.startswith(typed))
