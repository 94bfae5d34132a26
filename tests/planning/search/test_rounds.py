"""Rounds of traces: which recipes are traced where the composed estimate is wrong."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from planned_recipe import recipe
from trainfit.planning.estimates import Estimates, Result
from trainfit.planning.search.candidate import Candidate, Goal, Key, Traced
from trainfit.planning.search.plan import TIE
from trainfit.planning.search.ranking import Batches, Sizes
from trainfit.planning.search.search import MAX_ROUNDS, NUM_TRACED, WORTH_TRACING, Search
from trainfit.planning.search.space import Option, Options

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
