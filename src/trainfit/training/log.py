"""Logs of a run: ``log.jsonl`` (JSON Lines) and TensorBoard event files (extra ``tensorboard``).

``log.jsonl`` has one JSON object per step and evaluation, ``rollouts.jsonl`` one per rollout. A resumed run
drops the lines after its checkpoint's step, because those steps run again; missing lines are reported in a
line of kind ``gap``.
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.files import Appender
from trainfit.spec.optional import optional
from trainfit.training import durable
from trainfit.training.observer import EvalMetrics, RolloutMetrics, RunStart, StepMetrics, TrainSummary

LOG, ROLLOUTS = "log.jsonl", "rollouts.jsonl"
SCALARS = (
    "train/loss", "train/learning_rate", "train/gradient_norm", "speed/step_s", "speed/tokens_per_s",
    "speed/mfu", "speed/hfu", "speed/data_wait_s", "device/peak_memory_bytes", "device/busy",
    "policy/reward", "policy/kl", "policy/clipped_share", "rewards/reward_chosen", "rewards/reward_rejected",
    "rewards/reward_accuracy", "rewards/reward_margin",
)  # fmt: skip
"""TensorBoard tags: a group, and a field of StepMetrics."""
EVALUATED = (
    "loss", "perplexity", "reward", "reward_chosen", "reward_rejected", "reward_accuracy", "reward_margin",
)  # fmt: skip
"""Fields of EvalMetrics, tagged ``eval``."""
FILE_VERSION = "brain.Event:2"  # First event of every file (tensorboard/summary/writer/event_file_writer.py)


class _FileLog:
    """Base of observers that append to a file opened by ``on_start``."""

    _file: Appender | None = None

    def on_checkpoint(self, step: int, path: Path) -> None:
        assert self._file is not None, "on_start comes first"
        self._file.sync()

    def on_step(self, metrics: StepMetrics) -> None: ...
    def on_eval(self, metrics: EvalMetrics) -> None: ...
    def on_end(self, summary: TrainSummary) -> None: ...

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, piece: bytes) -> None:
        """Append one piece: a line of JSON, or a record of TensorBoard with its checksums."""
        assert self._file is not None, "on_start comes first"
        self._file.append(piece)


class JsonlLog(_FileLog):
    """Observer that writes ``log.jsonl``. ``notify`` is called if a resumed log lacks or repeats steps."""

    def __init__(self, notify: Callable[[str], None] = lambda text: None) -> None:
        self._notify = notify

    def on_start(self, run: RunStart) -> None:
        path = Path(run.out) / LOG
        kept = cut_after(path, run.first_step)
        self._file = Appender(path)
        if gaps := kept.gaps(run.first_step):
            self._notify(f"{path} {gaps}; the remaining lines are kept")
            if gaps not in kept.noted:
                self._append({"kind": "gap", "step": run.first_step, "message": gaps})

    def on_step(self, metrics: StepMetrics) -> None:
        self._append({"kind": "step", **metrics.model_dump(mode="json", exclude_none=True)})

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._append({"kind": "eval", **metrics.model_dump(mode="json", exclude_none=True)})

    def _append(self, line: dict[str, object]) -> None:
        self.write(json.dumps(line, allow_nan=False).encode() + b"\n")


class RolloutLog(_FileLog):
    """Observer that writes ``rollouts.jsonl``."""

    def on_start(self, run: RunStart) -> None:
        path = Path(run.out) / ROLLOUTS
        cut_after(path, run.first_step)
        self._file = Appender(path)

    def on_rollout(self, metrics: RolloutMetrics) -> None:
        line = json.dumps({"kind": "rollout", **metrics.model_dump(mode="json")}, allow_nan=False)
        self.write(line.encode() + b"\n")


class TensorBoard(_FileLog):
    """Observer that writes event files; a resumed run hides the events of the steps that run again.

    Events are written in the calling thread: TensorBoard's own writer thread loses events on a full disk.
    """

    def __init__(self) -> None:
        modules = ("compat.proto.event_pb2", "compat.proto.summary_pb2", "summary.writer.record_writer")
        self._proto, self._summary, self._records = (
            optional(f"tensorboard.{module}", "tensorboard", field="tensorboard") for module in modules
        )

    def on_start(self, run: RunStart) -> None:
        folder = Path(run.out) / "tensorboard"
        folder.mkdir(exist_ok=True)
        unique = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = Appender(folder / f"events.out.tfevents.{unique}")
        self._write(file_version=FILE_VERSION)
        if run.first_step:
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._write(step=run.first_step + 1, session_log=start)

    def on_step(self, metrics: StepMetrics) -> None:
        values = {tag: getattr(metrics, tag.partition("/")[2]) for tag in SCALARS}
        self._scalars(metrics.step, {tag: value for tag, value in values.items() if value is not None})

    def on_eval(self, metrics: EvalMetrics) -> None:
        values = {f"eval/{name}": getattr(metrics, name) for name in EVALUATED}
        self._scalars(metrics.step, {tag: value for tag, value in values.items() if value is not None})

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        value = [self._summary.Summary.Value(tag=tag, simple_value=number) for tag, number in values.items()]
        self._write(step=step, summary=self._summary.Summary(value=value))

    def _write(self, **event: Any) -> None:
        content = self._proto.Event(wall_time=time.time(), **event).SerializeToString()
        self._records.RecordWriter(self).write(content)


@dataclass(frozen=True)
class Kept:
    """Kept lines of a resumed log: step numbers in order of the lines, and earlier gap messages."""

    steps: Sequence[int] = ()
    noted: Sequence[object] = ()

    def gaps(self, done: int) -> str:
        """Describe missing, repeated and unordered lines of steps 1 to ``done``, if any."""
        missing = sorted(set(range(1, done + 1)) - set(self.steps))
        twice = sorted(step for step, count in Counter(self.steps).items() if count > 1)
        parts = [f"has no line of {_ranges(missing)}"] if missing else []
        parts += [f"has {_ranges(twice)} more than once"] if twice else []
        parts += ["is not in the order of the steps"] if list(self.steps) != sorted(self.steps) else []
        return ", ".join(parts)


def cut_after(path: Path, step: int) -> Kept:
    """Keep the complete lines up to ``step``; drop later lines and the unfinished one of a killed process.

    Raises:
        InputError: a complete line is not a log line.
        OSError: the file cannot be rewritten; it is unchanged.
    """
    if not path.exists():
        return Kept()
    before = path.read_bytes()
    lines = before[: before.rfind(b"\n") + 1].splitlines(keepends=True)
    entries = [(line, _parsed(line, f"{path}:{number}")) for number, line in enumerate(lines, 1)]
    kept = [(line, entry) for line, entry in entries if int(entry["step"]) <= step]
    content = b"".join(line for line, _ in kept)
    if before.startswith(content):
        os.truncate(path, len(content))  # Needs no space.
    else:
        durable.replace(path, content.decode())
    return Kept(
        [int(entry["step"]) for _, entry in kept if entry.get("kind") == "step"],
        [entry.get("message") for _, entry in kept if entry.get("kind") == "gap"],
    )


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        int(entry["step"])
        return entry
    except (ValueError, KeyError, TypeError):
        remedy = "restore the file, or remove it to log anew"
        raise InputError("the line is not what trainfit wrote", remedy, file=where) from None


def _ranges(steps: Sequence[int]) -> str:
    """Format increasing step numbers such as ``step 3`` or ``steps 3 to 5, 9``."""
    present = set(steps)
    first = [step for step in steps if step - 1 not in present]
    last = [step for step in steps if step + 1 not in present]
    words = [str(one) if one == end else f"{one} to {end}" for one, end in zip(first, last, strict=True)]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(words)}"
