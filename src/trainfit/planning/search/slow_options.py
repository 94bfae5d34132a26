"""Add the options that are slow to trace (compilation) to the fastest recipes known so far."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from trainfit.planning.search.candidate import MIX, Key, Traced
from trainfit.planning.search.options import with_larger_batch, with_option
from trainfit.planning.search.plan import best_of, discounted, frontier, simpler
from trainfit.planning.search.ranking import Ranking
from trainfit.planning.search.rounds import WORTH_TRACING, highest
from trainfit.planning.search.space import Option
from trainfit.spec.errors import InputError
from trainfit.spec.plan import written

NEARLY = 1.3
"""Multiple of the limit below which, by the composed estimate, a recipe may fit once compiled."""
COMPARABLE = 0.9
"""Least speed, as a share of the best's, of a recipe that is compiled in its place."""


def add_slow_options(ranking: Ranking, say: Callable[[str], None]) -> bool:
    """Trace the best recipe, or the smallest, with each slow option; return whether there are any.

    If the best recomputes, what nearly fits without is compiled in its place: compiled blocks keep less,
    and lose more by recomputation. If then nothing compiled fits, the best itself is compiled.

    Args:
        say: called with the options' fields before they are traced.
    """
    slow = [one for one in ranking.combinations.space.options if one.is_slow and one not in ranking.rejected]
    best = best_of(ranking.combinations)
    if best is None:
        at = min(ranking.combinations.traced.values(), key=lambda one: one.device_bytes).candidate.key
        return _compile(ranking, slow, at, say)
    other = _not_recomputed(ranking, best)
    compiled = other is not None and _compile(ranking, slow, other, say)
    ranked = {option for one in ranking.ranked() for option in one.options} if compiled else set()
    rest = [one for one in slow if one not in ranked and one not in ranking.rejected]
    return _compile(ranking, rest, simpler(ranking, best.candidate.key), say) or compiled


def _compile(ranking: Ranking, slow: Sequence[Option], at: Key, say: Callable[[str], None]) -> bool:
    """Trace a combination with each slow option; return whether there are any.

    The combination itself and the frontier are traced meanwhile: they take less time.
    """
    structures = [(one, with_option(ranking, one, at[0])) for one in slow]
    wanted = [(one, with_larger_batch(ranking, (some, *at[1:]))) for one, some in structures if some]
    if wanted:
        fields = dict.fromkeys(written(*each) for one, _ in wanted for each in one.values)
        say(f"tracing {', '.join(fields)}")
    # The next traces, of blocks that differ, rarely depend on these, and fill the other processes.
    mixed = [one.key for one in highest(ranking, WORTH_TRACING, set(), mixed=True)[0]] if wanted else []
    keys = [*(key for _, key in wanted), at, *frontier(ranking)]
    has_idle = len(wanted) < ranking.combinations.estimates.processes
    ahead = [*mixed, *(simpler(ranking, one) for one in mixed)] if has_idle else mixed
    traced = ranking.trace(keys, ahead)
    start, base = ranking.levels[ranking.level], ranking.combinations.traced.get(at)
    without = ranking.moved(base) if base else ranking.sizes(*at[:2])
    for (option, _), found in zip(wanted, traced, strict=False):
        if isinstance(found, InputError):
            ranking.rejected[option] = found.problem
        else:
            ranking.slow_levels[option] = at[1]
            ranking.added[option] = start.plus(ranking.moved(found), without)
    return bool(wanted)


def _not_recomputed(ranking: Ranking, best: Traced) -> Key | None:
    """Return what ranks highest without recomputation.

    None: the best recomputes nothing, or what does not is much slower or much too large.
    """
    if best.candidate.level in (ranking.level, MIX):
        return None
    alike = [one for one in ranking.ranked(limit=NEARLY) if one.level == ranking.level]
    fastest = max(alike, key=lambda one: discounted(one.rate, one.options), default=None)
    if fastest is None or fastest.rate < best.rate * COMPARABLE:
        return None
    with suppress(InputError):
        ranking.combinations.recipe_of(*fastest.key)
        return simpler(ranking, fastest.key)
    return None


def trace_largest_like_best(ranking: Ranking) -> None:
    """Trace the best with the largest micro-batch that fits, if it is slow and that is twice as large.

    The start does not show what only a slow option does once for all samples, such as casts to fp8.
    """
    best = best_of(ranking.combinations)
    if best is None or not any(option.is_slow for option in best.candidate.options):
        return
    options, level, micro, _ = best.candidate.key
    alike = [one for one in ranking.ranked() if (one.options, one.level) == (options, level)]
    larger = [one for one in alike if one.micro >= 2 * micro and one.rate > best.rate]
    if larger:
        largest = max(larger, key=lambda one: one.micro)
        ranking.correct(largest, ranking.trace([largest.key])[0])
