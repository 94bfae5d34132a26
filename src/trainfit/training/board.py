"""TensorBoard: scalars in ``tensorboard/`` of the run's folder (extra ``tensorboard``).

Events are written as they come, in this thread: TensorBoard's own writer has a thread of its own, whose traceback on a
full disk is printed and whose events are lost.
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

from trainfit.spec.optional import optional
from trainfit.spec.storage import Appender
from trainfit.training.observer import EvalMetrics, RunStart, StepMetrics, TrainSummary

SCALARS = {
    "train/loss": "loss",
    "train/learning_rate": "learning_rate",
    "train/gradient_norm": "gradient_norm",
    "speed/step_s": "step_s",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/mfu": "mfu",
    "speed/hfu": "hfu",
    "device/peak_memory_bytes": "peak_memory_bytes",
    "device/busy": "busy",
}
"""Tag of each field of StepMetrics."""
FILE_VERSION = "brain.Event:2"
"""The first event of every file (tensorboard/summary/writer/event_file_writer.py)."""


class TensorBoard:
    """Writes event files; a resumed run hides the events of the steps that it takes again.

    Raises:
        InputError: TensorBoard is not installed.
        OSError: the disk does not take an event.
    """

    def __init__(self) -> None:
        self._proto: Any = optional("tensorboard.compat.proto.event_pb2", "tensorboard", field="tensorboard")
        self._summary: Any = optional(
            "tensorboard.compat.proto.summary_pb2", "tensorboard", field="tensorboard"
        )
        self._records: Any = optional(
            "tensorboard.summary.writer.record_writer", "tensorboard", field="tensorboard"
        )
        self._file: Appender | None = None

    def on_start(self, run: RunStart) -> None:
        folder = Path(run.out) / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = Appender(folder / name)
        self._write(file_version=FILE_VERSION)
        if run.first_step:
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._write(step=run.first_step + 1, session_log=start)

    def on_step(self, metrics: StepMetrics) -> None:
        values = {tag: getattr(metrics, field) for tag, field in SCALARS.items()}
        self._scalars(metrics.step, {tag: value for tag, value in values.items() if value is not None})

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._scalars(metrics.step, {"eval/loss": metrics.loss, "eval/perplexity": metrics.perplexity})

    def on_checkpoint(self, step: int, path: Path) -> None:
        assert self._file is not None, "on_start comes first"
        self._file.sync()

    def on_end(self, summary: TrainSummary) -> None:
        """The scalars of the steps say it all."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        value = [self._summary.Summary.Value(tag=tag, simple_value=number) for tag, number in values.items()]
        self._write(step=step, summary=self._summary.Summary(value=value))

    def _write(self, **event: Any) -> None:
        assert self._file is not None, "on_start comes first"
        content = self._proto.Event(wall_time=time.time(), **event).SerializeToString()
        self._records.RecordWriter(_Piece(self._file)).write(content)


class _Piece:
    """What TensorBoard's record writer writes to: each record, header and checksums included, is one piece."""

    def __init__(self, file: Appender):
        self._file = file

    def write(self, record: bytes) -> None:
        self._file.append(record)
