"""trainfit: does this training run fit, how fast does it go, what does it cost?

Importing the package is fast and needs no torch; what a function needs is imported when it is used.
The functions are described in docs/reference/api.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.api.calls import measure, predict, trace, train
    from trainfit.api.comparisons import compare
    from trainfit.api.explanations import explain
    from trainfit.api.exports import export
    from trainfit.api.mfu import mfu
    from trainfit.api.plans import plan
    from trainfit.api.recipes import load_recipe
    from trainfit.integrations.importers.run import import_config
    from trainfit.integrations.watch import watch
    from trainfit.spec.errors import InputError
    from trainfit.spec.recipe import Recipe
    from trainfit.spec.result import Estimate, Measurement

__version__ = "0.2.0"
__all__ = [
    "Estimate", "InputError", "Measurement", "Recipe", "__version__", "compare", "explain",
    "export", "import_config", "load_recipe", "measure", "mfu", "plan", "predict", "trace", "train", "watch",
]  # fmt: skip

_MODULES = {
    "Estimate": "spec.result", "InputError": "spec.errors", "Measurement": "spec.result",
    "Recipe": "spec.recipe", "compare": "api.comparisons", "explain": "api.explanations",
    "export": "api.exports", "import_config": "integrations.importers.run",
    "load_recipe": "api.recipes", "measure": "api.calls", "mfu": "api.mfu", "plan": "api.plans",
    "predict": "api.calls", "trace": "api.calls", "train": "api.calls", "watch": "integrations.watch",
}  # fmt: skip
"""Name -> the module it is imported from when it is first used."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
