"""Assignments of saving policies to a model's blocks: peak memory and time of many, and which are tried.

Legend: a policy is a level of recomputation and a share to offload; an assignment gives each of L blocks
one policy; C assignments are evaluated together as an integer array [C, L]. Internal arrays are [L, C], so
that a step over the blocks reads rows.

Evaluation. Memory is followed through the step, piece by piece of the probe: block by block through the
forward, over the head and the loss, block by block through the backward, where recomputed results and
gradients add to what is saved.

Candidates. They are runs of blocks that recompute alike, and a stretch of blocks that offloads. Memory is
freed from the last block to the first while gradients accumulate, so where blocks differ, those that keep
little do best in front. A level that frees less memory per second than another is only mixed in where a whole
block is too much. Copies are free as long as the blocks compute longer than they take, so offloads are spread
evenly, from the first block on. Wholly recomputed blocks have only their input to offload: all do, or none.
tests/planning/recompute/test_solver.py compares this with every assignment of small models.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainfit.catalog.constants import constants
from trainfit.checkpointing.per_block import fits_share
from trainfit.ledger.segments import rounded
from trainfit.planning.recompute.probe import Cost, Probe
from trainfit.spec.recompute import LayerRun

Array = NDArray[np.float64]
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


class Policy(NamedTuple):
    """How one block saves what its backward needs."""

    level: str
    share: float = 0.0


class Evaluation(NamedTuple):
    """Costs of C assignments, each an array [C]."""

    seconds: Array
    """Seconds of a step, as ``time.roofline`` counts them."""
    waits_s: Array
    """Seconds, beyond the computation, in which the GPU waits for copies to or from the host."""
    gone_bytes: Array
    """Bytes that one micro-batch offloads."""
    peak_bytes: Array
    """Highest allocated bytes of the forward and the backward."""


def gone_bytes(cost: Cost, share: float) -> int:
    """Return the device bytes that a block's offloaded storages free."""
    gone = held = total = 0
    for size in cost.held_bytes:
        held += size
        if share and fits_share(size, gone, held, share):
            gone += size
            total += rounded(size)
    return total


COLUMNS: dict[str, Callable[[Cost, Policy], float]] = {
    "keeps": lambda cost, policy: cost.forward.net_bytes,
    "late": lambda cost, policy: cost.late_bytes,
    "forward_peak": lambda cost, policy: cost.forward.peak_bytes,
    "backward_peak": lambda cost, policy: cost.backward.peak_bytes,
    "backward_net": lambda cost, policy: cost.backward.net_bytes,
    "gone": lambda cost, policy: gone_bytes(cost, policy.share),
    "forward_s": lambda cost, policy: cost.forward_work.gpu_s,
    "backward_s": lambda cost, policy: cost.backward_work.gpu_s,
    "num_ops": lambda cost, policy: cost.forward_work.num_ops + cost.backward_work.num_ops,
    "num_forward_ops": lambda cost, policy: cost.forward_work.num_ops,
    "num_products": lambda cost, policy: cost.forward_work.num_products,
    "num_again": lambda cost, policy: cost.backward_work.num_again,
}


class Table(NamedTuple):
    """Numbers of every block (first axis) under every policy (second axis), by name as in COLUMNS."""

    policies: tuple[Policy, ...]
    columns: dict[str, Array]


def table(probe: Probe, policies: Sequence[Policy]) -> Table:
    """Lay out the probe's numbers for ``evaluate``."""

    def column(read: Callable[[Cost, Policy], float]) -> Array:
        rows = {
            kind: [float(read(probe.costs[kind, o.level], o)) for o in policies] for kind in set(probe.kinds)
        }
        return np.array([rows[kind] for kind in probe.kinds])

    return Table(tuple(policies), {name: column(read) for name, read in COLUMNS.items()})


