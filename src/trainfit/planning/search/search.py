"""Search for the fastest recipe within a memory limit: a few traces, a ranking by the composed estimate, then
exact traces of those that rank highest.

1. The start is the recipe with every option that usually costs nothing (start.py).
2. It is traced at several micro-batches and levels of recomputation, and with each further option added
   (options.py).
3. All combinations are ranked by the composed estimate (ranking.py).
4. The highest are traced, until none left ranks higher; each trace corrects the estimate of its structure
   (rounds.py).
5. Options without which the best recipe is as fast are left out of it.
6. Much faster recipes that, by the composed estimate, are hardly over the limit are traced: it may be off.
7. Options that are slow to trace (compilation) are added to the best recipe, or to what it would be without
   recomputation, and ranked with the others; the best is traced with the largest batch that fits, too
   (slow_options.py).
8. Recipes whose blocks recompute differently are traced last, if they still rank highest: a budget takes as
   long as ten other traces.
9. The best is traced without each option that it may only have for a larger batch, whose gain is small.
10. The best with larger batches, and what is faster with smaller ones, are traced where their own traces say
    that these fit (neighbours.py).
"""

from collections.abc import Callable

from trainfit.planning.estimates import Estimates
from trainfit.planning.search.candidate import Combinations, Goal, Traced
from trainfit.planning.search.options import add_options
from trainfit.planning.search.plan import TIE, assembled, best_of, fastest, frontier, simpler, without_each
from trainfit.planning.search.ranking import Ranking
from trainfit.planning.search.rounds import (
    MAX_ROUNDS,
    WORTH_TRACING,
    find_smallest,
    trace_highest,
    trace_neighbours,
)
from trainfit.planning.search.slow_options import add_slow_options, trace_largest_like_best
from trainfit.planning.search.start import enlarge_batch, find_batch, find_largest, find_start
from trainfit.spec.plan import Plan
from trainfit.spec.recipe import Recipe

SLOW_ROUNDS = 3
"""Most rounds of traces after slow options were added."""
BARELY, BARELY_GAIN = 1.02, 0.02
"""Multiple of the limit below which, by the composed estimate, a recipe may fit after all, and the least
estimated gain for which that is tried."""


def plan(
    recipe: Recipe, goal: Goal, estimates: Estimates, say: Callable[[str], None] = lambda text: None
) -> Plan:
    """Return the best recipes within the goal, the frontier, and why other choices lost.

    Args:
        say: called with a few words on what is being done.

    Raises:
        InputError: the recipe itself cannot be assembled, its GPU's speed is not known, or the goal cannot be
            met by any batch.
    """
    combinations = Combinations(recipe, goal, estimates)
    ranking, space = Ranking(combinations), combinations.space
    say("tracing the starting recipe")
    find_start(ranking)
    if not space.options and len(space.levels) == 1 and not space.solves_recompute:
        say("tracing batches")
        return _traced_exactly(ranking, find_largest(ranking))
    find_batch(ranking)
    enlarge_batch(ranking)
    say("tracing its options")
    add_options(ranking)
    say("tracing the recipes that rank highest")
    trace_highest(ranking, WORTH_TRACING)
    trace_highest(ranking, BARELY_GAIN, rounds=1, limit=BARELY)
    if add_slow_options(ranking, say):
        trace_largest_like_best(ranking)
        trace_highest(ranking, TIE, rounds=SLOW_ROUNDS)
        trace_highest(ranking, BARELY_GAIN, rounds=1, limit=BARELY)
    if trace_highest(ranking, WORTH_TRACING, mixed=True):
        best = best_of(combinations)
        ranking.trace([simpler(ranking, best.candidate.key)] if best else [])
    ranking.trace(without_each(ranking, best_of(combinations)))
    trace_neighbours(ranking)
    if best_of(combinations) is None and find_smallest(ranking):
        trace_highest(ranking, WORTH_TRACING)
        trace_neighbours(ranking)
        ranking.trace(frontier(ranking))
    return _traced_exactly(ranking)


def _traced_exactly(ranking: Ranking, largest: Traced | None = None) -> Plan:
    """Return the plan, its recipes traced exactly.

    An exact trace may take more memory: if the best does not fit, others are traced in its place.

    Args:
        largest: with the largest micro-batch that fits, where only the batch varies.
    """
    combinations = ranking.combinations
    for _ in range(MAX_ROUNDS):
        best = best_of(combinations)
        if best is None or best.candidate.key in combinations.exact:
            break
        combinations.trace_exactly(fastest(combinations, best))
        is_ranked = bool(ranking.grown.micro_s)  # Not where only the batch varies.
        if is_ranked and not combinations.fits(exact := combinations.traced[best.candidate.key]):
            ranked = best.candidate._replace(rate=best.rate, device_bytes=best.device_bytes)
            ranking.correct(ranked, exact)
            trace_highest(ranking, WORTH_TRACING)
            trace_neighbours(ranking)
    best = best_of(combinations)
    if best is not None and largest is not None and best.candidate.micro > largest.candidate.micro:
        largest = best  # Traced later: where few micro-batches are allowed, the rounds may miss it.
    return assembled(ranking, best, largest)
