"""Trace the start with each option, from which combinations are ranked; find options that need no trace."""

from collections.abc import Mapping

from trainfit.planning.search.candidate import Key, Traced
from trainfit.planning.search.plan import best_of, simpler
from trainfit.planning.search.ranking import Ranking
from trainfit.planning.search.sizes import Batches, sizes_of_traced
from trainfit.planning.search.space import OWN_FAMILY, Option, Options, agree, named_in
from trainfit.spec.errors import InputError
from trainfit.spec.units import format_bytes

SLOW_GAIN = 0.1
"""Least share of a step outside matrix products and the update for which slow options are traced."""
GROWTH = 4
"""Least ratio of the two micro-batches at which options are traced that change the data-parallel ranks."""


def add_options(ranking: Ranking) -> None:
    """Trace the start at each level, without each of its options, and with each other one.

    Slow options are begun meanwhile, where the start is likely to stay the best.
    """
    combinations = ranking.combinations
    reference = next(one for one in combinations.traced.values() if one.candidate.options == ranking.start)
    quick, slow = _worth_tracing(ranking, reference)
    _trace_parts(ranking)
    best = best_of(combinations)
    ahead: list[Key] = []
    if best is not None and best.candidate.level == ranking.level and combinations.fits(reference):
        at = simpler(ranking, best.candidate.key)
        needless = set(ranking.start) - set(at[0])
        structures = (ranking.ordered(set(one) - needless) for one in slow)
        ahead = [with_larger_batch(ranking, (one, *at[1:])) for one in structures]
    traced = dict(zip(quick, ranking.trace([*quick.values()], ahead), strict=True))
    _find_growth(ranking, traced)
    for option, one in traced.items():
        if isinstance(one, InputError):
            ranking.rejected[option] = one.problem
        elif (pinned := _too_much_pinned(ranking, one)) is not None:
            ranking.rejected[option] = pinned
        else:
            ranking.added[option] = ranking.moved(one)
    ranking.grown = Batches.of(ranking.start_sizes(ranking.level))


def _worth_tracing(ranking: Ranking, reference: Traced) -> tuple[dict[Option, Key], list[Options]]:
    """Reject options that cannot gain or cannot be added to the start; return the start with each other one.

    Args:
        reference: a trace of the start.

    Returns:
        The combination to trace for each option, but for the slow ones; the structures with these.
    """
    quick: dict[Option, Key] = {}
    slow: list[Options] = []
    for option in ranking.combinations.space.options:
        if option in ranking.start or option in ranking.rejected:
            continue
        reason = _not_worth(ranking, option, reference)
        structure = with_option(ranking, option, ranking.start) if reason is None else None
        if structure is None:
            ranking.rejected.setdefault(option, reason or "cannot be combined with the starting recipe")
        elif option.is_slow:
            slow.append(structure)
        else:
            quick[option] = (structure, ranking.level_of(option), *_batch_for(ranking, structure))
    return quick, slow


def _trace_parts(ranking: Ranking) -> None:
    """Trace the start at each level, and without each of its options."""
    levels = ranking.combinations.space.levels
    removable = [option for option in ranking.start if option.family != OWN_FAMILY]
    wanted = [(ranking.start, level, *ranking.at) for level in levels]
    wanted += [(ranking.ordered(set(ranking.start) - {one}), ranking.level, *ranking.at) for one in removable]
    found = iter(ranking.trace(wanted))
    for level, one in zip(levels, found, strict=False):
        if isinstance(one, Traced):
            ranking.levels[level] = sizes_of_traced(one)
    if ranking.level not in ranking.levels:
        ranking.level = next(iter(ranking.levels))
    for option, one in zip(removable, found, strict=True):
        if isinstance(one, Traced):
            ranking.without[option] = sizes_of_traced(one)


