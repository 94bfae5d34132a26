"""A run of steps of varied lengths: fragmentation, and the longest sample after many steps.

Lengths are those of whole batches, padded to their longest sample: log-normal, with the median at half the
recipe's sequence and cut off at it, in buckets of 1/32. Each distinct length has a prediction of its own.
"""

import math
import random
from collections.abc import Callable
from statistics import median

from trainfit.explanation.peak import Explained
from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.varied import VariedRun, replay_lengths
from trainfit.prediction.predict import ledger_of
from trainfit.spec.explanation import LengthsRun
from trainfit.spec.recipe import Recipe

NUM_STEPS, LATE_AFTER = 1000, 120
BUCKETS = 32
SIGMA = 0.45
"""Of the logarithm of a length."""
MOST_EVENTS = 8_000_000
"""Allocations and frees that are replayed; a model with more of them a step has fewer steps."""
SHOWN = (1, 10, 100, 1000)
"""Numbers of steps after which reserved bytes are reported."""


def draw_lengths(longest: int, num_steps: int, seed: int) -> list[int]:
    """Return the lengths of the batches of a run."""
    draw, bucket = random.Random(seed), max(1, longest // BUCKETS)
    found: list[int] = []
    for _ in range(num_steps):
        length = min(longest, longest / 2 * math.exp(draw.gauss(0, SIGMA)))
        found.append(min(longest, math.ceil(length / bucket) * bucket))
    return found


def run_lengths(found: Explained, late: int, say: Callable[[str], None]) -> LengthsRun:
    """Run a recipe's steps at drawn lengths.

    Args:
        late: tokens of the longest sample, which comes after LATE_AFTER steps.
        say: called with what is done next.
    """
    recipe, machine = found.recipe, found.machine
    assert recipe is not None, "lengths are a recipe's"
    assert machine is not None, "lengths are a recipe's"
    own = sum(found.ledger.segments[one.segment].step == "steady" for one in found.ledger.expand())
    num_steps = max(2, min(NUM_STEPS, MOST_EVENTS // max(1, own)))
    lengths = draw_lengths(recipe.batch.seq, num_steps, recipe.seed)
    distinct = sorted({*lengths, recipe.batch.seq, late})
    ledgers: dict[int, Ledger] = {}
    for number, length in enumerate(distinct, 1):
        say(f"predicting length {number} of {len(distinct)}: {length:,} tokens")
        ledgers[length] = ledger_of(_at(recipe, length), machine).with_lower_peak()
    capacity = found.capacity_bytes

    def run(steps: list[int], *, expandable: bool, limit: bool = True) -> VariedRun:
        allocator = CachingAllocator(capacity if limit else None, expandable)
        return replay_lengths(
            ledgers, steps, allocator, lambda done: say(f"replaying step {done:,} of {len(steps):,}")
        )

    plain, expandable = (run(lengths, expandable=one) for one in (False, True))
    before = [length for length in lengths if length < late][:LATE_AFTER]
    late_run, late_expandable = (run([*before, late], expandable=one) for one in (False, True))
    alone = run([late, late], expandable=False)
    steady = run([recipe.batch.seq] * 3, expandable=False, limit=False)
    return LengthsRun(
        num_steps=num_steps,
        lengths=(min(lengths), round(median(lengths)), max(lengths)),
        num_lengths=len(set(lengths)),
        longest_alone_bytes=steady.reserved[-1],
        reserved_bytes={at: plain.reserved[at - 1] for at in SHOWN if at <= len(plain.reserved)}
        | {len(plain.reserved): plain.reserved[-1]},
        expandable_bytes=expandable.reserved[-1],
        num_retries=plain.num_retries,
        failed=None if plain.failed is None else plain.failed + 1,
        expandable_failed=None if expandable.failed is None else expandable.failed + 1,
        late_length=late,
        late_after=len(before),
        late_alone_fits=alone.failed is None,
        late_fits=late_run.failed is None,
        late_expandable_fits=late_expandable.failed is None,
        late_reserved_bytes=late_run.reserved[-1],
    )


def _at(recipe: Recipe, length: int) -> Recipe:
    return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"seq": length})})
