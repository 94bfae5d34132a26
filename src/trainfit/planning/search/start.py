"""Find the recipe that a search starts from, the batch at which its options are compared, and the largest."""

from collections.abc import Sequence
from contextlib import suppress

from trainfit.planning.search.candidate import Traced
from trainfit.planning.search.plan import TIE
from trainfit.planning.search.ranking import Ranking
from trainfit.planning.search.rounds import MAX_ROUNDS
from trainfit.planning.search.sizes import Batches
from trainfit.planning.search.space import Option, changed, named_in
from trainfit.rl.shares import check_counts
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Policy

ACTIVATIONS_TOKENS = 8192
"""Tokens of a micro-batch from which activations, rather than whole gradients, usually set the peak."""


def find_start(ranking: Ranking) -> None:
    """Take every option that usually costs nothing, and drop those that the recipe refuses."""
    combinations = ranking.combinations
    for option in combinations.space.options:
        if option.is_slow:  # These are traced last; start the processes now, as their imports take time.
            with suppress(InputError):
                combinations.estimates.later.append(changed(combinations.recipe, dict(option.values)))
    chosen: list[Option] = []
    for option in combinations.space.options:
        if option.is_start and option.family not in {one.family for one in chosen}:
            chosen.append(option)
    while True:
        ranking.start = tuple(chosen)
        batches = combinations.batches(ranking.start)
        if not batches:
            raise _no_batch(ranking)
        first = _spread(batches, ACTIVATIONS_TOKENS / combinations.recipe.batch.seq)
        found = ranking.trace([(ranking.start, ranking.level, *each) for each in first])
        refused = next((one for one in found if isinstance(one, InputError)), None)
        if refused is None:
            return _trace_larger_starts(ranking, batches)
        if not chosen:
            raise refused
        option = named_in(refused, chosen) or chosen[-1]
        ranking.rejected[option] = refused.problem
        chosen.remove(option)


def _trace_larger_starts(ranking: Ranking, batches: Sequence[tuple[int, int]]) -> None:
    """Trace larger batches until two traces show how memory grows."""
    for _ in range(MAX_ROUNDS):
        known = ranking.start_sizes(ranking.level)
        largest = max(known)
        if sum(one.grows_with_batch for one in known.values()) > 1 or largest == batches[-1][0]:
            break
        wanted = _spread([each for each in batches if each[0] > largest], 2 * largest)[-2:]
        ranking.trace([(ranking.start, ranking.level, *each) for each in wanted])


def _no_batch(ranking: Ranking) -> InputError:
    """Return the refusal of a recipe and goal for which no batch is allowed."""
    combinations, recipe = ranking.combinations, ranking.combinations.recipe
    ranks, seq = combinations.data_ranks(ranking.start), recipe.batch.seq
    if isinstance(recipe.objective, Policy):
        if not combinations.space.varies_batch:
            check_counts(recipe)
        count = recipe.objective.completions
        problem = f"a rollout's {count} completions do not divide into updates on {ranks} data-parallel ranks"
        return InputError(problem, "use others", field="objective.prompts", value=recipe.objective.prompts)
    problem = f"is no multiple of {ranks} data-parallel ranks x {seq} tokens a sequence"
    remedy, value = f"request a multiple of {ranks * seq}", combinations.goal.tokens_per_step
    return InputError(problem, remedy, field="tokens_per_step", value=value)


def find_batch(ranking: Ranking) -> None:
    """Choose the micro-batch at which options are compared: the smallest that is as fast as any.

    If the start fits with none, one of many tokens: with few, options that save activations save nothing.
    """
    combinations, known = ranking.combinations, ranking.start_sizes(ranking.level)
    grown = Batches.of(known)
    first = min(known)
    rates: dict[tuple[int, int], float] = {}
    batches = combinations.batches(ranking.start)
    for micro, count in batches:
        sizes = grown.moved(known[first], first, micro)
        if sizes.device_bytes <= combinations.usable_bytes:
            rates[micro, count] = micro * count / sizes.step_s(count)
    if rates:
        most = max(rates.values())
        ranking.at = next(each for each, rate in rates.items() if rate >= (1 - TIE) * most)
    else:
        many = ACTIVATIONS_TOKENS / combinations.recipe.batch.seq
        ranking.at = next((each for each in batches if each[0] >= many), batches[-1])


def enlarge_batch(ranking: Ranking) -> None:
    """Compare options at a batch whose peak is activations: only there levels of recomputation differ."""
    least = min(Batches.of(ranking.start_sizes(ranking.level)).batch_bytes)
    at, allowed = ranking.at, ranking.combinations.batches(ranking.start)
    ranking.at = next((each for each in allowed if each[0] >= max(least, at[0])), at)


def find_largest(ranking: Ranking) -> Traced | None:
    """Trace micro-batches until the largest that fits and the next one, which does not, are known.

    Returns:
        The start with the largest; None: it fits with none.
    """
    combinations = ranking.combinations
    allowed = combinations.batches(ranking.start, every=True)
    for _ in range(MAX_ROUNDS):
        known = {one.candidate.micro: combinations.fits(one) for one in combinations.traced.values()}
        low = max((micro for micro, fits in known.items() if fits), default=0)
        high = min((micro for micro, fits in known.items() if not fits), default=allowed[-1][0] + 1)
        between = [each for each in allowed if low < each[0] < high]
        if between:
            wanted = _around_limit(ranking, between, high)
            ranking.trace([(ranking.start, ranking.level, *each) for each in wanted])
            continue
        combinations.trace_exactly(
            [one for one in combinations.traced.values() if one.candidate.micro == low]
        )
        if all(combinations.fits(one) for one in combinations.traced.values() if one.candidate.micro == low):
            break
    fitting = [one for one in combinations.traced.values() if combinations.fits(one)]
    largest = max(fitting, key=lambda one: one.candidate.micro, default=None)
    if largest is not None:
        find_batch(ranking)
        ranking.trace([(ranking.start, ranking.level, *ranking.at)])
    ranking.levels = {ranking.level: next(iter(ranking.start_sizes(ranking.level).values()))}
    return largest


def _around_limit(ranking: Ranking, batches: Sequence[tuple[int, int]], high: int) -> list[tuple[int, int]]:
    """Return the largest batch that fits, and the next, as estimated by the trace nearest to ``high``."""
    sizes = ranking.start_sizes(ranking.level)
    nearest = min(sizes, key=lambda micro: abs(micro - high))
    grown = Batches.of(sizes)
    fitting = [
        index
        for index, (micro, _) in enumerate(batches)
        if grown.moved(sizes[nearest], nearest, micro).device_bytes <= ranking.combinations.usable_bytes
    ]
    last = fitting[-1] if fitting else 0
    return list(batches[last : last + 2])


def _spread(batches: Sequence[tuple[int, int]], least: float) -> list[tuple[int, int]]:
    """Return the first batch, the first with at least ``least`` samples, and the first with twice as many."""
    found = [batches[0]]
    for wanted in (least, 2 * max(least, batches[0][0])):
        found.append(next((each for each in batches if each[0] >= wanted), batches[-1]))
    return list(dict.fromkeys(found))
