"""The training loop: steps, evaluations and checkpoints, from the current step to the last.

Shapes: b micro-batch, s sequence.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainfit.measurement.feed import Feed
from trainfit.measurement.meter import is_out_of_memory, out_of_memory_reason
from trainfit.spec.bench import SLOWDOWNS
from trainfit.spec.errors import InputError
from trainfit.spec.stop import Stopped, StopSignal
from trainfit.step import Batch, Step
from trainfit.training import checkpoint, folder, state
from trainfit.training.checkpoint import Best, Progress
from trainfit.training.corpus import Corpora
from trainfit.training.folder import CHECKPOINTS, name_of
from trainfit.training.gauges import Load, PeakMemory
from trainfit.training.observer import (
    EvalMetrics,
    Observer,
    RunStart,
    StepFlops,
    StepMetrics,
    TrainSummary,
    pair_fields,
)
from trainfit.training.options import TrainOptions
from trainfit.training.order import learning_rate, step_sequences
from trainfit.training.ranks.exchange import AgreedStop, Ranks
from trainfit.training.rollouts import GENERATION, BatchFeed, Rollouts

NO_CHECKPOINT = "no checkpoint was saved before"


class DivergedError(Exception):
    """The loss or a weight is not finite."""


@dataclass
class Session:
    """The part of a run that one process trains."""

    step: Step
    source: Corpora | Rollouts
    """What it trains on: data, or completions of its own model."""
    options: TrainOptions
    run: RunStart
    described: dict[str, Any]  # Content of run.json, copied into every checkpoint
    flops: StepFlops | None
    observers: Sequence[Observer]
    progress: Progress
    checkpoint: Path | None
    ranks: Ranks
    losses: list[float] = field(default_factory=list)
    evaluations: list[EvalMetrics] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Times of representative steps: not the first, not the one whose live tensors are counted, no throttled
    ones.
    """
    tokens: list[int] = field(default_factory=list)
    """Tokens of these steps on all ranks."""
    waits: list[float] = field(default_factory=list)
    """Seconds of these steps in which a device waited for data, of the rank that waited longest."""
    held_back: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._peak = PeakMemory(self.step, self.options.steps - self.progress.step)
        self._load = Load(self.step.device)
        self._highest: int | None = None  # Peak memory so far, of the rank with the highest
        self._ended_early = ""  # Why, where evaluations no longer improve
        self._rollouts = None if isinstance(self.source, Corpora) else self.source

    def train(self, stop: StopSignal) -> TrainSummary:
        """Train until the last step, a signal, a loss that is not finite, or a lack of memory.

        A signal before this process's first step is done ends it at once: there is nothing new to save.

        Raises:
            StorageError: a file of the run could not be written; it names the newest intact checkpoint.
        """
        start_s = time.perf_counter()
        status, message = "done", ""
        agreed = AgreedStop(stop) if self.ranks.several else stop
        try:
            self._steps(agreed)
            message = self._ended_early
        except Stopped as stopped:
            status, message = "stopped", self._stop_message(stopped.name)
        except DivergedError as error:
            status, message = "diverged", f"{error}; {self._last_good()}"
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            remedy, reason = "lower batch.micro or batch.seq, or recompute", out_of_memory_reason(error)
            if self.ranks.several:  # The other ranks wait for this one: it ends them.
                raise InputError(
                    f"rank {self.ranks.rank}: {reason}", f"{remedy}; {self._last_good()}"
                ) from error
            status, message = "out-of-memory", f"{reason}; {remedy}; {self._last_good()}"
        summary = self._summary(status, message, time.perf_counter() - start_s)
        self._report("on_end", summary)
        return summary

    def _report(self, event: str, *values: object) -> None:
        for observer in self.observers:
            # Observers of runs on data need no ``on_rollout``.
            if event != "on_rollout" or hasattr(observer, event):
                getattr(observer, event)(*values)

    def _steps(self, stop: StopSignal | AgreedStop) -> None:
        numbers = range(self.progress.step, self.options.steps)
        if isinstance(stop, AgreedStop):
            self._agree(stop)
        else:
            stop.raises = len(numbers) > 0
        self._catch_up(stop)
        with self._feed(stop, numbers) as feed:
            batches = self._next(feed)
            while batches is not None and stop.name is None and not self._ended_early:
                batches = self._one_step(batches, feed, stop)
                self._evaluate_and_save(stop)
                if not feed.reads_ahead and stop.name is None and not self._ended_early:
                    batches = self._next(feed)
        if not self.evaluations:
            self._evaluate(stop)  # A resumed run with no steps left still reports its perplexity.
        evaluated = bool(self.evaluations) and self.evaluations[-1].step == self.progress.step
        at_end = self.progress.step == self.options.steps or bool(self._ended_early)
        complete = at_end and (evaluated or not self.options.evaluates)
        if stop.name is not None and not complete:
            self._save_last_step()  # The signal may have come after the step's own chance to save.
            raise Stopped(stop.name)

    def _feed(self, stop: StopSignal | AgreedStop, numbers: range) -> Any:
        """Return the context of a feed."""
        if not isinstance(self.source, Corpora):
            report = partial(self._report, "on_rollout")
            return self.source.feed(numbers, partial(self._pause, stop), report)
        seed, per_step = self.step.recipe.seed, self._sequences_per_step
        share = (self.step.data_rank, self._data_ranks)
        source = partial(step_sequences, self.source.train, seed, per_step, share=share)
        return Feed(self.step.recipe, source, self.step.device, numbers)

    def _next(self, feed: BatchFeed) -> list[Batch] | None:
        """Return the next step's micro-batches; save the last step if a signal or an error prevents it."""
        try:
            return next(feed, None)
        except Stopped:
            self._save_last_step()
            raise
        except InputError as error:
            raise self._after_saving(error) from None

    def _after_saving(self, error: InputError) -> InputError:
        """Save the last step before an error ends the run, and return the error with the newest checkpoint.

        Of several ranks only one may have it, and saving takes all of them.
        """
        if not self.ranks.several:
            self._save_last_step()
        remedy = error.remedy if self.checkpoint is None else f"{error.remedy}; {self._last_good()}"
        return InputError(error.problem, remedy, field=error.field, value=error.value, file=error.file)

    def _save_last_step(self) -> None:
        """Save the last step that this process took, unless it is saved."""
        done = self.progress.step
        is_saved = self.checkpoint is not None and self.checkpoint.name == name_of(done)
        if done > self.run.first_step and not is_saved:
            self._save()

    def _pause(self, stop: StopSignal | AgreedStop, phase: str, together: bool) -> None:
        """Note a phase of generation; end it by ``Stopped`` if a signal was received.

        Several ranks end where they all are. Only a rank that generates gives up when it receives a signal
        itself: it waits for the others where they end.
        """
        self.ranks.enter(self.progress.step + 1, phase)
        if together:
            self._agree(stop)
        if stop.name is not None and (together or not self.ranks.several):
            raise Stopped(stop.name)
        if isinstance(stop, AgreedStop) and not together and phase == GENERATION and stop.received:
            raise Stopped(stop.received)

    @property
    def _data_ranks(self) -> int:
        return self.step.recipe.mesh.data_ranks

    @property
    def _sequences_per_step(self) -> int:
        """Sequences of a step on all ranks."""
        return self.step.recipe.batch.micro * self.step.recipe.batch.accumulate * self._data_ranks

    def _agree(self, stop: StopSignal | AgreedStop, *values: float) -> list[tuple[float, ...]]:
        """Return every rank's values, and let every rank act on a signal that any of them received."""
        if not isinstance(stop, AgreedStop):
            return [values]
        rows = self.ranks.numbers(stop.number, *values)
        stop.agree([row[0] for row in rows])
        return [row[1:] for row in rows]

    def _stop_message(self, signal_name: str | None) -> str:
        """Describe where a signal ended the run, and how to continue."""
        if self.progress.step == self.options.steps:
            return f"{signal_name} before the last evaluation; --resume evaluates"
        where = f"{signal_name} after step {self.progress.step} of {self.options.steps}"
        if self.checkpoint is None:
            return f"{where}; nothing had been saved, --resume begins with the first step"
        return f"{where}; --resume goes on from it"

    def _evaluate_and_save(self, stop: StopSignal | AgreedStop) -> None:
        """Evaluate and save after a step, if due."""
        done, options = self.progress.step, self.options
        last = done == options.steps
        is_best = False
        if last or (options.eval_every and done % options.eval_every == 0):
            is_best = self._evaluate(stop) and options.keep_best
            last = last or bool(self._ended_early)
        at_end = (last and options.save_last) or stop.name is not None
        if at_end or is_best or (options.save_every and done % options.save_every == 0):
            self._save()

    def _one_step(
        self, batches: list[Batch], feed: BatchFeed, stop: StopSignal | AgreedStop
    ) -> list[Batch] | None:
        """Train on ``batches`` and return the next step's, read while the device works."""
        done, index = self.progress.step, len(self.losses)
        rate = learning_rate(self.step.recipe.optimizer.lr, done, self.options)
        for group in (group for optimizer in self.step.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        start_s = time.perf_counter()
        with self._peak.around(index, batches) as counted:
            loss_tensor = self.step(batches, partial(self.ranks.enter, done + 1))
        self.ranks.enter(done + 1, "reading")
        following = next(feed, None) if feed.reads_ahead else None
        self.ranks.enter(done + 1, "waiting for the loss")
        own = loss_tensor.item()
        held_back = self._load.held_back()
        held = sum(2**index for index, one in enumerate(SLOWDOWNS) if one in held_back)
        rows = self._agree(stop, own, self._peak.read() or 0, held, feed.wait_s())
        loss = sum(row[0] for row in rows) / len(rows)
        self._highest = max(int(row[1]) for row in rows) or None
        step_s = time.perf_counter() - start_s
        # Ranks wait for each other: a throttled one slows all of them.
        of_all = [int(row[2]) for row in rows]
        reasons = tuple(one for index, one in enumerate(SLOWDOWNS) if any(row >> index & 1 for row in of_all))
        self.held_back.update(reasons)
        wait_s = max(row[3] for row in rows)
        if index > 0 and not counted and not reasons:
            self.seconds.append(step_s)
            self.waits.append(wait_s)
            self.tokens.append(self._num_tokens())
        if not math.isfinite(loss):
            remedy = "lower optimizer.lr, warm it up, or use a wider precision"
            raise DivergedError(f"loss is {loss} at step {done + 1}: {remedy}")
        stop.raises = False  # From here on a stop saves this step.
        self.losses.append(loss)
        self.progress = Progress(done + 1, loss, self.progress.best)
        self._report("on_step", self._metrics(loss, rate, step_s, wait_s, reasons))
        return following

    def _metrics(
        self, loss: float, rate: float, step_s: float, wait_s: float, held_back: tuple[str, ...]
    ) -> StepMetrics:
        norm = float(self.step.readings.get("gradient_norm", math.nan))
        epoch = 0.0
        if isinstance(self.source, Corpora):
            epoch = self.progress.step * self._sequences_per_step / len(self.source.train)
        is_full = self._rollouts is None or self._rollouts.is_full()
        return StepMetrics(
            step=self.progress.step,
            loss=loss,
            learning_rate=rate,
            epoch=epoch,
            **self._rates(step_s, self._num_tokens() / step_s, has_mfu=is_full),
            data_wait_s=wait_s,
            peak_memory_bytes=self._peak_bytes(),
            busy=self._load.share(),
            held_back=held_back or None,
            # A step that the loss scaler skips has gradients that are not finite.
            gradient_norm=norm if math.isfinite(norm) else None,
            **(self._pair_readings() if self._rollouts is None else self._rollouts.readings()),
        )

    def _pair_readings(self) -> dict[str, float]:
        """Return the rewards of the newest step's pairs on all ranks, of a preference; a collective."""
        if not self.step.compares_pairs:
            return {}
        rows = self.ranks.numbers(*self.step.readings["pair_means"].mean(dim=0).tolist())
        return pair_fields([statistics.fmean(values) for values in zip(*rows, strict=True)])

    def _num_tokens(self) -> int:
        return self.run.tokens_per_step if self._rollouts is None else self._rollouts.num_tokens()

    def _peak_bytes(self) -> int | None:
        return self._highest if self.ranks.several else self._peak.read()

    def _rates(self, step_s: float, tokens_per_s: float, *, has_mfu: bool = True) -> dict[str, Any]:
        """Return the fields that follow from a step's time; MFU and HFU if the device's peak is known.

        Args:
            has_mfu: the step computes what was counted; shorter completions take fewer FLOPs.
        """
        rates = {"step_s": step_s, "tokens_per_s": tokens_per_s, "mfu": None, "hfu": None}
        if has_mfu and self.flops is not None and self.flops.peak_flops_per_s is not None:
            possible = self.flops.peak_flops_per_s * step_s
            rates |= {"mfu": self.flops.model_flops / possible, "hfu": self.flops.hardware_flops / possible}
        return rates

    def _evaluate(self, stop: StopSignal | AgreedStop) -> bool:
        """Evaluate and report the result, unless a signal ends the evaluation; return whether it is best."""
        evaluates = self.options.evaluates
        if isinstance(self.source, Corpora):
            evaluates = len(self.source.eval) > 0
        if not evaluates or stop.name is not None:
            return False
        found = self._evaluation(stop) if self._rollouts is None else self._rewards(stop)
        if found is None:
            if stop.name is not None:
                return False
            raise self._not_finite("evaluation loss")
        self.evaluations.append(found)
        self._report("on_eval", found)
        return self._note_best(found)

    def _note_best(self, found: EvalMetrics) -> bool:
        """Compare an evaluation with the best one; end the run after too many without an improvement."""
        best = self.progress.best
        if best is not None and best.last == found.step:  # A resumed run evaluates its last step again.
            return False
        if best is None or found.cost < best.loss:
            best = Best(step=found.step, loss=found.cost, last=found.step)
        else:
            since = best.evaluations_since + 1
            best = best.model_copy(update={"evaluations_since": since, "last": found.step})
        self.progress = Progress(self.progress.step, self.progress.loss, best)
        self._check_patience()
        return best.step == found.step

    def _catch_up(self, stop: StopSignal | AgreedStop) -> None:
        """Evaluate after the step in which a resumed run was stopped, if an uninterrupted one does."""
        done, every, best = self.progress.step, self.options.eval_every, self.progress.best
        is_due = every is not None and done > 0 and done % every == 0 and done < self.options.steps
        if is_due and (best is None or best.last < done) and self._evaluate(stop):
            self._write_best()
        self._check_patience()

    def _write_best(self) -> None:
        best, out = self.progress.best, self.options.folder
        if self.options.keep_best:
            self.ranks.on_first(lambda: folder.write_best(out, best and best.model_dump()))

    def _check_patience(self) -> None:
        """End the run after too many evaluations without an improvement."""
        best, patience = self.progress.best, self.options.patience
        if not patience or best is None or self.progress.step >= self.options.steps:
            return
        if best.evaluations_since >= patience:
            count = f"{best.evaluations_since} evaluations were no better"
            what = f"loss {best.loss:.4f}" if self._rollouts is None else f"reward {-best.loss:.4f}"
            than = f"than the {what} of step {best.step}"
            self._ended_early = f"ended early after step {self.progress.step}: {count} {than}"

    def _rewards(self, stop: StopSignal | AgreedStop) -> EvalMetrics | None:
        """Return the mean reward of held-out prompts; None if a signal ended it."""
        assert self._rollouts is not None
        count, pause = self.options.eval_sequences, partial(self._pause, stop)
        try:
            return self._rollouts.evaluation(self.progress.step, count, pause)
        except Stopped:
            if not self.ranks.several and stop.name is None:
                raise  # From an enclosing handler.
            return None
        except InputError as error:
            raise self._after_saving(error) from None

    def _evaluation(self, stop: StopSignal | AgreedStop) -> EvalMetrics | None:
        """Return the mean next-token cross-entropy of the first held-out examples, without dropout.

        Label smoothing and z-loss are left out. Of pairs of answers: their mean loss and rewards. The first
        token of a sequence has no context and is not predicted. No random numbers are drawn, so evaluating
        does not change the training. Every rank evaluates a share; all run equally many forwards, since
        sharded weights are gathered by all.

        Returns:
            None if a signal ended it or the loss is not finite.
        """
        assert isinstance(self.source, Corpora)
        step, corpus = self.step, self.source.eval
        count = min(self.options.eval_sequences, len(corpus))
        micro = self.options.eval_batch or step.recipe.batch.micro
        start_s = time.perf_counter()
        step.model.eval()
        total, weight = np.zeros(4), 0
        try:
            with torch.no_grad():
                for first in range(0, count, micro * self._data_ranks):
                    self.ranks.enter(self.progress.step, "evaluation")
                    self._agree(stop)
                    if stop.name is not None:
                        return None
                    begin = first + micro * step.data_rank
                    counts = begin < count
                    # A rank without a share repeats the last sequence, which does not count.
                    begin, end = (begin, min(begin + micro, count)) if counts else (count - 1, count)
                    numbers = np.arange(begin, end)
                    batch = {
                        name: torch.from_numpy(array).to(step.device)
                        for name, array in corpus.batch(numbers).items()
                    }
                    batch.setdefault("labels", batch["input_ids"])
                    size = len(numbers) if step.compares_pairs else int(corpus.num_labels(numbers).sum())
                    size = size if counts else 0
                    found = step.preferences(batch) if step.compares_pairs else step.cross_entropy(batch)
                    total += size * found.double().cpu().numpy()
                    weight += size
        finally:
            step.model.train()
        every = np.array(self.ranks.numbers(*total, weight))
        loss, *rewards = (every[:, :-1].sum(axis=0) / every[:, -1].sum()).tolist()
        if not loss < math.log(1e300):  # NaN too.
            return None
        more: dict[str, Any] = pair_fields(rewards) if step.compares_pairs else {"perplexity": math.exp(loss)}
        eval_s, at_step = time.perf_counter() - start_s, self.progress.step
        return EvalMetrics(step=at_step, loss=loss, sequences=count, eval_s=eval_s, **more)

    def _save(self) -> None:
        # A step with a finite loss can leave weights that are not: they must not replace a good checkpoint.
        self.ranks.enter(self.progress.step, "checkpoint")
        broken = next(filter(None, self.ranks.gather(state.first_not_finite(self.step))), None)
        if broken is not None:
            raise self._not_finite(broken)
        where, options = self.options.folder / CHECKPOINTS, self.options
        best = self.progress.best
        self.checkpoint = checkpoint.save(
            where, self.step, self.progress, self.described, keep=options.keep, ranks=self.ranks,
            best=best.step if best is not None and options.keep_best else None,
            queue=None if self._rollouts is None else self._rollouts.queue(),
        )  # fmt: skip
        self._report("on_checkpoint", self.progress.step, self.checkpoint)

    def _not_finite(self, name: str) -> DivergedError:
        return DivergedError(f"{name} is not finite after step {self.progress.step}: lower optimizer.lr")

    def _last_good(self) -> str:
        return f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else NO_CHECKPOINT

    def _summary(self, status: Any, message: str, wall_s: float) -> TrainSummary:
        unknown: dict[str, Any] = dict.fromkeys(("step_s", "tokens_per_s", "mfu", "hfu"))
        evaluations = tuple(self.evaluations)
        rates = unknown
        if self.seconds:
            step_s, full = statistics.median(self.seconds), self.run.tokens_per_step
            of_data = self._rollouts is None
            tokens_per_s = full / step_s if of_data else sum(self.tokens) / sum(self.seconds)
            rates = self._rates(step_s, tokens_per_s, has_mfu=of_data)
        return TrainSummary(
            status=status,
            message=message,
            steps=self.progress.step,
            first_step=self.run.first_step,
            final_loss=self.progress.loss,
            losses=tuple(self.losses),
            evaluations=evaluations,
            eval_perplexity=evaluations[-1].perplexity if evaluations else None,
            eval_reward=evaluations[-1].reward if evaluations else None,
            **rates,
            data_wait_share=sum(self.waits) / sum(self.seconds) if self.seconds else None,
            peak_memory_bytes=self._peak_bytes(),
            peak_memory_is=self._peak.kind,
            wall_s=wall_s,
            run=self.run,
            checkpoint=None if self.checkpoint is None else str(self.checkpoint),
            held_back=dict(self.held_back),
        )
