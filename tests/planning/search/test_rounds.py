"""Rounds of traces: which recipes are traced where the composed estimate is wrong."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from planned_recipe import recipe
from trainfit.planning.answer import Result
from trainfit.planning.estimates import Estimates
from trainfit.planning.search import rounds
from trainfit.planning.search.candidate import MIX, Candidate, Combinations, Goal, Key, Traced
from trainfit.planning.search.plan import TIE, best_of, without_each
from trainfit.planning.search.ranking import Ranking
from trainfit.planning.search.rounds import (
    MAX_ROUNDS,
    NUM_NEIGHBOURS,
    NUM_TRACED,
    WORTH_TRACING,
    trace_highest,
    trace_neighbours,
)
from trainfit.planning.search.search import BARELY, BARELY_GAIN
from trainfit.planning.search.sizes import Batches, Sizes
from trainfit.planning.search.space import Option, Options
from trainfit.spec.errors import InputError

TOKENS = 512
SHARED = Option("shared", (("loss", "fused"),))
"""Traces with it and another option take three times as long as composed."""
SMALLER = Option("optimizer", (("optimizer.name", "adamw8bit"),))
KERNELS = [Option("attention", (("attention", name),)) for name in ("flash", "cudnn", "triton", "efficient")]
SEEDS = [Option("seed", (("seed", number),)) for number in (1, 2)]
GAINS = {SHARED: 0.2, SMALLER: 0.2} | {one: 0.03 + 0.005 * number for number, one in enumerate(KERNELS)}
GAINS |= dict.fromkeys(SEEDS, 0.004)
"""Seconds that each option gains alone, of one."""


def true_s(options: Options) -> float:
    composed = 1 - sum(GAINS[one] for one in options)
    return composed * (3 if SHARED in options and len(options) > 1 else 1)


class Known(Ranking):
    """A ranking whose options are traced, and whose further traces have known times."""

    def __init__(self, estimates: Estimates):
        goal = Goal(vary=("loss", "attention", "optimizer.name"))
        combinations = Combinations(recipe(batch={"micro": 1, "seq": TOKENS}), goal, estimates)
        options = tuple(GAINS)
        combinations.space = combinations.space._replace(options=options, solves_recompute=False)
        super().__init__(combinations)
        self.order: list[Options] = []
        """What was traced, in order."""
        self.levels = {self.level: Sizes(2, 1, 1, 0, 0, micro_s=1.0)}
        self.added = {one: Sizes(1, 1, 1, 0, 0, micro_s=true_s((one,))) for one in options}
        self.dropped = {one: frozenset() for one in options}
        self.grown = Batches({1: 1.0}, {1: 1.0})
        self.trace([(some, self.level, 1, 1) for some in ((), *((one,) for one in options))])
        self.order.clear()

    def trace(self, wanted: Sequence[Key], ahead: Sequence[Key] = ()) -> list[Any]:
        found: list[Traced] = []
        for options, level, micro, accumulate in wanted:
            self.order.append(options)
            estimate: Any = SimpleNamespace(
                tokens_per_s=TOKENS / true_s(options), fits=True, host_bytes=0, step_s=true_s(options),
                highest=SimpleNamespace(device=2),
            )  # fmt: skip
            candidate = Candidate(0.0, 0.0, options, level, micro, accumulate)
            found.append(Traced(candidate, Result(self.combinations.recipe, estimate)))
            self.combinations.traced[candidate.key] = found[-1]
        return found


@pytest.fixture
def ranking() -> Known:
    with Estimates(0) as estimates:
        return Known(estimates)


def test_near_duplicates_of_what_ranked_wrongly_do_not_crowd_out_others(ranking: Known) -> None:
    trace_highest(ranking, WORTH_TRACING)
    assert {SHARED, SMALLER, KERNELS[-1]} < set(ranking.order[0])  # What ranks highest, and is slow.
    fastest = true_s((SMALLER, KERNELS[-1]))
    assert min(map(true_s, ranking.order)) <= (1 + TIE) * fastest
    assert len(ranking.order) <= MAX_ROUNDS * NUM_TRACED


def test_recipes_of_one_round_are_not_alike(ranking: Known) -> None:
    trace_highest(ranking, WORTH_TRACING, rounds=1)
    first, second = ranking.order
    assert not ranking.alike(first, second)


def test_structures_that_differ_in_one_of_several_choices_are_alike(ranking: Known) -> None:
    flash, cudnn, *_ = KERNELS
    alike = ranking.alike
    assert alike((SHARED, flash), (SHARED, cudnn))
    assert alike((SHARED, SMALLER, flash), (SHARED, SMALLER))
    assert not alike((SHARED, SMALLER, flash), (cudnn,))
    assert not alike((SMALLER, flash), (SHARED, SMALLER, cudnn))


def test_an_option_that_gains_less_than_a_tie_is_left_out(ranking: Known) -> None:
    kernel, seed = KERNELS[-1], SEEDS[0]
    ranking.trace([((SMALLER, kernel, seed), ranking.level, 1, 1)])
    best = best_of(ranking.combinations)
    assert best is not None
    assert seed in best.candidate.options
    wanted = without_each(ranking, best)
    assert [set(options) for options, *_ in wanted] == [{SMALLER, kernel}]  # The other two gain more.
    ranking.trace(wanted)
    simplest = best_of(ranking.combinations)
    assert simplest is not None
    assert set(simplest.candidate.options) == {SMALLER, kernel}


def test_what_a_trace_shows_of_like_blocks_holds_for_their_mix(ranking: Known) -> None:
    options = (SMALLER,)
    like = Candidate(1.0, 100.0, options, ranking.level, 1, 1)
    larger: Any = SimpleNamespace(tokens_per_s=0.5, highest=SimpleNamespace(device=110))
    ranking.correct(like, Traced(like, Result(ranking.combinations.recipe, larger)))
    assert (
        ranking._off(options, mixed=True) == ranking._off(options, mixed=False) == pytest.approx((1.1, 2.0))
    )
    mixed = like._replace(level=MIX)
    ranking.correct(mixed, Traced(mixed, Result(ranking.combinations.recipe, larger)))
    assert ranking._off(options, mixed=True) == pytest.approx((1.21, 4.0))
    assert ranking._off(options, mixed=False) == pytest.approx((1.1, 2.0))


@pytest.mark.parametrize(("other", "is_tried"), [(KERNELS[-1], True), (SEEDS[0], False)])
def test_what_is_hardly_over_the_limit_is_traced_where_it_gains_much(
    ranking: Known, other: Option, is_tried: bool
) -> None:
    same = Sizes(1, 1, 1, 0, 0, micro_s=1.0)
    ranking.levels = {ranking.level: same}
    ranking.added = {one: same._replace(other_bytes=0.03, micro_s=true_s((one,))) for one in (SMALLER, other)}
    ranking.combinations.usable_bytes = 2.04  # Both together take 2.06, as composed.
    assert not trace_highest(ranking, WORTH_TRACING)
    assert not trace_highest(ranking, BARELY_GAIN, rounds=1, limit=1.005)
    assert trace_highest(ranking, BARELY_GAIN, rounds=1, limit=BARELY) == is_tried
    assert [set(one) for one in ranking.order] == [{SMALLER, other}] * is_tried


def test_neighbours_are_traced_once_and_refused_ones_leave_room_for_others(
    ranking: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = ranking.level
    refused, others = [((), level, micro, 1) for micro in range(2, 7)], [((), level, 7, 1), ((), level, 8, 1)]
    traced: list[Sequence[Key]] = []

    def trace(wanted: Sequence[Key]) -> list[InputError]:
        traced.append(wanted)
        return [InputError("refused", "")] * len(wanted)

    monkeypatch.setattr(rounds, "larger_than_best", lambda ranking: [*refused, refused[0]])
    monkeypatch.setattr(rounds, "smaller_than_faster", lambda ranking: [refused[0], *others])
    monkeypatch.setattr(ranking, "trace", trace)
    trace_neighbours(ranking)
    assert [len(some) for some in traced] == [NUM_NEIGHBOURS, 3]
    assert [key for some in traced for key in some] == [*refused, *others]
