"""Recipe -> Estimate of a policy's whole loop, for recipes with another objective that of their step.

Memory is one replay of the loop's ledger; times.py has the time of each part.
"""

from __future__ import annotations

from trainfit.ledger.ledger import ALLOCATE, Ledger
from trainfit.ledger.replay import Replay
from trainfit.ledger.segments import rounded
from trainfit.prediction import cache
from trainfit.prediction.device_overhead import overhead_bytes
from trainfit.prediction.estimate import of_both_peaks, of_recipe, replay_on, summary
from trainfit.prediction.machine import Machine, machine_of
from trainfit.prediction.predict import predict as predict_step
from trainfit.prediction.time.roofline import copy_bytes_per_s, roofline
from trainfit.rl.estimate.lengths import Recorded, of_mean_new
from trainfit.rl.estimate.levers import levers
from trainfit.rl.estimate.names import DECODE, MEMORY, UPDATE_PHASES, of_update_alone
from trainfit.rl.estimate.times import Times, part_of
from trainfit.rl.shares import check_counts
from trainfit.spec.hardware import Gpu
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CATEGORIES, Estimate, Loop, LoopMemory, MemoryBreakdown

KIND = "loop"
"""Kind of the ledger in the cache."""
NOT_TIMED = "the environment's prompts and rewards, and the tokenizer, are not timed"


def predict(
    recipe: Recipe,
    machine: Machine | None = None,
    *,
    use_cache: bool = True,
    deterministic: bool = False,
    mean_new: float | None = None,
    recorded: Recorded | None = None,
) -> Estimate:
    """Return the estimate of a recipe's loop if its objective is a policy's, else ``prediction.predict``'s.

    Args:
        machine, use_cache, deterministic: as ``prediction.predict.predict`` takes them.
        mean_new: tokens of a completion on average; None: half of ``max_new``.
        recorded: lengths of a run, for the expected time in place of a mean.

    Raises:
        InputError: as there, a model that does not generate, or micro-batches that do not sum to the
            completions of an update.
    """
    machine = machine or machine_of(recipe.hardware)
    reason = of_update_alone(recipe)
    if reason is not None:
        found = predict_step(recipe, machine, use_cache=use_cache, deterministic=deterministic)
        return found.model_copy(update={"warnings": (*found.warnings, reason)}) if reason else found
    check_counts(recipe)
    ledger = ledger_of(recipe, machine.row, use_cache=use_cache, deterministic=deterministic)
    return estimate(recipe, machine, ledger, mean_new, recorded)


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


def estimate(
    recipe: Recipe,
    machine: Machine,
    ledger: Ledger,
    mean_new: float | None = None,
    recorded: Recorded | None = None,
) -> Estimate:
    """Return the Estimate of a loop's ledger; ``mean_new``, ``recorded``: as of ``predict``."""
    gpu = machine.gpu
    replays, fits = of_both_peaks(ledger, lambda one: replay_on(gpu, one))
    update = part_of(ledger, UPDATE_PHASES)
    time = roofline(update, machine)
    found = of_recipe(recipe, machine, update, summary(gpu, update, replays, time, fits=fits), time)
    loop = _loop(recipe, machine, ledger, replays[0], recorded or of_mean_new(recipe, mean_new))
    return found.model_copy(update={"loop": loop, "assumptions": (*found.assumptions, NOT_TIMED)})


def _loop(recipe: Recipe, machine: Machine, ledger: Ledger, replayed: Replay, lengths: Recorded) -> Loop:
    policy = recipe.objective
    assert isinstance(policy, Policy)
    longest = expected = None
    times = Times(recipe, machine, ledger) if machine.gpu.memory_bytes_per_s else None
    if times is not None and machine.gpu.peak_flops_per_s:
        longest = times.longest()
        expected = times.loop(lengths.words, lengths.rollouts)
    tokens, vocabulary = recipe.batch.micro * recipe.batch.seq, _vocabulary(ledger)
    memory = memory_of(ledger, replayed, overhead_bytes(machine.gpu, ledger))
    known = machine.gpu.host_link is not None and machine.gpu.vendor != "host"
    capture_s = 0.0 if times is None or longest is None else times.capture_s()
    return Loop(
        completions=policy.completions,
        slots=min(policy.rollout.batch, -(-policy.completions // recipe.mesh.data_ranks)),
        cache_bytes=sum(
            one.num_bytes for one in ledger.storages if one.category == "kv_cache" and one.num_bytes
        ),
        memory=memory,
        longest=longest,
        expected=expected,
        recorded=lengths.measured,
        levers=levers(memory, copy_bytes_per_s(machine.gpu) if known else None, capture_s),
        whole_logits_bytes=4 * tokens * vocabulary,
    )


def _vocabulary(ledger: Ledger) -> int:
    """Return the columns of the output layer's product in a step of decoding."""
    found = [op.shape for op in ledger.ops if ledger.segments[op.segment].phase == DECODE and op.shape]
    return found[-1][2] if found else 0


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
