"""Choose the recipe of a plan among the traced ones, drop options without a gain, fill the frontier."""

import json

from trainfit.planning.combinations import MIX, Combinations, Key, Traced
from trainfit.planning.ranking import Ranking
from trainfit.planning.space import OWN_FAMILY, Option, Options, value_in

TIE = 0.01
"""Relative difference of speed below which two recipes count as tied; the simpler one is chosen."""
NUMERICS_GAIN = 0.02
"""Least gain of speed, as a share, for which the numerics are changed."""
NUM_FILLED = 2
"""Most recipes that are traced to fill gaps of the frontier."""


def discounted(rate: float, options: Options) -> float:
    """Return the speed, reduced by the least gain for each change of the numerics."""
    return rate * (1 - NUMERICS_GAIN) ** _num_changes(options)


def best_of(combinations: Combinations) -> Traced | None:
    """Return the fastest traced recipe that fits; of ties the simplest, then the smallest."""
    fitting = [one for one in combinations.traced.values() if combinations.fits(one)]
    if not fitting:
        return None
    speeds = {one.candidate.key: discounted(one.rate, one.candidate.options) for one in fitting}
    fastest = max(fitting, key=lambda one: speeds[one.candidate.key])
    changes = _num_changes(fastest.candidate.options)
    tied = [
        one
        for one in fitting
        if _num_changes(one.candidate.options) == changes and one.rate >= (1 - TIE) * fastest.rate
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
