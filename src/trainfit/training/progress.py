"""The progress bar: loss, tokens/s, MFU, HFU, peak memory and how busy the device is.

On a terminal a live bar; elsewhere (a log file, CI) a plain line now and then. Always to the console it is given, so
that standard output stays free for JSON.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainfit.spec.terminal import Terminal
from trainfit.spec.units import format_bytes, format_count
from trainfit.training.observer import EvalMetrics, RunStart, StepMetrics, TrainSummary

LINE_EVERY_S = 10.0
"""Without a terminal, at most one line of step metrics in so many seconds."""


class ProgressBar:
    """Shows a run on ``console``; None: standard error."""

    def __init__(self, console: Terminal | None = None) -> None:
        self._console = console or Terminal(stderr=True)
        self._bar: Progress | None = None
        self._seen = True
        self._device, self._steps = "", 0
        self._last_line_s = float("-inf")

    def on_start(self, run: RunStart) -> None:
        self._device, self._steps = "GPU" if run.device_type == "cuda" else "CPU", run.steps
        self._say(
            f"{run.model}: {format_count(run.params)} parameters ({format_count(run.trainable_params)} train) on "
            f"{run.device}; {format_count(run.train_tokens)} training and {format_count(run.eval_tokens)} evaluation "
            f"tokens, {run.tokenizer_tokens:,} in the tokenizer; {run.tokens_per_step:,} a step"
        )
        if run.resumed_from:
            self._say(f"resumed after step {run.first_step} from {run.resumed_from}")
        for note in run.notes:
            self._say(f"note: {note}")
        if self._console.is_terminal:
            columns = (
                BarColumn(20),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._bar.add_task("", total=run.steps, completed=run.first_step)
            with self._not_needed():
                self._bar.start()

    def note(self, text: str) -> None:
        """Show one line of another observer."""
        self._say(f"note: {text}")

    def on_step(self, metrics: StepMetrics) -> None:
        text = step_line(metrics, self._device)
        if self._bar is not None:
            with self._not_needed():
                self._bar.update(self._bar.task_ids[0], completed=metrics.step, description=text)
        elif metrics.step == self._steps or time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self._say(f"step {metrics.step}/{self._steps}  {text}")

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._say(
            f"evaluation after step {metrics.step}: perplexity {metrics.perplexity:.4g}, loss {metrics.loss:.4f}"
        )

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._say(f"saved {path}")

    def on_end(self, summary: TrainSummary) -> None:
        self.close()
        if summary.message:
            self._say(f"{summary.status}: {summary.message}")

    def close(self) -> None:
        if self._bar is not None:
            with self._not_needed():
                self._bar.stop()

    def _say(self, text: str) -> None:
        if self._seen:
            with self._not_needed():
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _not_needed(self) -> Iterator[None]:
        """Go on without a terminal that is gone: what a run makes is in its folder, and hours of work are not for show."""
        try:
            yield
        except OSError:
            self._seen = False


def step_line(metrics: StepMetrics, device: str) -> str:
    """One step in one line; what is not known is left out."""
    parts = [f"loss {metrics.loss:.4f}", f"{format_count(metrics.tokens_per_s)} tokens/s"]
    if metrics.mfu is not None:
        parts.append(f"MFU {metrics.mfu:.1%}")
    if metrics.hfu is not None:
        parts.append(f"HFU {metrics.hfu:.1%}")
    if metrics.peak_memory_bytes is not None:
        parts.append(f"peak {format_bytes(metrics.peak_memory_bytes)}")
    if metrics.busy is not None:
        parts.append(f"{device} {metrics.busy:.0%} busy")
    return "  ".join(parts)
