"""Progress of a run: loss, tokens/s, MFU, HFU, peak memory and utilisation.

A live bar on a terminal, otherwise an occasional plain line, on standard error by default.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainfit.spec.terminal import Terminal
from trainfit.spec.units import format_bytes, format_count, format_seconds
from trainfit.training.data.plan import RunData
from trainfit.training.observer import EvalMetrics, PredictedRun, RunStart, StepMetrics, TrainSummary

SHOWN_WAIT = 0.01  # Share of a step from which its wait for data is shown
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
        size = f"{format_count(run.params)} parameters ({format_count(run.trainable_params)} train)"
        trains_on = run.rollouts or (
            f"{format_count(run.train_tokens)} training and {format_count(run.eval_tokens)} evaluation "
            f"tokens, {run.tokenizer_tokens:,} in the tokenizer; {run.tokens_per_step:,} a step"
        )
        self._print(f"{run.model}: {size} on {run.device}; {trains_on}")
        if run.data is not None:
            for line in plan_lines(run.data, run.predicted, run.steps):
                self._print(line)
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
        self._print(f"evaluation after step {metrics.step}: {evaluation_line(metrics)}")

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


def plan_lines(data: RunData, predicted: PredictedRun | None, steps: int) -> list[str]:
    """Return one line each for the size of the data and the prediction of a pass over it."""
    per_step = f"{data.sequences_per_step:,} a step" if data.sequences_per_step > 1 else "one a step"
    document, sequence = ("document", "sequence") if data.each == 1 else ("pair", "pair")
    documents = f"{_counted(data.documents, document)}, {format_count(data.tokens)} tokens"
    lines = [f"data: {documents} in {_counted(data.sequences, sequence)} of {data.seq:,}, {per_step}"]
    if data.each > 1:
        lines = [f"data: {documents}; {data.sequences:,} fit in 2 x {data.seq:,}, {per_step}"]
    is_plain = data.labels == data.sequences * (data.seq - 1)
    more = [] if is_plain else [f"{data.labels / data.epoch_tokens:.1%} of the tokens are learned"]
    more += [f"padding {data.padding:.1%}"] if data.padding else []
    more += [f"{data.cut_tokens / data.tokens:.1%} are in no sequence"] if data.cut_tokens >= data.seq else []
    if data.eval_documents:
        more.append(
            f"held out: {_counted(data.eval_documents, document)}, {format_count(data.eval_tokens)} tokens "
            f"in {_counted(data.eval_sequences, sequence)}"
        )
    lines += ["      " + "; ".join(more)] if more else []
    epoch = f"{data.epoch_steps:,.4g} steps" if data.epoch_steps < 1e4 else f"{data.epoch_steps:,.0f} steps"
    lines.append(f"epoch: {epoch}{_takes(predicted, data.epoch_steps)}")
    run = f"run: {steps:,} steps, {steps / data.epoch_steps:.3g} epochs" if data.epoch_steps else ""
    takes = _takes(predicted, steps) if predicted is not None and predicted.step_s else ""
    lines += [run + takes] if run else []
    if predicted is not None and predicted.eval_bytes and predicted.step_bytes:
        peaks = f"{format_bytes(predicted.eval_bytes)}, the step at {format_bytes(predicted.step_bytes)}"
        lines.append(f"evaluation peaks at {peaks} (allocated, predicted)")
    return lines


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"


def _takes(predicted: PredictedRun | None, steps: float) -> str:
    """Return the predicted time and cost of this many steps."""
    if predicted is None:
        return ""
    where = f"{predicted.num_gpus} x {predicted.gpu}" if predicted.num_gpus > 1 else predicted.gpu
    if predicted.step_s is None:
        return f"; no speed is predicted for {where}"
    run_s = steps * predicted.step_s
    text = f"; {format_seconds(run_s)} predicted on {where}"
    if predicted.price_per_gpu_hour:
        dollars = run_s / 3600 * predicted.num_gpus * predicted.price_per_gpu_hour
        text += f", ${dollars:,.2f}" if dollars >= 0.01 else f", ${dollars:.2g}"
    return text


def evaluation_line(metrics: EvalMetrics) -> str:
    """Return the result of an evaluation in one line."""
    if metrics.reward_accuracy is not None:
        of = f"{_counted(metrics.sequences, 'held-out pair')}"
        return f"loss {metrics.loss:.4f}, {_rewards(metrics)} of {of}"
    if metrics.loss is not None:
        return f"perplexity {metrics.perplexity:.4g}, loss {metrics.loss:.4f}"
    shares = (metrics.shares or {}).items()
    parts = f" ({', '.join(f'{name} in {share:.1%}' for name, share in shares)})" if len(shares) > 1 else ""
    return f"reward {metrics.reward:.4f}{parts} of {metrics.sequences:,} held-out prompts"


def _rewards(metrics: StepMetrics | EvalMetrics) -> str:
    """Return accuracy and margin of pairs."""
    return f"accuracy {metrics.reward_accuracy:.1%}, margin {metrics.reward_margin:.4f}"


def step_line(metrics: StepMetrics, device: str) -> str:
    """Return one step in one line, without unknown values."""
    parts = [] if metrics.reward is None else [f"reward {metrics.reward:.4f}"]
    parts += [f"KL {metrics.kl:.4f}"] if metrics.kl else []
    parts += [_rewards(metrics)] if metrics.reward_accuracy is not None else []
    parts += [f"loss {metrics.loss:.4f}", f"{format_count(metrics.tokens_per_s)} tokens/s"]
    shares = {"MFU": metrics.mfu, "HFU": metrics.hfu}
    parts += [f"{name} {value:.1%}" for name, value in shares.items() if value is not None]
    if metrics.data_wait_s is not None and metrics.data_wait_s >= SHOWN_WAIT * metrics.step_s:
        parts.append(f"waits for data {metrics.data_wait_s / metrics.step_s:.0%}")
    if metrics.peak_memory_bytes is not None:
        parts.append(f"peak {format_bytes(metrics.peak_memory_bytes)}")
    if metrics.busy is not None:
        parts.append(f"{device} {metrics.busy:.0%} busy")
    if metrics.held_back:
        parts.append(f"THROTTLED by the driver: {', '.join(metrics.held_back)}")
    return "  ".join(parts)
