"""Make the environment that a recipe names: one of ours, or a class in a user's file.

Naming a file runs its code, as running a script does: nobody else's recipe names a file of this machine
unless it was put there.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.rl.environments.arithmetic import Arithmetic
from trainfit.rl.environments.protocol import Environment
from trainfit.rl.environments.xiangqi import Xiangqi
from trainfit.spec.errors import InputError
from trainfit.spec.files import read_bytes
from trainfit.spec.objective import Policy
from trainfit.spec.value import short_hash

FIELD = "objective.environment"
OURS: dict[str, type[Any]] = {"arithmetic": Arithmetic, "xiangqi": Xiangqi}
MAX_FILE_BYTES = 10**7


@dataclass(frozen=True)
class Maker:
    """Makes an environment; it is pickled for worker processes.

    Attributes:
        seed: given to a class that takes one, unless it is among ``arguments``.
    """

    name: str
    arguments: Mapping[str, Any]
    seed: int

    @classmethod
    def of(cls, policy: Policy, seed: int) -> Maker:
        """Return the maker of a recipe's environment."""
        return cls(policy.environment, dict(policy.arguments), seed)

    def __call__(self) -> Environment:
        """Return the environment.

        Raises:
            InputError: no such environment, or its class or file fails.
        """
        kind = OURS.get(self.name) or _class_in_file(self.name)
        given = dict(self.arguments)
        try:
            takes = inspect.signature(kind).parameters
        except ValueError:  # Of a class without a signature, such as one written in C.
            takes = {}
        if "seed" in takes:
            given.setdefault("seed", self.seed)
        try:
            made = kind(**given)
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            field = "objective.arguments" if self.arguments else FIELD
            remedy = f"it takes {', '.join(takes) or 'nothing'}"
            raise InputError(failure_of(error, "making it"), remedy, field=field, value=self.name) from None
        for method in ("prompt", "reward"):
            if not callable(getattr(made, method, None)):
                problem, remedy = (
                    f"has no method {method}",
                    "write prompt(number) and reward(number, completion)",
                )
                raise InputError(problem, remedy, field=FIELD, value=self.name)
        return made

    def digest(self) -> str:
        """Return what identifies the code of a user's file; empty for ours."""
        return "" if self.name in OURS else short_hash(_source(self.name)[0].hex())


def _source(name: str) -> tuple[bytes, Path, str]:
    """Return content and path of ``file.py:Class``, and the class."""
    file, colon, kind = name.rpartition(":")
    if not colon or not file.endswith(".py") or not kind.isidentifier():
        remedy = f"use {' or '.join(OURS)}, or a class of your own such as my_task.py:Task"
        raise InputError("no such environment", remedy, field=FIELD, value=name)
    try:
        return read_bytes(Path(file), MAX_FILE_BYTES), Path(file), kind
    except (FileNotFoundError, NotADirectoryError):
        problem = "no such file"
        raise InputError(problem, "name one by its path from here", field=FIELD, value=name) from None


def _class_in_file(name: str) -> Any:
    _, path, kind = _source(name)
    # Classes are pickled by their module's name, and the file may import its neighbours.
    module_name = f"trainfit_environment_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        problem = failure_of(error, "importing it")
        raise InputError(problem, "correct the file", field=FIELD, value=name) from None
    found = getattr(module, kind, None)
    if not callable(found):
        classes = [one for one, value in vars(module).items() if isinstance(value, type)]
        remedy = f"it defines {', '.join(classes[:5])}" if classes else "define it"
        raise InputError(f"the file has no class {kind}", remedy, field=FIELD, value=name)
    return found


def failure_of(error: BaseException, during: str) -> str:
    """Describe an exception of a user's environment in one line, with the innermost place in its file."""
    if isinstance(error, SyntaxError):
        where = f" (line {error.lineno})"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        outside = [one for one in frames if "trainfit/rl/" not in one.filename.replace("\\", "/")]
        where = f" ({Path(outside[-1].filename).name}, line {outside[-1].lineno})" if outside else ""
    return f"{during} raised {type(error).__name__}: {error}{where}"
