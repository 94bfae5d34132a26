"""Static schedule of the persistent forward (forward.py), computed on the host.

In every turn each program takes one of the next tiles. Their lengths differ under a causal mask, so the
assignment rotates by ``shift`` programs per turn.

Example: 512 queries and keys of one head in tiles of 128 rows, three programs. The last tile of queries sees
four tiles of keys, the first tile sees one. A tile costs one more than that, and the longest come first:

    tiles            5 4 3 | 2       three in the first turn, one in the second
    shift 0          loads 5 + 2, 4, 3     the longest is 7
    shift 1          loads 5, 4, 3 + 2     the longest is 5

With a shift of 1, program ``p`` takes in the second turn the tile that program ``p + 1`` takes without it.
"""

from functools import cache, lru_cache

import torch

MANY_TURNS = 32  # From this number of turns on, the load is balanced without a shift


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the GPU's multiprocessors, which is how many persistent programs run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=1024)
def shift_of(n: int, m: int, heads: int, rows: int, block_n: int, heads_at_once: int, programs: int) -> int:
    """Return the shift with the lowest maximum load (causal; ``heads`` of all batches, ``rows`` per tile)."""
    blocks = -(-n // rows)
    if blocks * heads >= MANY_TURNS * programs:
        return 0
    costs = lengths(n, m, heads, rows, block_n, heads_at_once)
    return min((0, programs // 2, programs // 3), key=lambda shift: max(shares(costs, shift, programs)))


def lengths(n: int, m: int, heads: int, rows: int, block_n: int, heads_at_once: int) -> list[int]:
    """Return each query tile's cost, its key tiles + 1, in the order of ``_position`` (pipeline.py)."""
    blocks = -(-n // rows)
    groups = -(-heads // heads_at_once)
    keys = [max(0, min(m, (block + 1) * rows + m - n)) for block in reversed(range(blocks))]
    longest_first = [max(1, -(-each // block_n)) + 1 for each in keys]
    found: list[int] = []
    for group in range(groups):
        num_heads = min(heads_at_once, heads - group * heads_at_once)
        order = longest_first if (groups - group) % 2 else longest_first[::-1]
        found += [each for each in order for _ in range(num_heads)]
    return found


def shares(costs: list[int], shift: int, programs: int) -> list[int]:
    """Return the load of each program under the rule of ``_number`` (forward.py)."""
    found = [0] * programs
    for number, cost in enumerate(costs):
        turn, program = divmod(number, programs)
        found[(program - turn * shift) % programs] += cost
    return found
