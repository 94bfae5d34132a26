"""Recipe -> Estimate of a policy's whole loop, for recipes with another objective that of their step.

Memory is one replay of the loop's ledger. Time is that of each part, as often as the rollout's schedule calls
it (lengths.py): of a step of decoding with as many filled positions as the schedule has on average, which is
the mean time of all steps, as attention's bytes are in proportion to the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from trainfit.ledger.ledger import ALLOCATE, RECORDED, Ledger, Op, Segment
from trainfit.ledger.replay import Replay
from trainfit.ledger.segments import rounded
from trainfit.prediction import cache
from trainfit.prediction.device_overhead import overhead_bytes
from trainfit.prediction.estimate import matmul_dtype, of_both_peaks, of_recipe, replay_on, summary
from trainfit.prediction.machine import Machine, machine_of
from trainfit.prediction.predict import predict as predict_step
from trainfit.prediction.time.peaks import peak_flops_per_s
from trainfit.prediction.time.roofline import copy_bytes_per_s, roofline
from trainfit.rl.estimate.levers import levers
from trainfit.rl.estimate.names import (
    ALONE,
    DECODE,
    GATHER,
    MEMORY,
    PREFILL,
    REFERENCE,
    SCORING,
    UPDATE,
    UPDATE_PHASES,
    WARM,
    of_update_alone,
)
from trainfit.rl.rollout.schedule import Schedule, of_mean, padded, schedule
from trainfit.spec.hardware import Gpu
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CATEGORIES, Estimate, Loop, LoopMemory, LoopPart, LoopTime, MemoryBreakdown

KIND = "loop"
"""Kind of the ledger in the cache."""
DECODE_ATTENTION = "trainfit.decode_attention.default"
EXPECTED_SHARE = 0.5
"""Of ``max_new``: the mean length that is assumed where none is given."""
NOT_TIMED = "the environment's prompts and rewards, and the tokenizer, are not timed"


def predict(
    recipe: Recipe,
    machine: Machine | None = None,
    *,
    use_cache: bool = True,
    deterministic: bool = False,
    mean_new: float | None = None,
) -> Estimate:
    """Return the estimate of a recipe's loop if its objective is a policy's, else ``prediction.predict``'s.

    Args:
        machine, use_cache, deterministic: as ``prediction.predict.predict`` takes them.
        mean_new: tokens of a completion on average; None: half of ``max_new``.

    Raises:
        InputError: as there, or a model that does not generate.
    """
    machine = machine or machine_of(recipe.hardware)
    reason = of_update_alone(recipe)
    if reason is not None:
        found = predict_step(recipe, machine, use_cache=use_cache, deterministic=deterministic)
        return found.model_copy(update={"warnings": (*found.warnings, reason)}) if reason else found
    ledger = ledger_of(recipe, machine.row, use_cache=use_cache, deterministic=deterministic)
    return estimate(recipe, machine, ledger, mean_new)


def ledger_of(
    recipe: Recipe, row: Gpu, *, use_cache: bool = True, deterministic: bool = False, shorten: bool = False
) -> Ledger:
    """Return the ledger of a policy's loop, kept or traced.

    Args:
        shorten: as ``prediction.trace.trace`` takes it; what is shortened is not kept.
    """

    def trace() -> Ledger:
        from trainfit.rl.estimate.trace import traced

        return traced(recipe, row, deterministic=deterministic, shorten=shorten)

    if shorten:
        kept = cache.load(recipe, kind=KIND) if use_cache else None
        return trace() if kept is None else kept
    return cache.kept_or(recipe, trace, kind=KIND, use_cache=use_cache, deterministic=deterministic)


def estimate(recipe: Recipe, machine: Machine, ledger: Ledger, mean_new: float | None = None) -> Estimate:
    """Return the Estimate of a loop's ledger."""
    gpu = machine.gpu
    replays, fits = of_both_peaks(ledger, lambda one: replay_on(gpu, one))
    update = part_of(ledger, UPDATE_PHASES)
    time = roofline(update, machine)
    found = of_recipe(recipe, machine, update, summary(gpu, update, replays, time, fits=fits), time)
    loop = _loop(recipe, machine, ledger, replays[0], mean_new)
    return found.model_copy(update={"loop": loop, "assumptions": (*found.assumptions, NOT_TIMED)})


def part_of(ledger: Ledger, phases: Sequence[str], step: str = "steady") -> Ledger:
    """Return the ledger with some phases of a step as those of the steady step, and the others as a rest."""
    segments = [
        Segment("steady" if one.step == step and one.phase in phases else "rest", one.phase)
        for one in ledger.segments
    ]
    return replace(ledger, segments=segments)


