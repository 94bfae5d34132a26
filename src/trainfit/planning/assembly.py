"""Assemble a Plan from what a search traced: the best recipes exactly, the frontier, and why others lost."""

import json
from collections.abc import Iterator, Mapping

from trainfit.planning.combinations import Combinations, Traced
from trainfit.planning.composed import Sizes
from trainfit.planning.frontier import pareto
from trainfit.planning.ranking import Ranking
from trainfit.planning.space import Option
from trainfit.spec.plan import Found, Plan, Rejection, flat, written
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import GIB, format_bytes

NUM_FOUND = 4
"""Recipes reported as the best."""


def assembled(
    ranking: Ranking, best: Traced | None, rejected: Mapping[Option, str], largest: Traced | None = None
) -> Plan:
    """Return the plan of a search.

    Args:
        best: the chosen recipe; None: nothing fits.
        rejected: options that were not traced, or refused, with the reason.
        largest: with the largest micro-batch that fits, where only the batch varies.
    """
    combinations = ranking.combinations
    recipe, goal = combinations.recipe, combinations.goal
    every = [one for one in combinations.traced.values() if one.result.estimate is not None]
    exact = [one for one in fastest(combinations, best) if one.candidate.key in combinations.exact]
    best = exact[0] if exact else None
    least = min(every, key=lambda one: one.device_bytes)
    over_host = max(filter(combinations.fits_but_for_host, every), key=_rate, default=None)
    return Plan(
        given=recipe.content(),
        limit_bytes=int(combinations.limit_bytes),
        host_limit_bytes=combinations.host_bytes,
        margin=goal.margin,
        tokens_per_step=goal.tokens_per_step,
        keep_quality=goal.keep_quality,
        found=tuple(found(recipe, one) for one in exact),
        frontier=tuple(found(recipe, one) for one in pareto(every, lambda one: (one.device_bytes, one.rate))),
        largest=found(recipe, largest) if largest else None,
        least=None if exact else found(recipe, least),
        over_host=None if exact or over_host is None else found(recipe, over_host),
        rejected=tuple(_rejections(ranking, best, rejected)),
        num_ranked=ranking.num_ranked,
        num_traced=len(combinations.traced),
    )


def fastest(combinations: Combinations, best: Traced | None) -> list[Traced]:
    """Return the chosen recipe and the fastest others that fit, as many as are reported."""
    fitting = sorted((one for one in combinations.traced.values() if combinations.fits(one)), key=_slowness)
    return [*([best] if best else []), *(one for one in fitting if one is not best)][:NUM_FOUND]


def _rate(one: Traced) -> float:
    return one.rate


def _slowness(one: Traced) -> float:
    return -one.rate


def found(given: Recipe, one: Traced) -> Found:
    """Return a traced candidate as a plan reports it."""
    recipe, estimate = one.result.recipe, one.result.estimate
    assert estimate is not None
    before, after = (flat(each.model_dump(mode="json")) for each in (given, recipe))
    changes = [written(field, value) for field, value in after.items() if before.get(field) != value]
    numerics = [option.numerics for option in one.candidate.options if option.numerics]
    return Found(recipe=recipe.content(), changes=tuple(changes), numerics=tuple(numerics), estimate=estimate)


def _rejections(ranking: Ranking, best: Traced | None, rejected: Mapping[Option, str]) -> Iterator[Rejection]:
    """Yield each choice that the best recipe lacks, with the reason."""
    chosen = best.candidate.options if best else ()
    space, start = ranking.combinations.space, ranking.levels[ranking.level]
    for option in (*space.options, *(one for one, _ in space.excluded)):
        if option in chosen:
            continue
        if option in rejected:
            yield Rejection(choice=option.label, reason=rejected[option])
        elif option in ranking.added:
            reason = _compared(ranking.added[option], start, ranking.more_ranks(option))
            yield Rejection(choice=option.label, reason=reason)
        elif option in ranking.start:
            yield Rejection(choice=option.label, reason="no faster, within 1 %, so left out")
        elif option.is_slow:
            yield Rejection(choice=option.label, reason="cannot be combined with the best recipe")
    level = best.candidate.level if best else ""
    for other, sizes in ranking.levels.items():
        if other not in (level, ranking.level):
            label = f"recompute: {json.loads(other)}"
            yield Rejection(choice=label, reason=_compared(sizes, start, 1.0))


def _compared(sizes: Sizes, before: Sizes, ranks: float) -> str:
    """Return how a recipe differs from another: time a token and memory."""
    time = sizes.step_s(1) / ranks / before.step_s(1) - 1
    memory = sizes.device_bytes - before.device_bytes
    speed = "as fast" if abs(time) < 0.005 else f"{abs(time):.1%} {'slower' if time > 0 else 'faster'}"
    size = f"{format_bytes(abs(memory))} {'more' if memory > 0 else 'less'}"
    return f"{speed}, {size}" if abs(memory) > GIB / 100 else f"{speed}, no smaller"
