"""Progress of a run: loss, tokens/s, MFU, HFU, peak memory and utilisation.

A live bar on a terminal, otherwise an occasional plain line, on standard error by default.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainfit.spec.terminal import Terminal
from trainfit.spec.units import format_bytes, format_count
from trainfit.training.observer import EvalMetrics, RunStart, StepMetrics, TrainSummary

LINE_EVERY_S = 10.0  # Shortest interval between lines of step metrics without a terminal


class ProgressBar:
    """Observer that shows a run on ``console``; None: standard error."""

    def __init__(self, console: Terminal | None = None) -> None:
        self._console = console or Terminal(stderr=True)
        self._bar: Progress | None = None
        self._visible = True
        self._device, self._steps = "", 0
        self._last_line_s = float("-inf")

    def on_start(self, run: RunStart) -> None:
        self._device, self._steps = "GPU" if run.device_type == "cuda" else "CPU", run.steps
        self._print(
            f"{run.model}: {format_count(run.params)} parameters ({format_count(run.trainable_params)} "
            f"train) on {run.device}; {format_count(run.train_tokens)} training and "
            f"{format_count(run.eval_tokens)} evaluation tokens, {run.tokenizer_tokens:,} in the tokenizer; "
            f"{run.tokens_per_step:,} a step"
        )
        if run.resumed_from:
            self._print(f"resumed after step {run.first_step} from {run.resumed_from}")
        for note in run.notes:
            self._print(f"note: {note}")
        if self._console.is_terminal:
            text = TextColumn("{task.description}", markup=False)
            columns = (BarColumn(20), MofNCompleteColumn(), text, TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._bar.add_task("", total=run.steps, completed=run.first_step)
            self._show(self._bar.start)

    def note(self, text: str) -> None:
        """Show a note of another observer."""
        self._print(f"note: {text}")

    def on_step(self, metrics: StepMetrics) -> None:
        text = step_line(metrics, self._device)
        if self._bar is not None:
            self._show(self._bar.update, self._bar.task_ids[0], completed=metrics.step, description=text)
        elif metrics.step == self._steps or time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self._print(f"step {metrics.step}/{self._steps}  {text}")

    def on_eval(self, metrics: EvalMetrics) -> None:
        result = f"perplexity {metrics.perplexity:.4g}, loss {metrics.loss:.4f}"
        self._print(f"evaluation after step {metrics.step}: {result}")

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._print(f"saved {path}")

    def on_end(self, summary: TrainSummary) -> None:
        self.close()
        if summary.message:
            self._print(f"{summary.status}: {summary.message}")

    def close(self) -> None:
        if self._bar is not None:
            self._show(self._bar.stop)

    def _print(self, text: str) -> None:
        if self._visible:
            self._show(self._console.print, text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, show: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Continue without output if the terminal is gone: the results are in the run's folder."""
        try:
            show(*arguments, **options)
        except OSError:
            self._visible = False


def step_line(metrics: StepMetrics, device: str) -> str:
    """Return one step in one line, without unknown values."""
    parts = [f"loss {metrics.loss:.4f}", f"{format_count(metrics.tokens_per_s)} tokens/s"]
    shares = {"MFU": metrics.mfu, "HFU": metrics.hfu}
    parts += [f"{name} {value:.1%}" for name, value in shares.items() if value is not None]
    if metrics.peak_memory_bytes is not None:
        parts.append(f"peak {format_bytes(metrics.peak_memory_bytes)}")
    if metrics.busy is not None:
        parts.append(f"{device} {metrics.busy:.0%} busy")
    if metrics.held_back:
        parts.append(f"THROTTLED by the driver: {', '.join(metrics.held_back)}")
    return "  ".join(parts)