def _find_growth(ranking: Ranking, traced: Mapping[Option, Traced | InputError]) -> None:
    """Trace options that change the data-parallel ranks at a second micro-batch."""
    pairs: list[tuple[Option, Traced]] = []
    wanted: list[Key] = []
    for option, one in traced.items():
        if isinstance(one, InputError) or ranking.more_ranks(option) == 1:
            continue
        structure, level, micro, _ = one.candidate.key
        others = [each for each in ranking.combinations.batches(structure) if each[0] >= GROWTH * micro]
        if others:
            pairs.append((option, one))
            wanted.append((structure, level, *others[0]))
    for (option, one), larger in zip(pairs, ranking.trace(wanted), strict=True):
        if isinstance(larger, Traced):
            sizes = {each.candidate.micro: sizes_of_traced(each) for each in (one, larger)}
            ranking.grown_with[option] = Batches.of(sizes)


def _too_much_pinned(ranking: Ranking, one: Traced) -> str | None:
    """Return why a recipe takes more of the host's memory than it may; None: it does not."""
    estimate, limit_bytes = one.result.estimate, ranking.combinations.host_bytes
    if estimate is None or estimate.host_bytes <= limit_bytes:
        return None
    limit = f"of at most {format_bytes(limit_bytes)} (--host-memory-gib)"
    return f"pins {format_bytes(estimate.host_bytes)} of the host's memory for each GPU, {limit}"


def _not_worth(ranking: Ranking, option: Option, reference: Traced) -> str | None:
    """Return why an option need not be traced, or None."""
    estimate = reference.result.estimate
    assert estimate is not None
    assert estimate.time is not None
    assert estimate.step_s
    if option.speeds_up == "rest":
        rest = estimate.step_s - estimate.time.matmul_s - reference.result.update_s
        if rest < SLOW_GAIN * estimate.step_s:
            share = max(0.0, rest / estimate.step_s)
            return f"could gain {share:.0%} at most, without matrix products and the update"
    if option.is_long and not option.is_slow and ranking.combinations.fits(reference):
        more = (set(one.values) for one in ranking.combinations.space.options if one.family == option.family)
        if any(set(option.values) < values for values in more):
            return "saves memory, but everything fits already"
    needs_bytes = option.least_bytes(estimate.params, estimate.trainable_params)
    if needs_bytes > ranking.combinations.usable_bytes:
        return f"keeps {format_bytes(needs_bytes)} of weights and gradients on every GPU"
    return None


def with_option(ranking: Ranking, option: Option, options: Options) -> Options | None:
    """Return a structure with an option, without those that it excludes; None: it is refused.

    The ranking keeps what it excludes of the start, or why it is refused.
    """
    kept = [one for one in options if one.family != option.family and agree((one, option)) is not None]
    while True:
        structure = ranking.ordered([*kept, option])
        try:
            ranking.combinations.recipe_of(
                structure, ranking.level_of(option), *_batch_for(ranking, structure)
            )
        except InputError as error:
            named = named_in(error, kept)
            if named is None:
                ranking.rejected[option] = error.problem
                return None
            kept.remove(named)
            continue
        ranking.dropped[option] = frozenset(ranking.start) - frozenset(kept)
        return structure


def _batch_for(ranking: Ranking, structure: Options) -> tuple[int, int]:
    """Return the batch nearest to the reference that a structure may have."""
    allowed = ranking.combinations.batches(structure)
    return min(allowed, key=lambda each: abs(each[0] - ranking.at[0]), default=ranking.at)


def with_larger_batch(ranking: Ranking, key: Key) -> Key:
    """Return a combination with up to twice its micro-batch, as far as it would fit if it were not slow.

    A faster structure gains more where samples share what is done once: the update, casts of weights.
    """
    options, level, at, _ = key
    sizes = ranking.sizes(options, level)
    own = ranking.growth(options)
    grown = own if own.micro_s else Batches.of(ranking.start_sizes(ranking.level))
    larger = [
        (options, level, *each)
        for each in ranking.combinations.batches(options)
        if at < each[0] <= 2 * at
        and grown.moved(sizes, ranking.at[0], each[0]).device_bytes <= ranking.combinations.usable_bytes
    ]
    return larger[-1] if larger else key
