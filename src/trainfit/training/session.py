"""The loop itself: steps, evaluations and checkpoints, from where the run is to where it ends.

Enters: a step in its state, the data, and who listens. Leaves: a TrainSummary; the step is changed.
"""

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainfit.measurement.feed import Feed
from trainfit.measurement.meter import is_out_of_memory
from trainfit.step import Batch, Step
from trainfit.training import checkpoint, state
from trainfit.training.checkpoint import Progress
from trainfit.training.corpus import Corpora
from trainfit.training.evaluate import evaluate
from trainfit.training.gauges import Busy, PeakMemory
from trainfit.training.layout import CHECKPOINTS
from trainfit.training.observer import EvalMetrics, Observer, RunStart, StepFlops, StepMetrics, TrainSummary
from trainfit.training.options import TrainOptions
from trainfit.training.order import StepSequences
from trainfit.training.schedule import learning_rate
from trainfit.training.stop import Stopped, StopSignal


class DivergedError(Exception):
    """The loss, or a weight, is not a finite number: nothing that follows would be training."""


@dataclass
class Session:
    """One process's part of a run."""

    step: Step
    corpora: Corpora
    options: TrainOptions
    run: RunStart
    described: dict[str, Any]
    """run.json's content, kept in every checkpoint."""
    flops: StepFlops | None
    observers: Sequence[Observer]
    progress: Progress
    checkpoint: Path | None
    losses: list[float] = field(default_factory=list)
    evaluations: list[EvalMetrics] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of the steps that stand for the others: not the first, not the followed one."""

    def __post_init__(self) -> None:
        self._peak = PeakMemory(self.step, self.options.steps - self.progress.step)
        self._busy = Busy(self.step.device)
        self._cut_short = False

    def go(self, stop: StopSignal) -> TrainSummary:
        """Train until the last step, a signal, a loss that is not finite, or memory runs out.

        A signal before this process's first step is done ends it at once: there is nothing new to save.

        Raises:
            StorageError: a file of the run could not be written; it names the checkpoint that is whole.
        """
        start_s = time.perf_counter()
        status, message = "done", ""
        try:
            self._steps(stop)
            if self._cut_short:
                status, message = "stopped", self._stopped(stop.name)
        except Stopped as stopped:
            status, message = "stopped", self._stopped(stopped.name)
        except DivergedError as error:
            status, message = "diverged", f"{error}; {self._last_good()}"
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else "no memory left"
            status = "out-of-memory"
            message = f"{reason}; lower batch.micro or batch.seq, or recompute; {self._last_good()}"
        summary = self._summary(status, message, time.perf_counter() - start_s)
        for observer in self.observers:
            observer.on_end(summary)
        return summary

    def _steps(self, stop: StopSignal) -> None:
        numbers = range(self.progress.step, self.options.steps)
        stop.raises = len(numbers) > 0
        with Feed(self.step.recipe, self._source(), self.step.device, numbers) as feed:
            batches = next(feed, None)
            while batches is not None and stop.name is None:
                batches = self._one_step(batches, feed, stop)
                self._after_step(stop)
        if not self.evaluations and stop.name is None:
            self._evaluate(stop)  # A run that was already at its end still says how good it is.
        unevaluated = self.options.eval_fraction > 0 and not self._evaluated_last
        self._cut_short = stop.name is not None and (self.progress.step < self.options.steps or unevaluated)

    @property
    def _evaluated_last(self) -> bool:
        return bool(self.evaluations) and self.evaluations[-1].step == self.progress.step

    def _stopped(self, signal_name: str | None) -> str:
        """Where a signal ended the run, and what goes on from there."""
        if self.progress.step == self.options.steps:
            return f"{signal_name} before the last evaluation; --resume evaluates"
        where = f"{signal_name} after step {self.progress.step} of {self.options.steps}"
        if self.checkpoint is None:
            return f"{where}; nothing had been saved, --resume begins with the first step"
        return f"{where}; --resume goes on from it"

    def _after_step(self, stop: StopSignal) -> None:
        """Evaluate and save where it is time to."""
        last = self.progress.step == self.options.steps
        if (last or self._due(self.options.eval_every)) and stop.name is None:
            self._evaluate(stop)
        at_end = (last and self.options.save_last) or stop.name is not None
        if at_end or self._due(self.options.save_every):
            self._save()

    def _one_step(self, batches: list[Batch], feed: Feed, stop: StopSignal) -> list[Batch] | None:
        """Train on ``batches``; the next step's, read while the device works on these."""
        done, index = self.progress.step, len(self.losses)
        rate = self._set_learning_rate(done)
        live = self._peak.following(batches) if self._peak.follows(index) else None
        start_s = time.perf_counter()
        with live or nullcontext():
            loss_tensor = self.step(batches)
        following = next(feed, None)
        loss = loss_tensor.item()
        step_s = time.perf_counter() - start_s
        if live is not None:
            self._peak.take(live)
        elif index > 0:
            self.seconds.append(step_s)
        if not math.isfinite(loss):
            raise DivergedError(
                f"loss is {loss} at step {done + 1}: lower optimizer.lr, warm it up, or use a wider precision"
            )
        stop.raises = False  # From now on there is a step to save.
        self.losses.append(loss)
        self.progress = Progress(done + 1, loss)
        self._tell(self._metrics(loss, rate, step_s))
        return following

    def _set_learning_rate(self, done: int) -> float:
        options, base = self.options, self.step.recipe.optimizer.lr
        rate = learning_rate(
            base, done, steps=options.steps, warmup_steps=options.warmup_steps, schedule=options.schedule
        )
        for optimizer in self.step.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        return rate

    def _source(self) -> StepSequences:
        batch = self.step.recipe.batch
        return StepSequences(self.corpora.train, self.step.recipe.seed, batch.micro * batch.accumulate)

    def _metrics(self, loss: float, rate: float, step_s: float) -> StepMetrics:
        per_step = self.step.recipe.batch.micro * self.step.recipe.batch.accumulate
        norm = self.step.readings["gradient_norm"].item() if "gradient_norm" in self.step.readings else None
        mfu, hfu = self._utilisation(step_s)
        return StepMetrics(
            step=self.progress.step,
            loss=loss,
            learning_rate=rate,
            epoch=self.progress.step * per_step / len(self.corpora.train),
            step_s=step_s,
            tokens_per_s=self.run.tokens_per_step / step_s,
            mfu=mfu,
            hfu=hfu,
            peak_memory_bytes=self._peak.read(),
            busy=self._busy.share(),
            # The loss scaler skips steps whose gradients overflow: their norm is not a number to show.
            gradient_norm=norm if norm is not None and math.isfinite(norm) else None,
        )

    def _utilisation(self, step_s: float) -> tuple[float | None, float | None]:
        """MFU and HFU: FLOPs of a step over what the peak would do in its time; None where the peak is unknown."""
        if self.flops is None or self.flops.peak_flops_per_s is None:
            return None, None
        possible = self.flops.peak_flops_per_s * step_s
        return self.flops.model_flops / possible, self.flops.hardware_flops / possible

    def _tell(self, metrics: StepMetrics) -> None:
        for observer in self.observers:
            observer.on_step(metrics)

    def _due(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    def _evaluate(self, stop: StopSignal) -> None:
        """Evaluate and report it; nothing is reported where a signal ends it."""
        if not len(self.corpora.eval):
            return
        found = evaluate(
            self.step,
            self.corpora.eval,
            at_step=self.progress.step,
            max_sequences=self.options.eval_sequences,
            stopped=lambda: stop.name is not None,
        )
        if found is None and stop.name is not None:
            return
        if found is None:
            raise DivergedError(
                f"evaluation loss is not finite after step {self.progress.step}: lower optimizer.lr"
            )
        self.evaluations.append(found)
        for observer in self.observers:
            observer.on_eval(found)

    def _save(self) -> None:
        # A step whose loss was finite can still leave weights that are not; such a checkpoint would replace good ones.
        broken = state.first_not_finite(self.step)
        if broken is not None:
            raise DivergedError(f"{broken} is not finite after step {self.progress.step}: lower optimizer.lr")
        folder = self.options.folder / CHECKPOINTS
        self.checkpoint = checkpoint.save(
            folder, self.step, self.progress, self.described, keep=self.options.keep
        )
        for observer in self.observers:
            observer.on_checkpoint(self.progress.step, self.checkpoint)

    def _last_good(self) -> str:
        return (
            f"the last good checkpoint is {self.checkpoint}"
            if self.checkpoint
            else "no checkpoint was saved before"
        )

    def _summary(self, status: Any, message: str, wall_s: float) -> TrainSummary:
        step_s = statistics.median(self.seconds) if self.seconds else None
        mfu, hfu = (None, None) if step_s is None else self._utilisation(step_s)
        return TrainSummary(
            status=status,
            message=message,
            steps=self.progress.step,
            first_step=self.run.first_step,
            final_loss=self.progress.loss,
            losses=tuple(self.losses),
            evaluations=tuple(self.evaluations),
            eval_perplexity=self.evaluations[-1].perplexity if self.evaluations else None,
            step_s=step_s,
            tokens_per_s=None if step_s is None else self.run.tokens_per_step / step_s,
            mfu=mfu,
            hfu=hfu,
            peak_memory_bytes=self._peak.read(),
            peak_memory_is=self._peak.kind,
            wall_s=wall_s,
            run=self.run,
            checkpoint=None if self.checkpoint is None else str(self.checkpoint),
        )
