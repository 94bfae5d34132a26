"""Candidate assignments: runs of blocks that recompute alike, and a stretch of blocks that offloads.

Legend as in ``assignments``: options; C assignments of L blocks as an integer array [C, L].

Memory is freed from the last block to the first while gradients accumulate, so where blocks differ, those
that keep little do best in front. A level that frees less memory per second than another is only mixed in
where a whole block is too much. Copies are free as long as the blocks compute longer than they take, so
offloads are spread evenly, from the first block on. Wholly recomputed blocks have only their input to
offload: all do, or none. tests/techniques/test_recompute_plans.py compares this with every assignment of
small models.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainfit.planning.assignments import Option, gone_bytes
from trainfit.planning.probe import Cost, Probe
from trainfit.spec.recompute import LayerRun

Assignments = NDArray[np.intp]

SHARES = tuple(step / 20 for step in range(1, 21))
EVERY = (1, 2, 3, 4)
"""Every how many blocks one offloads; tried in this order until copies keep up with the computation."""
ALL_MIXES_UP_TO = 12
"""Blocks up to which every number of blocks of each level is tried."""
FEW = 2
"""Most blocks of a third level, which only fills the rest of the budget."""
SLACK = 1.25
"""Offloads whose copies take more than this share of the compute time are not evaluated."""


class Offload(NamedTuple):
    """Of the blocks before ``stop`` that are not wholly recomputed, every ``every``-th offloads the share."""

    share: float
    every: int
    stop: int


def options(probe: Probe, levels: Sequence[str], *, offload_levels: Sequence[str]) -> list[Option]:
    """Return every level without offload, and with each share that frees other bytes."""
    found = [Option(level) for level in levels]
    for level in offload_levels:
        seen: set[tuple[int, ...]] = set()
        for share in SHARES:
            gone = tuple(gone_bytes(probe.costs[kind, level], share) for kind in sorted(set(probe.kinds)))
            if any(gone) and gone not in seen:
                seen.add(gone)
                found.append(Option(level, share))
    return found


def assignments(
    probe: Probe, choices: Sequence[Option], copy_bytes_per_s: float, accumulate: int
) -> Assignments:
    """Return all candidates; the last block never offloads."""
    depth = len(probe.kinds)
    levels = [option.level for option in choices if not option.share]
    offloads = list(_offloads(probe, choices, copy_bytes_per_s, accumulate))
    whole = [offload for offload in offloads if offload.stop in (depth // 2, depth - 1)]
    plain = np.array([choices.index(Option(level)) for level in levels])
    shared = {share: _with_share(choices, levels, share) for share in {offload.share for offload in offloads}}
    # A wholly recomputed block saves its input alone, so only one share is possible.
    inputs_go = _with_share(choices, levels, 1.0)[-1]
    rows: list[Assignments] = []
    for counts in _mixes(depth, len(levels)):
        rows += [plain[np.repeat(order, [counts[level] for level in order])] for order in _orders(counts)]
        in_front = np.repeat(np.arange(len(levels))[::-1], counts[::-1])
        num_whole = counts[-1]
        for offload in [Offload(0.0, 1, 0), *(offloads if max(counts) == depth else whole)]:
            row = plain[in_front]
            row[: min(num_whole, depth - 1)] = inputs_go
            part = slice(num_whole, offload.stop, offload.every)
            if offload.stop > num_whole:
                row[part] = shared[offload.share][in_front[part]]
            rows.append(row)
    return np.array(rows)


def _with_share(choices: Sequence[Option], levels: Sequence[str], share: float) -> Assignments:
    """Return, by level, its option of the largest share up to this one."""
    best = [
        max((o for o in choices if o.level == level and o.share <= share), key=lambda o: o.share)
        for level in levels
    ]
    return np.array([choices.index(option) for option in best])


def _mixes(depth: int, num_levels: int) -> Iterator[tuple[int, ...]]:
    """Yield the number of blocks of each level.

    Two neighbouring or outer levels are mixed freely, of a third there are at most a few.

    Example: of 3 blocks and the levels (none, selective, full) all ten mixes: (0, 0, 3), (0, 1, 2), ...,
    (3, 0, 0). Of 20 blocks 126 of 231. (1, 10, 9) is one: a single block without recomputation fills the
    rest of the budget. (5, 10, 5) is none: of three levels, an outer one has at most ``FEW`` blocks.
    """
    for counts in _sums(depth, num_levels):
        several = sum(count > 0 for count in counts) > 2
        if depth <= ALL_MIXES_UP_TO or not several or 0 < min(counts[0], counts[-1]) <= FEW:
            yield counts


def _sums(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _sums(total - first, parts - 1):
            yield (first, *rest)


def _orders(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the orders of levels: all of two; of three, those that keep least in front or at the end."""
    present = tuple(level for level, count in enumerate(counts) if count)
    if len(present) < 3:
        return list(itertools.permutations(present))
    none, some, whole = present
    return [(whole, some, none), (none, some, whole), (some, whole, none), (some, none, whole)]


def _offloads(
    probe: Probe, choices: Sequence[Option], copy_bytes_per_s: float, accumulate: int
) -> Iterator[Offload]:
    """Yield the patterns whose copies take at most about as long as the blocks compute."""
    depth = len(probe.kinds)
    shared = [option for option in choices if option.share and option.level != choices[-1].level]
    for share in sorted({option.share for option in shared}):
        for every in EVERY:
            fits = any(
                gone_bytes(cost, share) / copy_bytes_per_s
                <= SLACK * every * cost.forward_work.gpu_s / accumulate
                for option in shared
                if option.share == share
                for cost in _costs(probe, option.level)
            )
            if fits:
                yield from (Offload(share, every, stop) for stop in range(1, depth))
            if fits and every > 1:
                break  # Offloading fewer blocks would free less than a smaller share of all.


def _costs(probe: Probe, level: str) -> list[Cost]:
    return [cost for (_, of), cost in probe.costs.items() if of == level]


def runs_of(row: Sequence[int], choices: Sequence[Option]) -> tuple[LayerRun, ...]:
    """Return an assignment as a recipe states it, in the longest runs from the front."""
    chosen = [choices[index] for index in row]
    runs: list[LayerRun] = []
    start = 0
    while start < len(chosen):
        run = max((_run(chosen, start, every) for every in EVERY), key=lambda run: run.count)
        runs.append(run)
        start += run.count
    return tuple(runs)


def _run(chosen: Sequence[Option], start: int, every: int) -> LayerRun:
    level, share = chosen[start]
    count = 0
    while start + count < len(chosen) and chosen[start + count] == Option(
        level, 0.0 if count % every else share
    ):
        count += 1
    fields = {"recompute": level, "offload": share, "every": every if share else 1, "count": count}
    return LayerRun.model_validate(fields)
