"""Import a part of torchao that transformers names, but hardly anyone uses, when it is used.

transformers' quantizers import it for functions that save checkpoints. That takes seconds, and initialises
CUDA, after which no fork of the process can use it.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

TORCHAO = "torchao.prototype.safetensors.safetensors_support"


def defer_torchao() -> None:
    """Let a stand-in take the module's place, unless it is imported or there is no torchao."""
    if importlib.util.find_spec("torchao") is not None:
        sys.modules.setdefault(TORCHAO, _Torchao(TORCHAO))


class _Torchao(ModuleType):
    """Stand-in of a module of functions, which imports the module when one is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if isinstance(sys.modules.get(TORCHAO), _Torchao):
                del sys.modules[TORCHAO]
            return getattr(importlib.import_module(TORCHAO), name)(*args, **kwargs)

        return call