def _loop(recipe: Recipe, machine: Machine, ledger: Ledger, replayed: Replay, mean_new: float | None) -> Loop:
    policy = recipe.objective
    assert isinstance(policy, Policy)
    longest = expected = None
    of_rank = -(-policy.completions // recipe.mesh.data_ranks)
    slots = min(policy.rollout.batch, of_rank)
    times = _Times(recipe, machine, ledger) if machine.gpu.memory_bytes_per_s else None
    if times is not None and machine.gpu.peak_flops_per_s:
        longest = times.loop(
            f"every completion has {policy.max_new:,} tokens", [policy.max_new] * of_rank, slots
        )
        mean = policy.max_new * EXPECTED_SHARE if mean_new is None else mean_new
        lengths = of_mean(mean, policy.max_new, of_rank)
        how = "given" if mean_new is not None else "assumed"
        words = f"{mean:,.4g} tokens on average ({how}), each token as likely to be the last"
        expected = times.loop(words, lengths, slots)
    tokens, vocabulary = recipe.batch.micro * recipe.batch.seq, _vocabulary(ledger)
    memory = memory_of(ledger, replayed, overhead_bytes(machine.gpu, ledger))
    known = machine.gpu.host_link is not None and machine.gpu.vendor != "host"
    capture_s = 0.0 if times is None or longest is None else times.capture_s()
    return Loop(
        completions=policy.completions,
        slots=slots,
        cache_bytes=sum(
            one.num_bytes for one in ledger.storages if one.category == "kv_cache" and one.num_bytes
        ),
        memory=memory,
        longest=longest,
        expected=expected,
        levers=levers(memory, copy_bytes_per_s(machine.gpu) if known else None, capture_s),
        whole_logits_bytes=4 * tokens * vocabulary,
    )


def _vocabulary(ledger: Ledger) -> int:
    """Return the columns of the output layer's product in a step of decoding."""
    found = [op.shape for op in ledger.ops if ledger.segments[op.segment].phase == DECODE and op.shape]
    return found[-1][2] if found else 0


class _Part(NamedTuple):
    """One call of a part: seconds, and what it computes and moves."""

    seconds: float
    busy_s: float
    flops: float
    num_bytes: float


class _Times:
    """Times of a loop's parts on a machine whose rates are known."""

    def __init__(self, recipe: Recipe, machine: Machine, ledger: Ledger):
        policy = recipe.objective
        assert isinstance(policy, Policy)
        self.recipe, self.machine, self.ledger, self.policy = recipe, machine, ledger, policy
        self.ranks = recipe.mesh.data_ranks
        self.records = any(one.step == "steady" and one.phase == RECORDED for one in ledger.segments)
        self.graph = any(one.phase == RECORDED for one in ledger.segments)
        self.peak = peak_flops_per_s(machine.gpu, matmul_dtype(part_of(ledger, UPDATE_PHASES)))

    def loop(self, words: str, lengths: Sequence[int], slots: int) -> LoopTime:
        """Return the loop's time with completions of these lengths on each GPU."""
        policy, batch = self.policy, self.recipe.batch
        calls = schedule(slots, policy.max_prompt, lengths)
        num_updates = policy.updates_per_rollout
        trained = num_updates * batch.tokens
        parts = [self._named(GATHER, 1, self._call([GATHER]), 0)]
        parts.append(self._prefill(calls, slots))
        if self.records:
            parts.append(self._named(RECORDED, 1, self._call([WARM, RECORDED]), 0))
        parts.append(self._decode(calls, slots))
        num_micro = -(-len(lengths) // batch.micro)
        for name in (SCORING, REFERENCE):
            scored = num_micro * batch.micro * batch.seq
            parts.append(self._named(name, num_micro, self._call([name]), scored))
        parts.append(self._update(num_updates, trained))
        parts = [one for one in parts if one is not None and one.seconds]
        return _summed(words, calls.kept / len(lengths), self.ranks * calls.kept, parts)

    def capture_s(self) -> float:
        """Return the seconds in which a step of decoding is run and recorded; 0: there is no graph."""
        return self._call([WARM, RECORDED], step="first").seconds if self.graph else 0.0

    def _call(
        self, phases: Sequence[str], *, step: str = "steady", in_graph: bool = False, filled: float = 1.0
    ) -> _Part:
        """Return one call of phases, with this share of the cache's positions filled."""
        ledger = part_of(self.ledger, phases, step)
        if filled != 1.0:
            ledger = replace(ledger, ops=[_filled(op, filled) for op in ledger.ops])
        time = roofline(ledger, self.machine, in_graph=in_graph)
        assert time is not None, "the rates are known"
        step_s = time.expected
        return _Part(
            step_s.total,
            step_s.matmul_s + step_s.memory_s,
            ledger.steady_sum("causal_flops"),
            ledger.steady_sum("num_bytes"),
        )

    def _prefill(self, calls: Schedule, slots: int) -> LoopPart:
        """Return the reads of prompts: of one and of all slots traced, of other counts in between."""
        whole, one = self._call([PREFILL]), self._call([PREFILL], step=ALONE)
        read = sum(calls.prefills)
        of_slots = _Part(
            *(_between(low, high, calls.prefills, slots) for low, high in zip(one, whole, strict=True))
        )
        return self._part(PREFILL, len(calls.prefills), of_slots, read * self.policy.max_prompt, 1.0)

    def _decode(self, calls: Schedule, slots: int) -> LoopPart:
        share = calls.positions / (slots * padded(self.policy.max_tokens))
        one = self._call([DECODE], in_graph=self.graph, filled=min(1.0, share))
        every = _Part(*(calls.steps * value for value in one))
        sampled = calls.kept - sum(calls.prefills)
        useful = sampled / (calls.steps * slots) if calls.steps else 1.0
        return self._part(DECODE, calls.steps, every, sampled, useful)

    def _update(self, num_updates: int, tokens: int) -> LoopPart:
        one = self._call(UPDATE_PHASES)
        ledger = part_of(self.ledger, UPDATE_PHASES)
        useful = ledger.steady_sum("model_flops") / one.flops if one.flops else 1.0
        every = _Part(*(num_updates * value for value in one))
        return self._part(UPDATE, num_updates, every, tokens, useful)

    def _named(self, name: str, calls: int, one: _Part, tokens: int) -> LoopPart:
        return self._part(name, calls, _Part(*(calls * value for value in one)), tokens, 1.0)

    def _part(self, name: str, calls: int, every: _Part, tokens: int, useful: float) -> LoopPart:
        """Return a part.

        Args:
            tokens: of one GPU.
            useful: share of the executed FLOPs that the mathematics needs.
        """
        seconds, gpu = every.seconds, self.machine.gpu
        possible = seconds * self.peak
        assert gpu.memory_bytes_per_s is not None
        return LoopPart(
            name=name,
            calls=calls,
            seconds=seconds,
            tokens=self.ranks * tokens,
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


def _filled(op: Op, share: float) -> Op:
    """Return decoding attention with a share of the cache's positions filled; others as they are."""
    if op.name != DECODE_ATTENTION:
        return op
    return op._replace(
        num_bytes=round(share * op.num_bytes), flops=share * op.flops, causal_flops=share * op.causal_flops
    )


def with_update(loop: Loop, longer: float, more: float, tokens: int) -> Loop:
    """Return the loop with another update.

    Args:
        longer, more: its seconds and its FLOPs over those of the loop's.
        tokens: on which it trains, on all GPUs.
    """

    def changed(one: LoopPart) -> LoopPart:
        if one.name != UPDATE:
            return one
        share = more / longer
        return one.model_copy(
            update={
                "seconds": longer * one.seconds,
                "tokens": tokens,
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


def memory_of(ledger: Ledger, replayed: Replay, outside: int) -> tuple[LoopMemory, ...]:
    """Return the memory of each phase, the highest of all loops.

    Args:
        outside: bytes on the device outside the allocator.
    """
    alive = _breakdowns(ledger)
    found = list[LoopMemory]()
    for phase, parts in MEMORY.items():
        inside = [
            number
            for number, one in enumerate(ledger.segments)
            if one.step in ("first", "steady") and one.phase in parts
        ]
        if not inside:
            continue
        highest = max(inside, key=lambda number: replayed.segment_peaks[number])
        peak, totals = replayed.segment_peaks[highest], dict(alive[highest])
        totals["temporary"] += peak - sum(totals.values())
        reserved = max(replayed.segment_reserved[number] for number in inside)
        found.append(
            LoopMemory(
                phase=phase,
                peak_allocated_bytes=peak,
                peak_reserved_bytes=reserved,
                peak_device_bytes=reserved + outside,
                breakdown=MemoryBreakdown(**totals),
            )
        )
    return tuple(found)


def _breakdowns(ledger: Ledger) -> list[dict[str, int]]:
    """Return the bytes by category at the highest moment of each segment."""
    totals, total = dict.fromkeys(CATEGORIES, 0), 0
    found, highest = [dict(totals) for _ in ledger.segments], [-1] * len(ledger.segments)
    for kind, _, num_bytes, category, segment, _ in ledger.with_lower_peak().expand():
        change = rounded(num_bytes) if kind == ALLOCATE else -rounded(num_bytes)
        if total > highest[segment]:  # What the phase before left.
            highest[segment], found[segment] = total, dict(totals)
        totals[category] += change
        total += change
        if total > highest[segment]:
            highest[segment], found[segment] = total, dict(totals)
    return found
