"""The persistent forward's programs share the tiles of queries evenly, and each is taken once."""

from heapq import heappop, heappush

import pytest

from trainfit.kernels.flash_attention.hopper.schedule import lengths, shares, shift_of

H200 = 132
"""Multiprocessors."""


def first_free(costs: list[int], programs: int) -> int:
    """When the last program ends if each tile goes to the program that is free first (Graham 1969)."""
    free = [(0, program) for program in range(programs)]
    for cost in costs:
        until, program = heappop(free)
        heappush(free, (until + cost, program))
    return max(free)[0]


@pytest.mark.parametrize(
    ("n", "heads", "most"),
    [(8192, 16, 1.001), (16384, 16, 1.003), (4096, 32, 1.003), (2048, 64, 1.04),
     (32768, 8, 1.03), (8192, 128, 1.01)],
)  # fmt: skip
def test_programs_do_nearly_the_same(n: int, heads: int, most: float) -> None:
    costs = lengths(n, n, heads, 128, 128, 8)
    shift = shift_of(n, n, heads, 128, 128, 8, H200)
    assert max(shares(costs, shift, H200)) <= most * sum(costs) / H200


@pytest.mark.parametrize(("n", "heads"), [(1000, 20), (1024, 128), (777, 40), (512, 200)])
def test_few_tiles_take_at_most_a_fifth_longer_than_handed_out_one_by_one(n: int, heads: int) -> None:
    costs = lengths(n, n, heads, 128, 128, 8)
    shift = shift_of(n, n, heads, 128, 128, 8, H200)
    assert max(shares(costs, shift, H200)) <= 1.2 * first_free(sorted(costs, reverse=True), H200)


@pytest.mark.parametrize(("n", "m", "heads"), [(300, 300, 5), (200, 520, 9), (520, 200, 16)])
def test_all_tiles_are_there(n: int, m: int, heads: int) -> None:
    """As many as rows need, each as long as its keys: written out tile by tile."""
    found = lengths(n, m, heads, 128, 128, 4)
    wanted = []
    for first in range(0, n, 128):
        seen = max(0, min(m, first + 128 + m - n))
        wanted += [max(1, -(-seen // 128)) + 1] * heads
    assert sorted(found) == sorted(wanted)
    assert all(sum(shares(found, shift, 7)) == sum(wanted) for shift in range(7))
