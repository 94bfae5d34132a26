"""trainfit: does this training run fit, how fast does it go, what does it cost?

Importing the package is fast and needs no torch; the rooms below are imported where they are used.
``trainfit.trace(step)`` traces a training step of your own (docs/guide/trace.md).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.prediction.user_step import trace as trace

__version__ = "0.1.0"
__all__ = ["__version__", "trace"]


def __getattr__(name: str) -> Any:
    if name == "trace":
        return importlib.import_module("trainfit.prediction.user_step").trace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
