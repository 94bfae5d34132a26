"""The JSONL log: one line a step and one an evaluation, append-only, each line a JSON object with ``kind``.

A resumed run cuts the lines after its checkpoint's step, because those steps are taken again.
"""

import json
import os
from pathlib import Path
from typing import IO

from trainfit.spec.errors import InputError
from trainfit.spec.value import Value
from trainfit.train.observer import EvalMetrics, RunStart, StepMetrics, TrainSummary

LOG = "log.jsonl"


class JsonlLog:
    """Writes ``log.jsonl`` in the run's folder."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def on_start(self, run: RunStart) -> None:
        path = Path(run.out) / LOG
        cut_after(path, run.first_step)
        self._file = path.open("a", encoding="utf-8")

    def on_step(self, metrics: StepMetrics) -> None:
        self._write("step", metrics)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._write("eval", metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        assert self._file is not None, "on_start comes first"
        os.fsync(self._file.fileno())

    def on_end(self, summary: TrainSummary) -> None:
        """The lines of the steps say it all."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, kind: str, value: Value) -> None:
        assert self._file is not None, "on_start comes first"
        known = {key: item for key, item in value.model_dump(mode="json").items() if item is not None}
        self._file.write(json.dumps({"kind": kind, **known}, allow_nan=False) + "\n")
        self._file.flush()


def cut_after(path: Path, step: int) -> None:
    """Keep the whole lines up to ``step``; a line that a killed process left unfinished goes too.

    Raises:
        InputError: a whole line is not one of the log's.
    """
    if not path.exists():
        return
    end = 0
    with path.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n") or _step_of(line, path) > step:
                break
            end += len(line)
        file.truncate(end)


def _step_of(line: bytes, path: Path) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        raise InputError(
            "a line is not what trainfit wrote", "restore the file, or remove it to log anew", file=str(path)
        ) from None
