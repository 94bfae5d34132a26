"""What each single change of a recipe would save, and what it would cost in time: each predicted."""

import math
import time
from collections.abc import Callable, Iterator

from trainfit.planning.estimates import Estimates
from trainfit.planning.search.candidate import Combinations, Goal, Traced
from trainfit.planning.search.space import MICRO_BATCH, OWN_FAMILY, RECOMPUTE, Option
from trainfit.spec.errors import InputError
from trainfit.spec.explanation import Saving, Savings
from trainfit.spec.plan import written
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from trainfit.techniques.base import Expected

LIMIT_S = 90.0
"""Time after which no further change is predicted."""
MOST = 24


def savings(
    recipe: Recipe,
    own: Estimate,
    estimates: Estimates,
    say: Callable[[str], None] = lambda text: None,
    limit_s: float = LIMIT_S,
) -> Savings:
    """Return what each change of a recipe would save, the most first.

    A change is another level of recomputation, half the micro-batch with twice as many, or one option of a
    technique. All keep the tokens of a step. Options that are slow to trace are left out.

    Args:
        own: the recipe's own prediction.
        say: called with what is predicted next.
        limit_s: time after which nothing more is predicted.

    Raises:
        InputError: the speed of the recipe's GPU is not known.
    """
    until_s = time.monotonic() + limit_s
    tokens = recipe.step_tokens
    combinations = Combinations(recipe, Goal(tokens_per_step=tokens), estimates)
    found: list[Saving] = []
    is_complete, options = True, list(_options(recipe, combinations))[:MOST]
    for number, option in enumerate(options, 1):
        if time.monotonic() >= until_s:
            is_complete = False
            break
        say(f"{number} of {len(options)}: {option.label}")
        one = _traced(recipe, combinations, option)
        if one is not None and (saving := _saving(own, option, one)) is not None:
            found.append(saving)
    found.sort(key=lambda one: (-one.saved_bytes, one.time_ratio or math.inf))
    return Savings(
        peak_device_bytes=own.highest.device,
        changes=tuple(one for one in found if one.saved_bytes),
        is_complete=is_complete,
    )


def _options(recipe: Recipe, combinations: Combinations) -> Iterator[Option]:
    yield from list(combinations.space.levels.values())[1:]
    micro, count = recipe.batch.micro, recipe.batch.accumulate
    if micro > 1 and micro % 2 == 0:
        values = (("batch.micro", micro // 2), ("batch.accumulate", count * 2))
        yield Option(MICRO_BATCH, values, Expected())
    yield from (one for one in combinations.space.options if not one.is_slow and one.family != OWN_FAMILY)


def _traced(recipe: Recipe, combinations: Combinations, option: Option) -> Traced | None:
    """Return a recipe with one change, predicted; None: it is refused."""
    level = next(iter(combinations.space.levels))
    micro, count = recipe.batch.micro, recipe.batch.accumulate
    options: tuple[Option, ...] = ()
    if option.family == RECOMPUTE:
        level = next(json for json, one in combinations.space.levels.items() if one is option)
    elif option.family == MICRO_BATCH:
        micro, count = (value for _, value in option.values)
    else:
        options = (option,)
        ranks, in_all = combinations.data_ranks(options), count * combinations.data_ranks(())
        count = count if in_all % ranks else in_all // ranks
    (one,) = combinations.trace([(options, level, micro, count)])
    return None if isinstance(one, InputError) else one


def _saving(own: Estimate, option: Option, one: Traced) -> Saving | None:
    found = one.result.estimate
    if found is None:
        return None
    ratio = None
    if own.tokens_per_s and found.tokens_per_s:
        ratio = own.tokens_per_s / found.tokens_per_s
    return Saving(
        change=", ".join(written(field, value) for field, value in option.values if value is not None),
        saved_bytes=own.highest.device - found.highest.device,
        peak_device_bytes=found.highest.device,
        fits=found.fits,
        time_ratio=ratio,
        numerics=option.numerics,
    )
