"""The training loop: steps, evaluations and checkpoints, from the current step to the last.

Shapes: b micro-batch, s sequence.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainfit.measurement.feed import Feed
from trainfit.measurement.meter import is_out_of_memory, out_of_memory_reason
from trainfit.spec.stop import Stopped, StopSignal
from trainfit.step import Batch, Step
from trainfit.training import checkpoint, state
from trainfit.training.checkpoint import Progress
from trainfit.training.corpus import Corpora, Corpus
from trainfit.training.folder import CHECKPOINTS
from trainfit.training.gauges import Busy, PeakMemory
from trainfit.training.observer import EvalMetrics, Observer, RunStart, StepFlops, StepMetrics, TrainSummary
from trainfit.training.options import TrainOptions
from trainfit.training.order import learning_rate, step_sequences

NO_CHECKPOINT = "no checkpoint was saved before"


class DivergedError(Exception):
    """The loss or a weight is not finite."""


@dataclass
class Session:
    """The part of a run that one process trains."""

    step: Step
    corpora: Corpora
    options: TrainOptions
    run: RunStart
    described: dict[str, Any]
    """Content of run.json, copied into every checkpoint."""
    flops: StepFlops | None
    observers: Sequence[Observer]
    progress: Progress
    checkpoint: Path | None
    losses: list[float] = field(default_factory=list)
    evaluations: list[EvalMetrics] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Times of representative steps: not the first, not the one whose live tensors are counted."""

    def __post_init__(self) -> None:
        self._peak = PeakMemory(self.step, self.options.steps - self.progress.step)
        self._busy = Busy(self.step.device)

    def train(self, stop: StopSignal) -> TrainSummary:
        """Train until the last step, a signal, a loss that is not finite, or a lack of memory.

        A signal before this process's first step is done ends it at once: there is nothing new to save.

        Raises:
            StorageError: a file of the run could not be written; it names the newest intact checkpoint.
        """
        start_s = time.perf_counter()
        status, message = "done", ""
        try:
            self._steps(stop)
        except Stopped as stopped:
            status, message = "stopped", self._stop_message(stopped.name)
        except DivergedError as error:
            status, message = "diverged", f"{error}; {self._last_good()}"
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            remedy = "lower batch.micro or batch.seq, or recompute"
            status, message = "out-of-memory", f"{out_of_memory_reason(error)}; {remedy}; {self._last_good()}"
        summary = self._summary(status, message, time.perf_counter() - start_s)
        self._report("on_end", summary)
        return summary

    def _report(self, event: str, *values: object) -> None:
        for observer in self.observers:
            getattr(observer, event)(*values)

    def _steps(self, stop: StopSignal) -> None:
        numbers = range(self.progress.step, self.options.steps)
        stop.raises = len(numbers) > 0
        seed, per_step = self.step.recipe.seed, self._sequences_per_step
        source = partial(step_sequences, self.corpora.train, seed, per_step)
        with Feed(self.step.recipe, source, self.step.device, numbers) as feed:
            batches = next(feed, None)
            while batches is not None and stop.name is None:
                batches = self._one_step(batches, feed, stop)
                self._evaluate_and_save(stop)
        if not self.evaluations:
            self._evaluate(stop)  # A resumed run with no steps left still reports its perplexity.
        evaluated = bool(self.evaluations) and self.evaluations[-1].step == self.progress.step
        complete = self.progress.step == self.options.steps and (evaluated or not self.options.eval_fraction)
        if stop.name is not None and not complete:
            raise Stopped(stop.name)

    @property
    def _sequences_per_step(self) -> int:
        return self.step.recipe.batch.micro * self.step.recipe.batch.accumulate

    def _stop_message(self, signal_name: str | None) -> str:
        """Describe where a signal ended the run, and how to continue."""
        if self.progress.step == self.options.steps:
            return f"{signal_name} before the last evaluation; --resume evaluates"
        where = f"{signal_name} after step {self.progress.step} of {self.options.steps}"
        if self.checkpoint is None:
            return f"{where}; nothing had been saved, --resume begins with the first step"
        return f"{where}; --resume goes on from it"

    def _evaluate_and_save(self, stop: StopSignal) -> None:
        """Evaluate and save after a step, if due."""
        done, options = self.progress.step, self.options
        last = done == options.steps
        if last or (options.eval_every and done % options.eval_every == 0):
            self._evaluate(stop)
        at_end = (last and options.save_last) or stop.name is not None
        if at_end or (options.save_every and done % options.save_every == 0):
            self._save()

    def _one_step(self, batches: list[Batch], feed: Feed, stop: StopSignal) -> list[Batch] | None:
        """Train on ``batches`` and return the next step's, read while the device works."""
        done, index = self.progress.step, len(self.losses)
        rate = learning_rate(self.step.recipe.optimizer.lr, done, self.options)
        for group in (group for optimizer in self.step.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        start_s = time.perf_counter()
        with self._peak.around(index, batches) as counted:
            loss_tensor = self.step(batches)
        following = next(feed, None)
        loss = loss_tensor.item()
        step_s = time.perf_counter() - start_s
        if index > 0 and not counted:
            self.seconds.append(step_s)
        if not math.isfinite(loss):
            remedy = "lower optimizer.lr, warm it up, or use a wider precision"
            raise DivergedError(f"loss is {loss} at step {done + 1}: {remedy}")
        stop.raises = False  # From here on there is a step to save.
        self.losses.append(loss)
        self.progress = Progress(done + 1, loss)
        self._report("on_step", self._metrics(loss, rate, step_s))
        return following

    def _metrics(self, loss: float, rate: float, step_s: float) -> StepMetrics:
        norm = float(self.step.readings.get("gradient_norm", math.nan))
        return StepMetrics(
            step=self.progress.step,
            loss=loss,
            learning_rate=rate,
            epoch=self.progress.step * self._sequences_per_step / len(self.corpora.train),
            **self._rates(step_s),
            peak_memory_bytes=self._peak.read(),
            busy=self._busy.share(),
            # A step that the loss scaler skips has gradients that are not finite.
            gradient_norm=norm if math.isfinite(norm) else None,
        )

    def _rates(self, step_s: float) -> dict[str, Any]:
        """Return the fields that follow from a step's time; MFU and HFU if the device's peak is known."""
        rates = {
            "step_s": step_s,
            "tokens_per_s": self.run.tokens_per_step / step_s,
            "mfu": None,
            "hfu": None,
        }
        if self.flops is not None and self.flops.peak_flops_per_s is not None:
            possible = self.flops.peak_flops_per_s * step_s
            rates |= {"mfu": self.flops.model_flops / possible, "hfu": self.flops.hardware_flops / possible}
        return rates

    def _evaluate(self, stop: StopSignal) -> None:
        """Evaluate and report the result, unless a signal ends the evaluation."""
        if not len(self.corpora.eval) or stop.name is not None:
            return
        found = evaluate(self.step, self.corpora.eval, self.progress.step, self.options.eval_sequences, stop)
        if found is None:
            if stop.name is not None:
                return
            raise self._not_finite("evaluation loss")
        self.evaluations.append(found)
        self._report("on_eval", found)

    def _save(self) -> None:
        # A step with a finite loss can leave weights that are not: they must not replace a good checkpoint.
        broken = state.first_not_finite(self.step)
        if broken is not None:
            raise self._not_finite(broken)
        folder, keep = self.options.folder / CHECKPOINTS, self.options.keep
        self.checkpoint = checkpoint.save(folder, self.step, self.progress, self.described, keep=keep)
        self._report("on_checkpoint", self.progress.step, self.checkpoint)

    def _not_finite(self, name: str) -> DivergedError:
        return DivergedError(f"{name} is not finite after step {self.progress.step}: lower optimizer.lr")

    def _last_good(self) -> str:
        return f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else NO_CHECKPOINT

    def _summary(self, status: Any, message: str, wall_s: float) -> TrainSummary:
        unknown = dict.fromkeys(("step_s", "tokens_per_s", "mfu", "hfu"))
        evaluations = tuple(self.evaluations)
        return TrainSummary(
            status=status,
            message=message,
            steps=self.progress.step,
            first_step=self.run.first_step,
            final_loss=self.progress.loss,
            losses=tuple(self.losses),
            evaluations=evaluations,
            eval_perplexity=evaluations[-1].perplexity if evaluations else None,
            **(self._rates(statistics.median(self.seconds)) if self.seconds else unknown),
            peak_memory_bytes=self._peak.read(),
            peak_memory_is=self._peak.kind,
            wall_s=wall_s,
            run=self.run,
            checkpoint=None if self.checkpoint is None else str(self.checkpoint),
        )


def evaluate(
    step: Step, corpus: Corpus, at_step: int, max_sequences: int, stop: StopSignal
) -> EvalMetrics | None:
    """Return the mean next-token cross-entropy of the first held-out sequences, without dropout.

    Label smoothing and z-loss are left out. The first token of a sequence has no context and is not
    predicted. No random numbers are drawn, so evaluating does not change the training.

    Returns:
        The metrics after ``at_step`` steps; None if a signal ended it or the loss is not finite.
    """
    count = min(max_sequences, len(corpus))
    micro = step.recipe.batch.micro
    start_s = time.perf_counter()
    step.model.eval()
    total = 0.0
    try:
        with torch.no_grad():
            for first in range(0, count, micro):
                if stop.name is not None:
                    return None
                rows = corpus.sequences(np.arange(first, min(first + micro, count)))
                ids_bs = torch.from_numpy(rows).to(step.device)
                # All sequences have equally many tokens, so each weighs the same.
                total += step.cross_entropy({"input_ids": ids_bs, "labels": ids_bs}).item() * len(ids_bs)
    finally:
        step.model.train()
    loss, seconds = total / count, time.perf_counter() - start_s
    if not loss < math.log(1e300):  # NaN too.
        return None
    return EvalMetrics(step=at_step, loss=loss, perplexity=math.exp(loss), sequences=count, eval_s=seconds)
