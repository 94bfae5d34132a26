"""Figures in the sentences of communication-accounting.md are those of the closed forms."""

from evidence.scripts.tables.accounting import EXERCISE, KEPT, LIMIT, LINEARS, ways
from page_claims import check
from trainfit.flops.layer_memory import fewest_ranks
from trainfit.flops.layer_times import compute_bound_tokens
from trainfit.spec.units import GIB

PAGE = "evidence/pages/communication-accounting.md"


def test_the_pages_figures() -> None:
    fewest = fewest_ranks(LINEARS, LIMIT)
    assert fewest is not None
    check(PAGE, r"\*\*From # devices on \(n > #\)", (fewest, fewest - 1))
    check(PAGE, r"The states take # GiB, so that # devices of # GiB",
          (LINEARS.state_bytes / GIB, fewest - 1, LIMIT / GIB))  # fmt: skip
    both, blocks = (one.saved_bytes_per_token for one in KEPT.values())
    check(PAGE, r"keeps the inputs of both linears, # times as much", (both / blocks,))
    check(PAGE, r"answer, #/n \+ # x batch GB", (LINEARS.state_bytes / GIB, blocks / 2 / GIB))


def test_each_change_of_the_page_lowers_the_batch() -> None:
    now = compute_bound_tokens(LINEARS, EXERCISE)
    found = ways()
    assert {way.change for way in found} >= {"mesh", "overlap", "gather in 8 bits", "two pipeline stages"}
    assert all(way.tokens < now for way in found)
