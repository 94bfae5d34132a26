"""Which tiles each program of the persistent forward (flash_attention_persistent_gluon.py) takes, chosen on the host. No tensors.

In every turn the programs take the next tiles, one each. Their lengths differ under a causal mask: ``shift`` programs
further in each turn, a program meets long and short ones.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch

MANY_TURNS = 32
"""From here on all programs have about as much to do without a shift."""


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU: so many persistent programs run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=1024)
def shift_of(n: int, m: int, heads: int, rows: int, block_n: int, heads_at_once: int, programs: int) -> int:
    """The shift with which the busiest program has least to do; ``heads`` of all batches, ``rows`` of a tile, causal."""
    blocks = -(-n // rows)
    if blocks * heads >= MANY_TURNS * programs:
        return 0
    costs = lengths(n, m, heads, rows, block_n, heads_at_once)
    return min((0, programs // 2, programs // 3), key=lambda shift: max(shares(costs, shift, programs)))


def lengths(n: int, m: int, heads: int, rows: int, block_n: int, heads_at_once: int) -> list[int]:
    """Key tiles of each tile of queries, and 1 to begin and end it, in the order of ``_place`` (two groups, causal)."""
    blocks = -(-n // rows)
    groups = -(-heads // heads_at_once)
    keys = [max(0, min(m, (block + 1) * rows + m - n)) for block in reversed(range(blocks))]
    longest_first = [max(1, -(-each // block_n)) + 1 for each in keys]
    found: list[int] = []
    for group in range(groups):
        here = min(heads_at_once, heads - group * heads_at_once)
        order = longest_first if (groups - group) % 2 else longest_first[::-1]
        found += [each for each in order for _ in range(here)]
    return found


def shares(costs: list[int], shift: int, programs: int) -> list[int]:
    """What each program has to do, by ``_number``'s rule."""
    found = [0] * programs
    for number, cost in enumerate(costs):
        turn, place = divmod(number, programs)
        found[(place - turn * shift) % programs] += cost
    return found
