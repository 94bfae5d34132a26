"""Measure a policy's loop on a real device: memory and time of rollout, scoring and update.

The parts are those that ``train`` runs, without environment and rewards: prompts are random tokens, and every
completion is generated to its longest, as no token ends it. Loops with the lengths that a prediction assumes
follow, for their time alone: completions end at these lengths. The first loop is not timed. A part begins and
ends with an idle device, so the host's clock gives its time; the driver's readings of utilisation are those
that lie wholly within a part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch

from trainfit.ledger.ledger import RECORDED
from trainfit.measurement.meter import is_out_of_memory
from trainfit.measurement.nvml import mean_utilisation
from trainfit.measurement.run import measure as measure_recipe
from trainfit.measurement.trial import Rank, joined, measured_step, memory_fields, note_breakdown, note_end
from trainfit.measurement.trial_files import ResultFile, TrialRequest
from trainfit.models.layers import num_weights
from trainfit.rl.estimate.lengths import of_mean_new
from trainfit.rl.estimate.names import DECODE, GATHER, PREFILL, REFERENCE, SCORING, UPDATE, body_of
from trainfit.rl.rollout import phases
from trainfit.rl.rollout.generate import Generator
from trainfit.rl.rollout.schedule import READ_EVERY
from trainfit.rl.shares import Share, check_counts, positions
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Loop, LoopMemory, LoopPart, LoopTime, Measurement, MemoryBreakdown
from trainfit.step import Batch, Step, assemble
from trainfit.techniques import registry

MOST_LOOPS = 3
"""Loops that are timed at most, whatever the number of steps. Without any, one runs for its memory."""


def measure(recipe: Recipe, **how: Any) -> Measurement:
    """Return ``measurement.run.measure`` of the recipe's step, or of its loop if it has one."""
    return measure_recipe(recipe, body=body_of(recipe), **how)


class _Span(NamedTuple):
    """A part while it ran, on the clock of ``time.perf_counter``."""

    part: str
    begin_s: float
    end_s: float


class _Parts:
    """Peaks and times of a loop's parts.

    Args:
        rank: waits for the other ranks before each part; None: one GPU.
    """

    def __init__(self, meter: Any, rank: Rank | None, result: ResultFile):
        self.meter, self.rank, self.result = meter, rank, result
        self.memory: dict[str, LoopMemory] = {}
        self.spans: list[_Span] = []

    @contextmanager
    def part(self, phase: str, part: str) -> Iterator[None]:
        """Measure what runs inside."""
        self.result.update(message=f"ended in {phase}, {part}")
        self.meter.enter_phase("forward" if phase != "update" else "optimizer")
        self.wait()
        begin = time.perf_counter()
        yield
        self.wait()
        self.spans.append(_Span(part, begin, time.perf_counter()))
        self.take(phase)

    def wait(self) -> None:
        """Wait until the device is idle, and that of every rank."""
        if self.rank is not None:
            self.rank.align(self.meter.device)
        elif self.meter.device.type == "cuda":
            torch.cuda.synchronize(self.meter.device)

    def take(self, phase: str) -> None:
        """Note the peaks since the last call."""
        reserved, taken = self.meter.reserved(), self.meter.take()
        if taken is not None:
            self.note(phase, taken[0], reserved or taken[0], taken[1])

    def note(self, phase: str, peak: int, reserved: int, breakdown: MemoryBreakdown | None) -> None:
        """Keep the higher of these peaks and those of the phase so far."""
        before = self.memory.get(phase)
        if before is not None:
            if before.peak_allocated_bytes >= peak:
                peak, breakdown = before.peak_allocated_bytes, before.breakdown
            reserved = max(reserved, before.peak_reserved_bytes)
        self.memory[phase] = LoopMemory(
            phase=phase, peak_allocated_bytes=peak, peak_reserved_bytes=reserved, breakdown=breakdown
        )