def evaluate(
    probe: Probe, numbers: Table, assignments: NDArray[np.intp], copy_bytes_per_s: float, accumulate: int
) -> Evaluation:
    """Return time and peak of each assignment ([C, L], indices of policies; the last block offloads nothing).

    Args:
        copy_bytes_per_s: between GPU and host, each way.
        accumulate: micro-batches a step. The pieces' bytes are of one micro-batch, their work of all.
    """
    num_policies = len(numbers.policies)
    at = np.ascontiguousarray(assignments.T) + num_policies * np.arange(len(probe.kinds))[:, None]

    def pick(name: str) -> Array:
        return np.take(numbers.columns[name], at)

    forward_s, backward_s, gone = pick("forward_s"), pick("backward_s"), pick("gone")
    waits = accumulate * _waits(gone / copy_bytes_per_s, forward_s / accumulate, backward_s / accumulate)
    gpu_s = probe.rest.gpu_s + forward_s.sum(0) + backward_s.sum(0)
    seconds = np.maximum(gpu_s, _host_s(probe, pick))
    return Evaluation(seconds, waits, gone.sum(0), _peaks(probe, pick))


def _peaks(probe: Probe, pick: Callable[[str], Array]) -> Array:
    """Return the highest allocated bytes.

    A block's offloaded bytes are freed once the next offloading block has run (checkpointing/per_block.py).
    """
    gone, keeps, net = pick("gone"), pick("keeps"), pick("backward_net")
    forward_peak, backward_peak = pick("forward_peak"), pick("backward_peak")
    depth, num = keeps.shape
    level = np.full(num, probe.start_bytes + probe.before.net_bytes, dtype=float)
    peak = np.full(num, probe.start_bytes + probe.before.peak_bytes, dtype=float)
    leaving = np.zeros(num)
    for i in range(depth):
        peak = np.maximum(peak, level + forward_peak[i])
        level = level + keeps[i]
        given_up = (gone[i] > 0) | (i == depth - 1)
        level = level - np.where(given_up, leaving, 0)
        leaving = np.where(given_up, gone[i], leaving)
    peak = np.maximum(peak, level + probe.head.peak_bytes)
    level = level + probe.head.net_bytes - pick("late").sum(0)
    peak = np.maximum(peak, level + probe.loss.peak_bytes)
    level = level + probe.loss.net_bytes
    for i in range(depth - 1, -1, -1):
        if i:
            level = level + gone[i - 1]
        peak = np.maximum(peak, level + backward_peak[i])
        level = level + net[i]
    return np.maximum(peak, level + probe.after.peak_bytes)


def _waits(copy_s: Array, forward_s: Array, backward_s: Array) -> Array:
    """Return the seconds of one micro-batch in which the GPU waits for copies.

    A block's copy out is assumed to begin halfway through its forward, a copy back with the next block's
    backward.
    """
    depth, num = copy_s.shape
    clock, copies_end_s, due = np.zeros(num), np.zeros(num), np.zeros(num)
    for i in range(depth):
        leaves = copy_s[i] > 0
        copies_end_s = np.where(
            leaves, np.maximum(copies_end_s, clock + forward_s[i] / 2) + copy_s[i], copies_end_s
        )
        clock = clock + forward_s[i]
        clock = np.where(leaves | (i == depth - 1), np.maximum(clock, due), clock)
        due = np.where(leaves, copies_end_s, due)
    copies_end_s = np.zeros(num)
    arrives = np.zeros(num)
    for i in range(depth - 1, -1, -1):
        clock = np.maximum(clock, arrives)
        if i:
            copies_end_s = np.maximum(copies_end_s, clock) + copy_s[i - 1]
            arrives = np.where(copy_s[i - 1] > 0, copies_end_s, 0)
        clock = clock + backward_s[i]
    return clock - forward_s.sum(0) - backward_s.sum(0)


def _host_s(probe: Probe, pick: Callable[[str], Array]) -> Array:
    """Return the seconds that the host needs to issue everything, as ``time.roofline`` counts them."""
    rest = probe.rest
    products = rest.num_products + pick("num_products").sum(0)
    again = rest.num_again + pick("num_again").sum(0)
    recomputed = pick("num_forward_ops").sum(0) * again / np.maximum(products, 1)
    plain = rest.num_ops + pick("num_ops").sum(0) - recomputed
    known = constants().host
    return plain * known.operation_s + recomputed * known.recomputed_operation_s


