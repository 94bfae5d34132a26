"""The choice among traced recipes: changes of the numerics, the frontier."""

import pytest

from trainfit.planning.search.plan import discounted, pareto
from trainfit.planning.search.space import Option


def test_each_change_of_the_numerics_must_gain_its_share() -> None:
    """With 0, 1 and 2 changes: the second gains less than 2 % over the first, and is not chosen."""
    change = Option("optimizer", (("optimizer.name", "adafactor"),), numerics="factored")
    other = Option("precision", (("precision", "fp8"),), numerics="fp8")
    names = {(): 0.95, (change,): 0.985, (change, other): 1.0}
    assert max(names, key=lambda options: discounted(names[options], options)) == (change,)
    assert discounted(1.0, (change, other)) == pytest.approx(0.98**2)


def test_the_frontier_holds_what_nothing_beats() -> None:
    points = [(3, 5), (1, 1), (2, 4), (2, 3), (4, 5)]
    assert pareto(points, lambda point: point) == [(1, 1), (2, 4), (3, 5)]
