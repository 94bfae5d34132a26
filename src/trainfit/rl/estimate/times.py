"""Time of a policy's loop from its ledger: each part, as often as the lengths of completions call it.

A step of decoding has as many filled positions as the schedule has on average, which gives the mean time of
all steps, as attention's bytes are in proportion to the positions. Likewise micro-batches of scoring and
update, and calls that read prompts, compute as many positions as theirs have on average (lengths.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from trainfit.ledger.ledger import RECORDED, Ledger, Op, Segment
from trainfit.prediction.estimate import matmul_dtype
from trainfit.prediction.machine import Machine
from trainfit.prediction.time.peaks import peak_flops_per_s
from trainfit.prediction.time.roofline import roofline
from trainfit.rl.estimate.lengths import (
    WHOLE,
    Filled,
    Lengths,
    of_micro_batches,
    of_prompts,
    of_slowest_rank,
    shortened,
)
from trainfit.rl.estimate.names import (
    ALONE,
    DECODE,
    GATHER,
    PREFILL,
    REFERENCE,
    SCORING,
    UPDATE,
    UPDATE_PHASES,
    WARM,
)
from trainfit.rl.rollout.schedule import Schedule, padded
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Loop, LoopPart, LoopTime

DECODE_ATTENTION = "trainfit.decode_attention.default"


def part_of(ledger: Ledger, phases: Sequence[str], step: str = "steady") -> Ledger:
    """Return the ledger with some phases of a step as those of the steady step, and the others as a rest."""
    segments = [
        Segment("steady" if one.step == step and one.phase in phases else "rest", one.phase)
        for one in ledger.segments
    ]
    return replace(ledger, segments=segments)


class _Part(NamedTuple):
    """One call of a part: seconds, and what it computes and moves."""

    seconds: float
    busy_s: float
    flops: float
    num_bytes: float

    def times(self, count: float) -> _Part:
        """Return so many calls."""
        return _Part(*(count * value for value in self))


class Times:
    """Times of a loop's parts on a machine whose rates are known."""

    def __init__(self, recipe: Recipe, machine: Machine, ledger: Ledger):
        policy = recipe.objective
        assert isinstance(policy, Policy)
        self.recipe, self.machine, self.ledger, self.policy = recipe, machine, ledger, policy
        self.ranks = recipe.mesh.data_ranks
        self.slots = min(policy.rollout.batch, -(-policy.completions // self.ranks))
        self.tokens = recipe.batch.micro * recipe.batch.seq
        self.records = any(one.step == "steady" and one.phase == RECORDED for one in ledger.segments)
        self.graph = any(one.phase == RECORDED for one in ledger.segments)
        self.peak = peak_flops_per_s(machine.gpu, matmul_dtype(part_of(ledger, UPDATE_PHASES)))
        self._calls = dict[tuple[tuple[str, ...], str, bool, float, Filled], _Part]()

    def longest(self) -> LoopTime:
        """Return the loop's time with every prompt and every completion at its longest."""
        policy = self.policy
        whole = Lengths([policy.max_prompt] * policy.completions, [policy.max_new] * policy.completions)
        return self._loop(f"every completion has {policy.max_new:,} tokens", [whole], WHOLE)

    def loop(self, words: str, rollouts: Sequence[Lengths]) -> LoopTime:
        """Return the mean time of a loop with these rollouts.

        Args:
            words: the lengths, for people.
        """
        if self.recipe.compile:
            padding = f"scoring and update compute {self.recipe.batch.seq:,} positions a row, as compiled"
        else:
            padding = "scoring and update compute each micro-batch at the length of its longest row"
        return self._loop(f"{words}; {padding}", rollouts, of_micro_batches(self.recipe, rollouts))

    def _loop(self, words: str, rollouts: Sequence[Lengths], filled: Filled) -> LoopTime:
        policy, num_loops = self.policy, len(rollouts)
        calls = [of_slowest_rank(self.recipe, one, self.slots) for one in rollouts]
        new_tokens = sum(sum(one.completions) for one in rollouts) / num_loops
        of_prompt = sum(sum(one.prompts) for one in rollouts) / num_loops
        parts = [self._named(GATHER, 1, self._call([GATHER]), 0)]
        parts.append(self._prefill(calls, of_prompts(policy, rollouts, calls), round(of_prompt)))
        if self.records:
            parts.append(self._named(RECORDED, 1, self._call([WARM, RECORDED]), 0))
        parts.append(self._decode(calls, round(new_tokens) - policy.completions))
        trained = policy.completions * self.recipe.batch.seq * filled.needed
        num_micro = -(-policy.completions // self.ranks // self.recipe.batch.micro)
        for name in (SCORING, REFERENCE):
            one = self._call([name], filled=filled)
            useful = self._flops([name], "causal_flops", filled) / one.flops if one.flops else 1.0
            parts.append(self._named(name, num_micro, one, round(trained), useful))
        parts.append(self._update(round(trained), filled))
        parts = [one for one in parts if one.seconds]
        return _summed(words, new_tokens / policy.completions, new_tokens, parts)

    def capture_s(self) -> float:
        """Return the seconds in which a step of decoding is run and recorded; 0: there is no graph."""
        return self._call([WARM, RECORDED], step="first").seconds if self.graph else 0.0

    def _call(
        self,
        phases: Sequence[str],
        *,
        step: str = "steady",
        in_graph: bool = False,
        cached: float = 1.0,
        filled: Filled = WHOLE,
        tokens: int | None = None,
    ) -> _Part:
        """Return one call of phases.

        Args:
            cached: share of the cache's positions that are filled.
            filled: of the sequences; tokens: of a call as traced, None: a micro-batch's.
        """
        key = (tuple(phases), step, in_graph, cached, filled)
        if key not in self._calls:
            ledger = part_of(self.ledger, phases, step)
            if cached != 1.0:
                ledger = replace(ledger, ops=[_cached(op, cached) for op in ledger.ops])
            ops = shortened(ledger, tokens or self.tokens, filled.computed, filled.computed_squares)
            ledger = replace(ledger, ops=ops)
            time = roofline(ledger, self.machine, in_graph=in_graph)
            assert time is not None, "the rates are known"
            step_s = time.expected
            self._calls[key] = _Part(
                step_s.total,
                step_s.matmul_s + step_s.memory_s,
                ledger.steady_sum("causal_flops"),
                ledger.steady_sum("num_bytes"),
            )
        return self._calls[key]

    def _flops(self, phases: Sequence[str], kind: str, filled: Filled) -> float:
        """Return the FLOPs of one call of phases without padding; ``kind``: a field of ``Op``."""
        ledger = part_of(self.ledger, phases)
        ops = shortened(ledger, self.tokens, filled.needed, filled.needed_squares)
        return replace(ledger, ops=ops).steady_sum(kind)

    def _prefill(self, calls: Sequence[Schedule], filled: Filled, tokens: int) -> LoopPart:
        """Return the reads of prompts: of one and of all slots traced, of other counts in between.

        Args:
            tokens: of all prompts.
        """
        width = padded(self.policy.max_prompt)
        whole = self._call([PREFILL], filled=filled, tokens=self.slots * width)
        one = self._call([PREFILL], step=ALONE, filled=filled, tokens=width)
        counts = [count for each in calls for count in each.prefills]
        of_slots = _Part(
            *(_between(low, high, counts, self.slots) for low, high in zip(one, whole, strict=True))
        )
        useful = filled.needed / filled.computed
        num_loops = len(calls)
        every = of_slots.times(1 / num_loops)
        return self._part(PREFILL, round(len(counts) / num_loops), every, tokens, useful)

    def _decode(self, calls: Sequence[Schedule], tokens: int) -> LoopPart:
        steps = sum(one.steps for one in calls)
        read = sum(one.positions * one.steps for one in calls) / steps if steps else 0.0
        share = read / (self.slots * padded(self.policy.max_tokens))
        one = self._call([DECODE], in_graph=self.graph, cached=min(1.0, share))
        sampled = sum(each.kept - sum(each.prefills) for each in calls)
        useful = sampled / (steps * self.slots) if steps else 1.0
        a_loop = fmean(each.steps for each in calls)
        return self._part(DECODE, round(a_loop), one.times(a_loop), tokens, useful)

    def _update(self, tokens: int, filled: Filled) -> LoopPart:
        num_updates = self.policy.updates_per_rollout
        one = self._call(UPDATE_PHASES, filled=filled)
        useful = self._flops(UPDATE_PHASES, "model_flops", filled) / one.flops if one.flops else 1.0
        return self._part(UPDATE, num_updates, one.times(num_updates), tokens, useful)

    def _named(self, name: str, calls: int, one: _Part, tokens: int, useful: float = 1.0) -> LoopPart:
        return self._part(name, calls, one.times(calls), tokens, useful)

    def _part(self, name: str, calls: int, every: _Part, tokens: int, useful: float) -> LoopPart:
        """Return a part.

        Args:
            tokens: of all GPUs.
            useful: share of the executed FLOPs that the mathematics needs.
        """
        seconds, gpu = every.seconds, self.machine.gpu
        possible = seconds * self.peak
        assert gpu.memory_bytes_per_s is not None
        return LoopPart(
            name=name,
            calls=calls,
            seconds=seconds,
            tokens=tokens,
            model_flops=useful * every.flops,
            hardware_flops=every.flops,
            mfu=useful * every.flops / possible if possible else None,
            hfu=every.flops / possible if possible else None,
            busy=every.busy_s / seconds if seconds else None,
            memory_access=every.num_bytes / seconds / gpu.memory_bytes_per_s if seconds else None,
        )


def _between(low: float, high: float, counts: Sequence[int], slots: int) -> float:
    """Return the sum over calls that read so many prompts, between one (``low``) and all slots (``high``)."""
    if slots == 1:
        return high * len(counts)
    return sum(low + (high - low) * (count - 1) / (slots - 1) for count in counts)


def _cached(op: Op, share: float) -> Op:
    """Return decoding attention with a share of the cache's positions filled; others as they are."""
    if op.name != DECODE_ATTENTION:
        return op
    return op._replace(
        num_bytes=round(share * op.num_bytes), flops=share * op.flops, causal_flops=share * op.causal_flops
    )


def with_update(loop: Loop, longer: float, more: float) -> Loop:
    """Return the loop with an update of more micro-batches; ``longer, more``: its seconds and FLOPs over."""

    def changed(one: LoopPart) -> LoopPart:
        if one.name != UPDATE:
            return one
        share = more / longer
        return one.model_copy(
            update={
                "seconds": longer * one.seconds,
                "model_flops": more * one.model_flops,
                "hardware_flops": more * one.hardware_flops,
                "mfu": one.mfu and share * one.mfu,
                "hfu": one.hfu and share * one.hfu,
            }
        )

    def of(time: LoopTime | None) -> LoopTime | None:
        if time is None:
            return None
        new_tokens = (time.new_tokens_per_s or 0.0) * time.seconds
        return _summed(time.lengths, time.mean_new, new_tokens, [changed(one) for one in time.parts])

    return loop.model_copy(update={"longest": of(loop.longest), "expected": of(loop.expected)})


def _summed(words: str, mean_new: float, new_tokens: float, parts: list[LoopPart]) -> LoopTime:
    """Return the loop of these parts; ``new_tokens``: of all GPUs."""
    total_s = sum(one.seconds for one in parts)

    def mean(name: str) -> float | None:
        if not total_s:
            return None
        return sum((getattr(one, name) or 0.0) * one.seconds for one in parts) / total_s

    return LoopTime(
        lengths=words,
        mean_new=mean_new,
        seconds=total_s,
        new_tokens_per_s=new_tokens / total_s if total_s else None,
        mfu=mean("mfu"),
        hfu=mean("hfu"),
        busy=mean("busy"),
        memory_access=mean("memory_access"),
        parts=tuple(parts),
    )