class Offload(NamedTuple):
    """Of the blocks before ``stop`` that are not wholly recomputed, every ``every``-th offloads the share."""

    share: float
    every: int
    stop: int


def policies_of(probe: Probe, levels: Sequence[str], *, offload_levels: Sequence[str]) -> list[Policy]:
    """Return every level without offload, and with each share that frees other bytes."""
    found = [Policy(level) for level in levels]
    for level in offload_levels:
        seen: set[tuple[int, ...]] = set()
        for share in SHARES:
            gone = tuple(gone_bytes(probe.costs[kind, level], share) for kind in sorted(set(probe.kinds)))
            if any(gone) and gone not in seen:
                seen.add(gone)
                found.append(Policy(level, share))
    return found


def assignments(
    probe: Probe, policies: Sequence[Policy], copy_bytes_per_s: float, accumulate: int
) -> Assignments:
    """Return all candidates; the last block never offloads."""
    depth = len(probe.kinds)
    levels = [policy.level for policy in policies if not policy.share]
    offloads = list(_offloads(probe, policies, copy_bytes_per_s, accumulate))
    whole = [offload for offload in offloads if offload.stop in (depth // 2, depth - 1)]
    plain = np.array([policies.index(Policy(level)) for level in levels])
    shares = {offload.share for offload in offloads}
    shared = {share: _with_share(policies, levels, share) for share in shares}
    # A wholly recomputed block saves its input alone, so only one share is possible.
    inputs_go = _with_share(policies, levels, 1.0)[-1]
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


def _with_share(policies: Sequence[Policy], levels: Sequence[str], share: float) -> Assignments:
    """Return, by level, its policy of the largest share up to this one."""
    best = [
        max((o for o in policies if o.level == level and o.share <= share), key=lambda o: o.share)
        for level in levels
    ]
    return np.array([policies.index(policy) for policy in best])


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
    probe: Probe, policies: Sequence[Policy], copy_bytes_per_s: float, accumulate: int
) -> Iterator[Offload]:
    """Yield the patterns whose copies take at most about as long as the blocks compute."""
    depth = len(probe.kinds)
    shared = [policy for policy in policies if policy.share and policy.level != policies[-1].level]
    for share in sorted({policy.share for policy in shared}):
        for every in EVERY:
            fits = any(
                gone_bytes(cost, share) / copy_bytes_per_s
                <= SLACK * every * cost.forward_work.gpu_s / accumulate
                for policy in shared
                if policy.share == share
                for cost in _costs(probe, policy.level)
            )
            if fits:
                yield from (Offload(share, every, stop) for stop in range(1, depth))
            if fits and every > 1:
                break  # Offloading fewer blocks would free less than a smaller share of all.


def _costs(probe: Probe, level: str) -> list[Cost]:
    return [cost for (_, of), cost in probe.costs.items() if of == level]


def runs_of(row: Sequence[int], policies: Sequence[Policy]) -> tuple[LayerRun, ...]:
    """Return an assignment as a recipe states it, in the longest runs from the front."""
    chosen = [policies[index] for index in row]
    runs: list[LayerRun] = []
    start = 0
    while start < len(chosen):
        run = max((_run(chosen, start, every) for every in EVERY), key=lambda run: run.count)
        runs.append(run)
        start += run.count
    return tuple(runs)


def _run(chosen: Sequence[Policy], start: int, every: int) -> LayerRun:
    level, share = chosen[start]
    count = 0
    while start + count < len(chosen) and chosen[start + count] == Policy(
        level, 0.0 if count % every else share
    ):
        count += 1
    fields = {"recompute": level, "offload": share, "every": every if share else 1, "count": count}
    return LayerRun.model_validate(fields)
