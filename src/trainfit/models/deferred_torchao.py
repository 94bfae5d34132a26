"""Import torchao without its remarks, and a part of it that hardly anyone uses only when it is used.

transformers' quantizers import that part for functions that save checkpoints. That takes seconds, and
initialises CUDA, after which no fork of the process can use it.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from trainfit.virtual.trace.exclusive import exclusive

LOGGERS = ("torchao", "torch.utils._pytree")
"""Loggers that write when torchao is imported: "Failed to load" for each of its compiled kernels that is for
another machine, and torch's remark on a call of torchao's. None of them is used here."""
TORCHAO = "torchao.prototype.safetensors.safetensors_support"


def defer_torchao() -> None:
    """Let a stand-in take the module's place, unless it is imported or there is no torchao."""
    if importlib.util.find_spec("torchao") is not None:
        sys.modules.setdefault(TORCHAO, _Torchao(TORCHAO))


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Silence the warnings of torchao's import, for every thread, around an import that may include it."""
    with exclusive():
        loggers = [logging.getLogger(name) for name in LOGGERS]
        before = [one.level for one in loggers]
        for one in loggers:
            one.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for one, level in zip(loggers, before, strict=True):
                one.setLevel(level)


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
