"""Rounds of traces: of what ranks highest, of what is smallest, of other batches of what was traced."""

from collections.abc import Collection

from trainfit.planning.search.candidate import MIX, Candidate, Key
from trainfit.planning.search.neighbours import larger_than_best, smaller_than_faster
from trainfit.planning.search.plan import best_of, discounted
from trainfit.planning.search.ranking import Ranking
from trainfit.spec.errors import InputError

MAX_ROUNDS = 4
"""Most rounds of traces in one step of the search."""
NUM_TRACED = 2
"""Most recipes that are traced in a round."""
NUM_NEIGHBOURS = 4
"""Most that are traced in a round because they differ from traced ones in the batch alone."""
WORTH_TRACING = 0.003
"""Least estimated gain, as a share, over the fastest traced recipe for which another one is traced."""
ALMOST = 1.5
"""Where nothing fits: multiple of the limit above which, by the composed estimate, nothing is traced."""


def trace_highest(
    ranking: Ranking, worth: float, rounds: int = MAX_ROUNDS, *, mixed: bool = False, limit: float = 1.0
) -> bool:
    """Trace what ranks highest until nothing left ranks that share above the fastest traced recipe.

    Args:
        mixed: trace recipes whose blocks differ in recomputation, else those whose blocks do not.
        limit: multiple of the bytes that may be used, for the composed estimate.

    Returns:
        Whether there were any.
    """
    tried: set[Key] = set()
    for _ in range(rounds):
        chosen, refused = highest(ranking, worth, tried, mixed=mixed, limit=limit)
        for candidate, error in refused:
            ranking.correct(candidate, error)
        if not chosen:
            break
        tried.update(one.key for one in chosen)
        for candidate, one in zip(chosen, ranking.trace([one.key for one in chosen]), strict=True):
            ranking.correct(candidate, one)
    return bool(tried)


def highest(
    ranking: Ranking, worth: float, tried: Collection[Key], *, mixed: bool, limit: float = 1.0
) -> tuple[list[Candidate], list[tuple[Candidate, InputError]]]:
    """Return the highest-ranked combinations that are not traced, for one round, and the refused ones.

    Those that are like another of the round, or like what was ranked wrongly, come after all others.
    """
    combinations = ranking.combinations
    fitting = [one for one in combinations.traced.values() if combinations.fits(one)]
    best = max((discounted(one.rate, one.candidate.options) for one in fitting), default=0.0)
    chosen: list[Candidate] = []
    similar: list[Candidate] = []
    refused: list[tuple[Candidate, InputError]] = []
    for one in sorted(ranking.ranked(limit), key=lambda one: -discounted(one.rate, one.options)):
        if discounted(one.rate, one.options) < best * (1 + worth) or len(chosen) >= NUM_TRACED:
            break
        if (one.level == MIX) != mixed or (mixed and any(option.is_slow for option in one.options)):
            continue  # Blocks that differ are compiled in each way that they may recompute: 20 s.
        new = one.key not in tried and one.key not in combinations.traced
        if not new or one.key[:2] in {each.key[:2] for each in (*chosen, *similar)}:
            continue
        is_similar = ranking.is_like_wrong(one.options, mixed=mixed) or any(
            ranking.alike(one.options, each.options) for each in chosen
        )
        if is_similar and len(similar) == NUM_TRACED:
            continue
        try:
            combinations.recipe_of(*one.key, budget=1.0)
            (similar if is_similar else chosen).append(one)
        except InputError as error:
            refused.append((one, error))
    return [*chosen, *similar][:NUM_TRACED], refused


def find_smallest(ranking: Ranking) -> bool:
    """Trace what is smallest by the composed estimate, until one fits; return whether one does.

    The composed estimate adds what each option saves alone, which may be less than they save together.
    """
    for _ in range(MAX_ROUNDS):
        ranked = ranking.ranked(limit=ALMOST)
        known = ranking.combinations.traced
        new = sorted((one for one in ranked if one.key not in known), key=_bytes)[:NUM_TRACED]
        for candidate, one in zip(new, ranking.trace([one.key for one in new]), strict=True):
            ranking.correct(candidate, one)
        if not new or best_of(ranking.combinations) is not None:
            break
    return best_of(ranking.combinations) is not None


def trace_neighbours(ranking: Ranking) -> None:
    """Trace what was traced with other batches, as far as its own trace says that they fit."""
    tried = set[Key]()
    for _ in range(MAX_ROUNDS):
        found = (*larger_than_best(ranking), *smaller_than_faster(ranking))
        wanted = [key for key in dict.fromkeys(found) if key not in tried][:NUM_NEIGHBOURS]
        if not wanted:
            break
        tried.update(wanted)  # A refused one is not among the traced.
        ranking.trace(wanted)


def _bytes(one: Candidate) -> float:
    return one.device_bytes
