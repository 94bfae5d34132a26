"""Rounds of traces: which recipes are traced where the composed estimate is wrong."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from planned_recipe import recipe
from trainfit.planning.answer import Result
from trainfit.planning.estimates import Estimates
from trainfit.planning.search import search
from trainfit.planning.search.candidate import MIX, Candidate, Goal, Key, Traced
from trainfit.planning.search.plan import TIE, best_of, without_each
from trainfit.planning.search.ranking import Batches, Sizes
from trainfit.planning.search.search import (
    ACTIVATIONS_TOKENS,
    BARELY,
    BARELY_GAIN,
    MAX_ROUNDS,
    NUM_NEIGHBOURS,
    NUM_TRACED,
    WORTH_TRACING,
    Search,
)
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


class Rounds(Search):
    """A search whose options are traced, and whose further traces have known times."""

    def __init__(self, estimates: Estimates):
        goal = Goal(vary=("loss", "attention", "optimizer.name"))
        super().__init__(recipe(batch={"micro": 1, "seq": TOKENS}), goal, estimates, lambda text: None)
        options = tuple(GAINS)
        self.space = self.space._replace(options=options, solves_recompute=False)
        self.combinations.space = self.space
        self.order: list[Options] = []
        sizes = {one: Sizes(1, 1, 1, 0, 0, micro_s=true_s((one,))) for one in options}
        self.ranking.levels = {self.ranking.level: Sizes(2, 1, 1, 0, 0, micro_s=1.0)}
        self.ranking.added = sizes
        self.ranking.dropped = {one: frozenset() for one in options}
        self.ranking.grown = Batches({1: 1.0}, {1: 1.0})
        self._trace([(some, self.ranking.level, 1, 1) for some in ((), *((one,) for one in options))])
        self.order.clear()

    def _trace(self, wanted: Sequence[Key], ahead: Sequence[Key] = ()) -> list[Any]:
        found: list[Traced] = []
        for options, level, micro, accumulate in wanted:
            self.order.append(options)
            estimate: Any = SimpleNamespace(
                tokens_per_s=TOKENS / true_s(options), fits=True, host_bytes=0, step_s=true_s(options),
                highest=SimpleNamespace(device=2),
            )  # fmt: skip
            candidate = Candidate(0.0, 0.0, options, level, micro, accumulate)
            found.append(Traced(candidate, Result(self.recipe, estimate)))
            self.combinations.traced[candidate.key] = found[-1]
        return found


@pytest.fixture
def rounds() -> Rounds:
    with Estimates(0) as estimates:
        return Rounds(estimates)


def test_near_duplicates_of_what_ranked_wrongly_do_not_crowd_out_others(rounds: Rounds) -> None:
    rounds._trace_highest(WORTH_TRACING)
    assert {SHARED, SMALLER, KERNELS[-1]} < set(rounds.order[0])  # What ranks highest, and is slow.
    fastest = true_s((SMALLER, KERNELS[-1]))
    assert min(map(true_s, rounds.order)) <= (1 + TIE) * fastest
    assert len(rounds.order) <= MAX_ROUNDS * NUM_TRACED


def test_recipes_of_one_round_are_not_alike(rounds: Rounds) -> None:
    rounds._trace_highest(WORTH_TRACING, rounds=1)
    first, second = rounds.order
    assert not rounds.ranking.alike(first, second)


def test_structures_that_differ_in_one_of_several_choices_are_alike(rounds: Rounds) -> None:
    flash, cudnn, *_ = KERNELS
    alike = rounds.ranking.alike
    assert alike((SHARED, flash), (SHARED, cudnn))
    assert alike((SHARED, SMALLER, flash), (SHARED, SMALLER))
    assert not alike((SHARED, SMALLER, flash), (cudnn,))
    assert not alike((SMALLER, flash), (SHARED, SMALLER, cudnn))


def test_an_option_that_gains_less_than_a_tie_is_left_out(rounds: Rounds) -> None:
    kernel, seed = KERNELS[-1], SEEDS[0]
    rounds._trace([((SMALLER, kernel, seed), rounds.ranking.level, 1, 1)])
    best = best_of(rounds.combinations)
    assert best is not None
    assert seed in best.candidate.options
    wanted = without_each(rounds.ranking, best)
    assert [set(options) for options, *_ in wanted] == [{SMALLER, kernel}]  # The other two gain more.
    rounds._trace(wanted)
    simplest = best_of(rounds.combinations)
    assert simplest is not None
    assert set(simplest.candidate.options) == {SMALLER, kernel}


def test_what_a_trace_shows_of_like_blocks_holds_for_their_mix(rounds: Rounds) -> None:
    ranking, options = rounds.ranking, (SMALLER,)
    like = Candidate(1.0, 100.0, options, ranking.level, 1, 1)
    larger: Any = SimpleNamespace(tokens_per_s=0.5, highest=SimpleNamespace(device=110))
    ranking.correct(like, Traced(like, Result(rounds.recipe, larger)))
    assert (
        ranking._off(options, mixed=True) == ranking._off(options, mixed=False) == pytest.approx((1.1, 2.0))
    )
    mixed = like._replace(level=MIX)
    ranking.correct(mixed, Traced(mixed, Result(rounds.recipe, larger)))
    assert ranking._off(options, mixed=True) == pytest.approx((1.21, 4.0))
    assert ranking._off(options, mixed=False) == pytest.approx((1.1, 2.0))


@pytest.mark.parametrize(("other", "is_tried"), [(KERNELS[-1], True), (SEEDS[0], False)])
def test_what_is_hardly_over_the_limit_is_traced_where_it_gains_much(
    rounds: Rounds, other: Option, is_tried: bool
) -> None:
    ranking = rounds.ranking
    same = Sizes(1, 1, 1, 0, 0, micro_s=1.0)
    ranking.levels = {ranking.level: same}
    ranking.added = {one: same._replace(other_bytes=0.03, micro_s=true_s((one,))) for one in (SMALLER, other)}
    rounds.combinations.usable_bytes = 2.04  # Both together take 2.06, as composed.
    assert not rounds._trace_highest(WORTH_TRACING)
    assert not rounds._trace_highest(BARELY_GAIN, rounds=1, limit=1.005)
    assert rounds._trace_highest(BARELY_GAIN, rounds=1, limit=BARELY) == is_tried
    assert [set(one) for one in rounds.order] == [{SMALLER, other}] * is_tried


def test_neighbours_are_traced_once_and_refused_ones_leave_room_for_others(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = rounds.ranking.level
    refused, others = [((), level, micro, 1) for micro in range(2, 7)], [((), level, 7, 1), ((), level, 8, 1)]
    traced: list[Sequence[Key]] = []

    def trace(wanted: Sequence[Key]) -> list[InputError]:
        traced.append(wanted)
        return [InputError("refused", "")] * len(wanted)

    monkeypatch.setattr(search, "larger_than_best", lambda ranking: [*refused, refused[0]])
    monkeypatch.setattr(search, "smaller_than_faster", lambda ranking: [refused[0], *others])
    monkeypatch.setattr(rounds, "_trace", trace)
    rounds._trace_neighbours()
    assert [len(some) for some in traced] == [NUM_NEIGHBOURS, 3]
    assert [key for some in traced for key in some] == [*refused, *others]


def test_a_start_that_fits_with_no_batch_is_compared_at_many_tokens(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [(1, 1), (8, 1), (16, 1), (32, 1)]
    sizes = {micro: Sizes(100, micro, 50, 0, update_s=0.0, micro_s=float(micro)) for micro in (1, 16)}
    monkeypatch.setattr(rounds.combinations, "batches", lambda options: batches)
    monkeypatch.setattr(rounds.ranking, "start_sizes", lambda level: sizes)
    for usable_bytes, expected in ((90, ACTIVATIONS_TOKENS // TOKENS), (109, 1)):
        rounds.usable_bytes = usable_bytes
        rounds._find_batch()
        assert rounds.ranking.at == (expected, 1)