def measure_loops(request: TrialRequest, meter: Any, result: ResultFile, rank: Rank | None) -> None:
    """Build the step and its generator, run a first loop, then timed ones; update ``result``.

    Raises:
        InputError: the recipe cannot be built, or does not generate.
    """
    recipe = request.recipe
    registry.check(recipe)
    phases.check(recipe)
    check_counts(recipe)
    mesh = None if rank is None else rank.join(recipe, meter.device)
    registry.check_device(recipe, meter.device.type)
    result.update(message="ended while the model and optimizer were built")
    parts = _Parts(meter, rank, result)
    with meter.watching():
        step = assemble(recipe, meter.device, mesh=mesh)
        after_init = meter.settle(step)
        weights = list(step.model.parameters())
        result.update(
            params=num_weights(step.model),
            trainable_params=sum(one.numel() for one in weights if one.requires_grad),
            peak_allocated_bytes=after_init,
        )
        loop = _Loop(step, parts, result)
        steady = max(1, min(request.steps, MOST_LOOPS))
        loop.run()
        watch = meter.watched() if hasattr(meter, "watched") else nullcontext()
        first = len(parts.spans)
        with watch as watched:
            for _ in range(steady):
                loop.run()
        spans = parts.spans[first:]
    if after_init is not None:
        result.update(**memory_fields(after_init, loop.steps))
        highest = max(one.peak_allocated_bytes for one in parts.memory.values())
        result.update(peak_allocated_bytes=max(result.measurement.peak_allocated_bytes or 0, highest))
    updates = [one for one in spans if one.part == UPDATE]
    if watched is not None:
        meter.note(watched, [(one.begin_s, one.end_s) for one in updates])
    readings = [] if watched is None else watched.readings
    timed = _time(recipe, spans, steady, readings) if request.steps else None
    result.update(
        losses=tuple(loop.losses),
        loop=Loop(
            completions=phases.policy_of(recipe).completions,
            slots=loop.generator.cache.num_slots,
            cache_bytes=loop.generator.cache.num_bytes,
            memory=tuple(parts.memory.values()),
            longest=timed,
        ),
    )
    seconds = [one.end_s - one.begin_s for one in updates] if request.steps else []
    highest = result.measurement.peak_allocated_bytes
    note_end(recipe, meter, result, seconds)
    if highest is not None:
        result.update(peak_allocated_bytes=max(highest, result.measurement.peak_allocated_bytes or 0))
    if rank is None:
        note_breakdown(recipe, meter, result, step, step.random_batches())
    if request.steps:
        _note_expected(loop, steady)


def _note_expected(loop: _Loop, num_loops: int) -> None:
    """Time loops with the lengths that a prediction assumes; running out of memory here costs only that."""
    result, count = loop.parts.result, loop.step.recipe.hardware.count
    if loop.parts.meter.device.type == "cuda":
        torch.cuda.empty_cache()  # What the longest loops cached is of other sizes.
    try:
        timed = loop.expected(num_loops)
    except (RuntimeError, MemoryError) as error:
        if count > 1 or not is_out_of_memory(error):
            raise
        lacking = "no time of expected lengths: they ran out of memory"
        result.update(message=joined(result.measurement.message, lacking))
        return
    assert result.measurement.loop is not None
    result.update(loop=result.measurement.loop.model_copy(update={"expected": timed}))


