"""The figures in the sentences of docs/results/plan.md are those of the records."""

import pytest

from benchmarks.tables import plan
from page_claims import check

pytest.importorskip("peft")
pytest.importorskip("torchao")


def test_the_first_choice_is_nearly_as_fast_as_the_best() -> None:
    shares = [
        share for some in plan.groups().values() for cap in plan.CAPS_GIB if (share := plan.kept(some, cap))
    ]
    assert len(shares) == 10
    check("docs/results/plan.md", "is at least # % as fast as the best measured", [100 * min(shares)])
    check("docs/results/plan.md", "limits; # % is the goal", [97])
    assert min(shares) >= 0.97
    for some in plan.groups().values():
        pairs, right = plan.ordered(some)
        assert right >= 0.96 * pairs
