"""Which program of the persistent FlashAttention takes which tiles of queries."""

import pytest
import torch

from trainfit.kernels.flash_attention_tma import (
    Groups,
    _table,  # pyright: ignore[reportPrivateUsage]
)

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("n", "m", "heads", "is_causal", "groups"),
    [(8192, 8192, 16, True, 2), (777, 777, 8, True, 3), (520, 200, 4, True, 2), (200, 520, 20, False, 3)],
)
def test_every_tile_once(n: int, m: int, heads: int, is_causal: bool, groups: int):
    how = Groups(groups, 128, 2, persistent=True)
    rows = _table(n, m, heads, is_causal, how, 132, torch.device("cpu")).tolist()
    taken = sorted(number for count, *numbers in rows for number in numbers[:count])
    assert taken == list(range(-(-n // (64 * groups)) * heads))


def test_programs_end_together():
    """Causal, 1024 tiles of 1 to 64 key tiles over 132 programs: none has 2 % more than its share."""
    how = Groups(2, 128, 2, persistent=True)
    rows = _table(8192, 8192, 16, True, how, 132, torch.device("cpu")).tolist()
    work = [sum(64 - number % 512 // 8 for number in numbers[:count]) for count, *numbers in rows]
    assert sum(work) == 16 * 64 * 65 // 2
    assert max(work) <= 1.02 * sum(work) / 132
