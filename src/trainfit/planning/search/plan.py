"""Make a Plan of what a search traced: the best recipe, the fastest others, the frontier, why others lost."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from trainfit.planning.search.candidate import MIX, Combinations, Key, Traced
from trainfit.planning.search.ranking import Ranking
from trainfit.planning.search.sizes import Sizes
from trainfit.planning.search.space import OWN_FAMILY, Option, Options, value_in
from trainfit.spec.plan import Found, Plan, Rejection, changed_fields
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import GIB, format_bytes

T = TypeVar("T")

TIE = 0.01
"""Relative difference of speed below which two recipes count as tied; the simpler one is chosen."""
NUMERICS_GAIN = 0.02
"""Least gain of speed, as a share, for which the numerics are changed."""
NUM_FILLED = 2
"""Most recipes that are traced to fill gaps of the frontier."""
NUM_FOUND = 4
"""Recipes reported as the best."""


def discounted(rate: float, options: Options) -> float:
    """Return the speed, reduced by the least gain for each change of the numerics."""
    return rate * (1 - NUMERICS_GAIN) ** _num_changes(options)


def best_of(combinations: Combinations) -> Traced | None:
    """Return the fastest traced recipe that fits; of ties the simplest, then the smallest."""
    fitting = [one for one in combinations.traced.values() if combinations.fits(one)]
    if not fitting:
        return None
    speeds = {one.candidate.key: discounted(one.rate, one.candidate.options) for one in fitting}
    highest = max(fitting, key=lambda one: speeds[one.candidate.key])
    changes = _num_changes(highest.candidate.options)
    tied = [
        one
        for one in fitting
        if _num_changes(one.candidate.options) == changes and one.rate >= (1 - TIE) * highest.rate
    ]
    return min(tied, key=lambda one: (_complexity(one, combinations), one.device_bytes))


def _num_changes(options: Options) -> int:
    """Return how many options change the numerics."""
    return sum(bool(option.numerics) for option in options)


def _complexity(one: Traced, combinations: Combinations) -> int:
    """Return how many fields differ from the given recipe's, without batches and the implementation."""
    options = [option for option in one.candidate.options if option.family != OWN_FAMILY]
    own = json.dumps(value_in(combinations.recipe, "recompute"))
    level = {own: 0, MIX: 2}.get(one.candidate.level, 1)
    return sum(len(option.values) for option in options) + level


def simpler(ranking: Ranking, at: Key) -> Key:
    """Return a combination without the options that, dropped together, cost no speed."""
    start = ranking.levels[ranking.level]
    losses = {one: sizes.step_s(1) / start.step_s(1) - 1 for one, sizes in ranking.without.items()}
    needless: set[Option] = set()
    for option in sorted(set(losses) & set(at[0]), key=lambda one: (losses[one], one.label)):
        smaller = ranking.without[option].device_bytes > start.device_bytes * (1 + TIE)
        if not smaller and sum(map(losses.__getitem__, needless), losses[option]) < TIE:
            needless.add(option)
    return (ranking.ordered(set(at[0]) - needless), *at[1:])


def without_each(ranking: Ranking, best: Traced | None) -> list[Key]:
    """Return the best recipe without each option beyond the start, where that ranks as fast.

    What saves memory is often added for a larger batch alone, whose gain is within a tie.
    """
    known = ranking.combinations.traced
    extras = [one for one in best.candidate.options if one not in ranking.start] if best else []
    found: list[Key] = []
    for extra in extras:
        assert best is not None
        less = ranking.ordered(set(best.candidate.options) - {extra})
        alike = [one for one in ranking.ranked() if one.options == less and one.level != MIX]
        highest = max(alike, key=lambda one: one.rate, default=None)
        if highest is not None and highest.rate >= (1 - TIE) * best.rate and highest.key not in known:
            found.append(highest.key)
    return found


def frontier(ranking: Ranking) -> list[Key]:
    """Return recipes between the smallest and the largest known ones, where the frontier has gaps."""
    ranked, usable_bytes = ranking.ranked(), ranking.combinations.usable_bytes
    if not ranked:
        return []
    least = min(one.device_bytes for one in ranked)
    targets = [least + (usable_bytes - least) * step / NUM_FILLED for step in range(NUM_FILLED)]
    pure = [one for one in ranked if one.level != MIX and not any(each.is_long for each in one.options)]
    inside = ((one for one in pure if one.device_bytes <= target) for target in targets)
    keys = dict.fromkeys(best.key for some in inside if (best := next(some, None)) is not None)
    return [key for key in keys if key not in ranking.combinations.traced]


def pareto(items: Iterable[T], of: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the items that no other beats in both, by ascending memory.

    Args:
        of: memory (less is better) and speed (more is better) of an item.
    """
    kept: list[T] = []
    most = float("-inf")
    for item in sorted(items, key=lambda one: (of(one)[0], -of(one)[1])):
        if of(item)[1] > most:
            kept.append(item)
            most = of(item)[1]
    return kept


def assembled(ranking: Ranking, best: Traced | None, largest: Traced | None = None) -> Plan:
    """Return the plan of a search.

    Args:
        best: the chosen recipe; None: nothing fits.
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
        rejected=tuple(_rejections(ranking, best)),
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
    numerics = [option.numerics for option in one.candidate.options if option.numerics]
    return Found(
        recipe=recipe.content(), changes=changed_fields(given, recipe), numerics=tuple(numerics),
        estimate=estimate,
    )  # fmt: skip


def _rejections(ranking: Ranking, best: Traced | None) -> Iterator[Rejection]:
    """Yield each choice that the best recipe lacks, with the reason."""
    chosen = best.candidate.options if best else ()
    space, start = ranking.combinations.space, ranking.levels[ranking.level]
    for option in (*space.options, *(one for one, _ in space.excluded)):
        if option in chosen:
            continue
        if option in ranking.rejected:
            yield Rejection(choice=option.label, reason=ranking.rejected[option])
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
            yield Rejection(choice=space.levels[other].label, reason=_compared(sizes, start, 1.0))


def _compared(sizes: Sizes, before: Sizes, ranks: float) -> str:
    """Return how a recipe differs from another: time a token and memory."""
    time = sizes.step_s(1) / ranks / before.step_s(1) - 1
    memory = sizes.device_bytes - before.device_bytes
    speed = "as fast" if abs(time) < 0.005 else f"{abs(time):.1%} {'slower' if time > 0 else 'faster'}"
    size = f"{format_bytes(abs(memory))} {'more' if memory > 0 else 'less'}"
    return f"{speed}, {size}" if abs(memory) > GIB / 100 else f"{speed}, no smaller"
