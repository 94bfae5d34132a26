"""The start of a search and the batch at which its options are compared."""

from types import SimpleNamespace
from typing import Any

from planned_recipe import recipe
from trainfit.planning.search.sizes import Sizes
from trainfit.planning.search.start import ACTIVATIONS_TOKENS, find_batch

TOKENS = 512


def test_a_start_that_fits_with_no_batch_is_compared_at_many_tokens() -> None:
    batches = [(1, 1), (8, 1), (16, 1), (32, 1)]
    sizes = {micro: Sizes(100, micro, 50, 0, update_s=0.0, micro_s=float(micro)) for micro in (1, 16)}
    for usable_bytes, expected in ((90, ACTIVATIONS_TOKENS // TOKENS), (109, 1)):
        combinations = SimpleNamespace(
            recipe=recipe(batch={"micro": 1, "seq": TOKENS}), usable_bytes=usable_bytes,
            batches=lambda options: batches,
        )  # fmt: skip
        ranking: Any = SimpleNamespace(
            combinations=combinations, start=(), level="none", start_sizes=lambda level: sizes
        )
        find_batch(ranking)
        assert ranking.at == (expected, 1)
