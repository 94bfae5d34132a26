"""The JSONL log: one line a step and one an evaluation, append-only, each line a JSON object with ``kind``.

A resumed run cuts the lines after its checkpoint's step, because those steps are taken again. Where lines before it are
missing, it says so, and notes it in a line of kind ``gap``.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.storage import Appender, write_text
from trainfit.spec.value import Value
from trainfit.training.observer import EvalMetrics, RunStart, StepMetrics, TrainSummary

LOG = "log.jsonl"


class JsonlLog:
    """Writes ``log.jsonl`` in the run's folder.

    Args:
        say: hears of a resumed log that has not each step once and in order.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._say = say
        self._file: Appender | None = None

    def on_start(self, run: RunStart) -> None:
        path = Path(run.out) / LOG
        kept = cut_after(path, run.first_step)
        self._file = Appender(path)
        if gaps := kept.gaps(run.first_step):
            self._say(f"{path} {gaps}; what is there is kept")
            if gaps not in kept.noted:
                self._append({"kind": "gap", "step": run.first_step, "message": gaps})

    def on_step(self, metrics: StepMetrics) -> None:
        self._write("step", metrics)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._write("eval", metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        assert self._file is not None, "on_start comes first"
        self._file.sync()

    def on_end(self, summary: TrainSummary) -> None:
        """The lines of the steps say it all."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, kind: str, value: Value) -> None:
        known = {key: item for key, item in value.model_dump(mode="json").items() if item is not None}
        self._append({"kind": kind, **known})

    def _append(self, line: dict[str, object]) -> None:
        assert self._file is not None, "on_start comes first"
        self._file.append(json.dumps(line, allow_nan=False).encode() + b"\n")


@dataclass(frozen=True)
class Kept:
    """What a resumed run keeps of its log: the steps, in the order of their lines."""

    steps: Sequence[int]
    noted: Sequence[object]
    """What was wrong when it was resumed before."""

    def gaps(self, done: int) -> str:
        """Return what is wrong with the lines of steps 1 to ``done``; nothing where each is there once, in order."""
        found = set(self.steps)
        missing = [step for step in range(1, done + 1) if step not in found]
        twice = sorted(step for step, count in Counter(self.steps).items() if count > 1)
        parts = [f"has no line of {_ranges(missing)}"] if missing else []
        parts += [f"has {_ranges(twice)} more than once"] if twice else []
        parts += ["is not in the order of the steps"] if any(b < a for a, b in pairwise(self.steps)) else []
        return ", ".join(parts)


def cut_after(path: Path, step: int) -> Kept:
    """Keep the whole lines up to ``step``; a line that a killed process left unfinished goes too.

    Raises:
        InputError: a whole line is not one of the log's.
        OSError: the file cannot be rewritten; it is as before.
    """
    if not path.exists():
        return Kept((), ())
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    entries = [(line, _parsed(line, f"{path}:{number}")) for number, line in enumerate(lines, 1)]
    kept = [(line, entry) for line, entry in entries if int(entry["step"]) <= step]
    _rewrite(path, [line for line, _ in kept])
    return Kept(
        [int(entry["step"]) for _, entry in kept if entry.get("kind") == "step"],
        [entry.get("message") for _, entry in kept if entry.get("kind") == "gap"],
    )


def _rewrite(path: Path, lines: Iterable[bytes]) -> None:
    """Cut the file where its beginning is kept, which needs no space; else replace it as a whole."""
    content, before = b"".join(lines), path.read_bytes()
    if before.startswith(content):
        os.truncate(path, len(content))
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_text(draft, content.decode())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        int(entry["step"])
        return entry
    except (ValueError, KeyError, TypeError):
        raise InputError(
            "the line is not what trainfit wrote", "restore the file, or remove it to log anew", file=where
        ) from None


def _ranges(steps: Sequence[int]) -> str:
    """Such as ``step 3`` or ``steps 3 to 5, 9``."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], step]
        else:
            runs.append([step])
    words = [str(run[0]) if run[0] == run[-1] else f"{run[0]} to {run[-1]}" for run in runs]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(words)}"
