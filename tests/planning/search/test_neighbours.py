"""Recipes that differ from traced ones in the batch alone."""

from types import SimpleNamespace
from typing import Any

import pytest

from trainfit.planning.search import neighbours
from trainfit.planning.search.candidate import MIX, Candidate
from trainfit.planning.search.neighbours import larger_than_best, smaller_than_faster
from trainfit.planning.search.sizes import Batches, Sizes

LIMIT = 100
"""Bytes that may be used."""


def traced(
    name: str, micro: int, *, a_sample: float, sample_s: float, level: str = "none", host_bytes: int = 0
) -> Any:
    """Return a trace: 20 bytes, and so many for each sample."""
    options: Any = (name,)
    sizes = Sizes(20, micro * a_sample, 0, 0, update_s=1.0, micro_s=micro * sample_s)
    rate = micro / sizes.step_s(1)
    return SimpleNamespace(
        candidate=Candidate(rate, sizes.device_bytes, options, level, micro, 1), rate=rate, sizes=sizes,
        device_bytes=sizes.device_bytes,
        result=SimpleNamespace(estimate=SimpleNamespace(host_bytes=host_bytes)),
    )  # fmt: skip


@pytest.fixture
def ranking(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a ranking whose structures grow in proportion to the batch; a test adds its traces."""
    found: dict[Any, Any] = {}

    def fastest(combinations: Any) -> Any:
        fitting = [one for one in found.values() if combinations.fits(one)]
        return max(fitting, key=lambda one: one.rate, default=None)

    monkeypatch.setattr(neighbours, "best_of", fastest)
    monkeypatch.setattr(neighbours, "discounted", lambda rate, options: rate)
    monkeypatch.setattr(neighbours, "sizes_of_traced", lambda one: one.sizes)
    combinations = SimpleNamespace(
        traced=found,
        usable_bytes=LIMIT,
        host_bytes=LIMIT,
        fits=lambda one: one.device_bytes <= LIMIT,
        batches=lambda options: [(micro, 1) for micro in (1, 2, 3, 4, 6, 8)],
    )
    grown = Batches({1: 1.0, 8: 8.0}, {1: 1.0, 8: 8.0})
    return SimpleNamespace(combinations=combinations, growth=lambda options: grown)


def add(ranking: Any, *traces: Any) -> None:
    ranking.combinations.traced.update({one.candidate.key: one for one in traces})


def test_the_best_is_traced_with_the_next_and_the_largest_batch_that_fit(ranking: Any) -> None:
    best = traced("a", 2, a_sample=10, sample_s=1.0)
    add(ranking, best, traced("a", 1, a_sample=10, sample_s=1.0))
    options, level = best.candidate.key[:2]
    assert larger_than_best(ranking) == [(options, level, 3, 1), (options, level, 8, 1)]
    add(ranking, traced("b", 3, a_sample=20, sample_s=0.5))  # The best now; with 4 it takes all there is.
    assert [key[2] for key in larger_than_best(ranking)] == [4]
    add(ranking, traced("b", 4, a_sample=20, sample_s=0.5))
    assert larger_than_best(ranking) == []


def test_no_larger_batch_is_traced_for_a_gain_that_is_a_tie(ranking: Any) -> None:
    best = traced("a", 2, a_sample=10, sample_s=1.0)
    add(ranking, SimpleNamespace(**vars(best) | {"sizes": best.sizes._replace(update_s=0.0)}))
    assert larger_than_best(ranking) == []


def test_what_is_faster_and_does_not_fit_is_traced_with_the_largest_batch_that_may(ranking: Any) -> None:
    add(ranking, traced("a", 4, a_sample=10, sample_s=1.0))
    assert smaller_than_faster(ranking) == []
    fast, faster = traced("b", 8, a_sample=16, sample_s=0.5), traced("c", 6, a_sample=21, sample_s=0.25)
    add(ranking, fast, faster, traced("d", 8, a_sample=90, sample_s=0.1))
    # Of "c" 3 samples take 83 bytes, 4 take 104: by a trace of 6 these may fit.
    assert [(key[0], key[2]) for key in smaller_than_faster(ranking)] == [
        (faster.candidate.options, 4),
        (fast.candidate.options, 4),
    ]
    add(ranking, traced("c", 4, a_sample=21, sample_s=0.25))  # It does not.
    assert [key[2] for key in smaller_than_faster(ranking) if key[0] == faster.candidate.options] == [3]


def test_no_batch_makes_up_for_what_the_host_lacks(ranking: Any) -> None:
    add(ranking, traced("a", 4, a_sample=10, sample_s=1.0))
    add(ranking, traced("b", 8, a_sample=16, sample_s=0.5, host_bytes=LIMIT + 1))
    assert smaller_than_faster(ranking) == []


def test_blocks_that_differ_have_no_neighbours(ranking: Any) -> None:
    add(ranking, traced("a", 2, a_sample=10, sample_s=1.0, level=MIX))
    assert larger_than_best(ranking) == []
    assert smaller_than_faster(ranking) == []