class _Loop:
    """The parts of a loop, run one after another."""

    def __init__(self, step: Step, parts: _Parts, result: ResultFile):
        self.step, self.parts, self.result = step, parts, result
        self.policy = phases.policy_of(step.recipe)
        with parts.part("rollout", GATHER):
            self.generator: Generator = phases.generator_of(step, phases.sampling_of(step.recipe, ()))
            parts.meter.own(self.generator.state_tensors, "kv_cache")
        self.losses: list[float] = []
        self.steps: list[Any] = []
        """Phases' peaks of each update, and their breakdown."""
        self.count = -(-self.policy.completions // step.recipe.mesh.data_ranks)

    def run(self) -> None:
        """Run one loop."""
        self._rollout()
        self._score()
        for _ in range(self.policy.updates_per_rollout):
            self._update()

    def _rollout(self) -> None:
        step, parts, generator = self.step, self.parts, self.generator
        if step.shards_weights:
            generator.forget()
        with self._generating():
            waiting, slots = self.count, generator.cache.num_slots
            while waiting:
                taken = min(slots, waiting)
                waiting -= taken
                prompts = torch.randint(_vocabulary(step), (taken, self.policy.max_prompt)).tolist()
                with parts.part("rollout", PREFILL):
                    generator.read(prompts)
                if not generator.is_recorded:
                    with parts.part("rollout", RECORDED):
                        generator.record()
                with parts.part("rollout", DECODE):
                    for number in range(self.policy.max_new - 1):
                        generator.append()
                        if (number + 1) % READ_EVERY == 0 and step.device.type == "cuda":
                            # As where ended sequences are looked for.
                            torch.cuda.current_stream(step.device).synchronize()

    @contextmanager
    def _generating(self) -> Iterator[None]:
        context = phases.generating(self.step)
        with self.parts.part("rollout", GATHER):
            context.__enter__()
        try:
            yield
        finally:
            context.__exit__(None, None, None)
            self.parts.take("rollout")  # Gathered weights are free now: scoring's peak begins without them.

    def _score(self) -> None:
        recipe = self.step.recipe
        ids = self.step.random_batches()[0]["input_ids"]
        num = -(-self.count // recipe.batch.micro)
        names = (SCORING, REFERENCE) if self.step.reference is not None else (SCORING,)
        for name in names:
            with self.parts.part("scoring", name):
                for _ in range(num):
                    phases.score(self.step, ids, reference=name == REFERENCE)

    def expected(self, num_loops: int) -> LoopTime:
        """Return the mean time of loops with the lengths that a prediction assumes, after an untimed one."""
        recipe, policy = self.step.recipe, self.policy
        recorded = of_mean_new(recipe)
        lengths = recorded.rollouts[0].completions
        seconds: dict[str, float] = {"rollout": 0.0, "scoring": 0.0, "update": 0.0}
        for number in range(num_loops + 1):
            for name, run in (
                ("rollout", self._rollout_of), ("scoring", self._score_of), ("update", self._update_of)
            ):  # fmt: skip
                self.parts.wait()
                begin = time.perf_counter()
                run(lengths)
                self.parts.wait()
                seconds[name] += (time.perf_counter() - begin) * (number > 0) / num_loops
        new_tokens = sum(lengths)
        tokens = new_tokens + policy.completions * policy.max_prompt
        calls = {"update": policy.updates_per_rollout}
        parts = tuple(
            LoopPart(
                name=name, calls=calls.get(name, 1), seconds=taken,
                tokens=new_tokens if name == "rollout" else tokens,
            )
            for name, taken in seconds.items()
        )  # fmt: skip
        total_s = sum(seconds.values())
        return LoopTime(
            lengths=recorded.words, mean_new=new_tokens / policy.completions, seconds=total_s,
            new_tokens_per_s=new_tokens / total_s if total_s else None, parts=parts,
        )  # fmt: skip

    def _rollout_of(self, lengths: Sequence[int]) -> None:
        step, first = self.step, self.step.data_rank * self.count
        mine = lengths[first : first + self.count]
        prompts = torch.randint(_vocabulary(step), (len(mine), self.policy.max_prompt)).tolist()
        if step.shards_weights:
            self.generator.forget()
        with phases.generating(step):
            for _ in self.generator.completions(prompts, lengths=mine):
                pass

    def _score_of(self, lengths: Sequence[int]) -> None:
        for update in range(self.policy.updates_per_rollout):
            for batch in self._micro_batches(update, lengths):
                phases.score(self.step, batch["input_ids"]).cpu()
                if self.step.reference is not None:
                    phases.score(self.step, batch["input_ids"], reference=True).cpu()

    def _update_of(self, lengths: Sequence[int]) -> None:
        for update in range(self.policy.updates_per_rollout):
            self.step(list(self._micro_batches(update, lengths)))

    def _micro_batches(self, update: int, lengths: Sequence[int]) -> Iterator[Batch]:
        """Yield an update's micro-batches of random tokens, as long as these completions make them."""
        step, policy, batch = self.step, self.policy, self.step.recipe.batch
        share = Share(
            policy.completions, policy.updates_per_rollout, step.recipe.mesh.data_ranks, step.data_rank,
            batch.micro,
        )  # fmt: skip
        whole = bool(step.recipe.compile)
        for rows, random in zip(share.micro_batches(update), step.random_batches(), strict=True):
            longest = policy.max_prompt + max(lengths[number] for number in share.every()[rows])
            most = positions(longest, batch.seq, whole)
            yield {name: tensor[:, :most].contiguous() for name, tensor in random.items()}

    def _update(self) -> None:
        parts, meter = self.parts, self.parts.meter
        parts.wait()
        begin = time.perf_counter()
        batches = self.step.random_batches()
        loss, taken = measured_step(self.step, batches, meter, self.result, len(self.losses) + 1)
        self.losses.append(loss.item())
        parts.wait()
        parts.spans.append(_Span(UPDATE, begin, time.perf_counter()))
        self.steps.append(taken)
        peaks, breakdown = taken
        parts.note("update", peaks.peak, meter.reserved() or peaks.peak, breakdown)


def _vocabulary(step: Step) -> int:
    return phases.decoder_of(step.model).config.vocab_size


def _time(recipe: Recipe, spans: list[_Span], num_loops: int, readings: Any) -> LoopTime:
    """Return the mean loop: the median of a part that runs once a loop, the mean of others."""
    policy = phases.policy_of(recipe)
    ranks, of_rank = recipe.mesh.data_ranks, -(-policy.completions // recipe.mesh.data_ranks)
    slots = min(policy.rollout.batch, of_rank)
    rounds = -(-of_rank // slots)
    num_micro = -(-of_rank // recipe.batch.micro)
    calls = {
        PREFILL: rounds, DECODE: rounds * (policy.max_new - 1), SCORING: num_micro, REFERENCE: num_micro,
        UPDATE: policy.updates_per_rollout,
    }  # fmt: skip
    scored = ranks * num_micro * recipe.batch.micro * recipe.batch.seq
    tokens = {
        PREFILL: policy.completions * policy.max_prompt,
        DECODE: policy.completions * (policy.max_new - 1),
        SCORING: scored,
        REFERENCE: scored,
        UPDATE: policy.updates_per_rollout * recipe.batch.tokens * ranks,
    }
    found = list[LoopPart]()
    for name in dict.fromkeys(one.part for one in spans):
        mine = [one for one in spans if one.part == name]
        each = len(mine) / num_loops
        seconds = each * median(one.end_s - one.begin_s for one in mine)
        busy, memory_access = mean_utilisation(readings, [(one.begin_s, one.end_s) for one in mine])
        found.append(
            LoopPart(
                name=name, calls=calls.get(name, 1), seconds=seconds, tokens=tokens.get(name, 0), busy=busy,
                memory_access=memory_access,
            )
        )  # fmt: skip
    total_s = sum(one.seconds for one in found)
    return LoopTime(
        lengths=f"every completion has {policy.max_new:,} tokens",
        mean_new=policy.max_new,
        seconds=total_s,
        new_tokens_per_s=policy.completions * policy.max_new / total_s if total_s else None,
        parts=tuple(found),
    )
