"""Files of a trial's folder, through which its process is given its task and returns its result.

request.json holds the task. result.json is always a valid Measurement: until the trial ends its status is
"crashed" and its message names the last stage reached, so a killed process keeps its results. Bad input goes
to error.json.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from trainfit.spec.errors import EXIT_BAD_INPUT, EXIT_IO, InputError
from trainfit.spec.files import one_line, storage_failure, write_text
from trainfit.spec.parsing.parse import parse
from trainfit.spec.printable import say
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Environment, Measurement
from trainfit.spec.value import Count, Value

REQUEST, RESULT, ERROR = "request.json", "result.json", "error.json"


class TrialRequest(Value):
    """The task of a trial; ``environment`` is the host's."""

    recipe: Recipe
    steps: Count
    warmup: Count
    device: str
    memory_limit_bytes: Annotated[int, Field(gt=0)] | None = None
    environment: Environment
    body: str = ""
    """``module:function`` that measures in place of ``trial.measure_steps``, with its arguments."""


class ResultFile:
    """The trial's result file. It is replaced atomically, so a reader never sees part of it."""

    def __init__(self, path: Path):
        self._path = path
        self.measurement = parse(Measurement, json.loads(path.read_text()))

    def update(self, **known: Any) -> None:
        """Set fields of the Measurement and write the file."""
        self.measurement = self.measurement.model_copy(update=known)
        draft = self._path.with_suffix(".tmp")
        write_text(draft, self.measurement.model_dump_json())
        os.replace(draft, self._path)


def opened(folder: Path) -> tuple[TrialRequest, ResultFile]:
    """Return the task of ``folder`` and its result file, in which the trial has begun."""
    request = parse(TrialRequest, json.loads((folder / REQUEST).read_text()))
    result = ResultFile(folder / RESULT)
    result.update(message="ended before the model was built")
    return request, result


def refused(folder: Path, error: InputError) -> int:
    """Write the error for the process that started the trial, and return the exit code."""
    fields = {name: getattr(error, name) for name in ("problem", "remedy", "field", "file", "value")}
    write_text(folder / ERROR, json.dumps(fields, default=repr))
    return EXIT_BAD_INPUT


def ended_by_storage(run: Callable[[], int]) -> int:
    """Return ``run``'s exit code, or 74 and one line on standard error if a file cannot be written.

    A storage failure is not a result of the recipe: the command that started the trial ends with it too.
    """
    try:
        return run()
    except Exception as error:
        failure = storage_failure(error)
        if failure is None:
            raise
        say(one_line(OSError(failure.errno, failure.strerror, failure.filename)), err=True)
        return EXIT_IO
