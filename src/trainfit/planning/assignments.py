"""Peak memory and time of many ways to save a model's blocks, from what a probe measured of single blocks.

Legend: an option is a level of recomputation and a share to offload; an assignment gives each of L blocks
one option; C assignments are evaluated together as an integer array [C, L]. Internal arrays are [L, C], so
that a step over the blocks reads rows.

Memory is followed through the step, piece by piece of the probe: block by block through the forward, over
the head and the loss, block by block through the backward, where recomputed results and gradients add to
what is saved.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainfit.catalog.constants import constants
from trainfit.checkpointing.per_block import fits_share
from trainfit.ledger.segments import rounded
from trainfit.planning.probe import Cost, Probe

Array = NDArray[np.float64]


class Option(NamedTuple):
    """Saving policy of one block."""

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


COLUMNS: dict[str, Callable[[Cost, Option], float]] = {
    "keeps": lambda cost, option: cost.forward.net_bytes,
    "late": lambda cost, option: cost.late_bytes,
    "forward_peak": lambda cost, option: cost.forward.peak_bytes,
    "backward_peak": lambda cost, option: cost.backward.peak_bytes,
    "backward_net": lambda cost, option: cost.backward.net_bytes,
    "gone": lambda cost, option: gone_bytes(cost, option.share),
    "forward_s": lambda cost, option: cost.forward_work.gpu_s,
    "backward_s": lambda cost, option: cost.backward_work.gpu_s,
    "num_ops": lambda cost, option: cost.forward_work.num_ops + cost.backward_work.num_ops,
    "num_forward_ops": lambda cost, option: cost.forward_work.num_ops,
    "num_products": lambda cost, option: cost.forward_work.num_products,
    "num_again": lambda cost, option: cost.backward_work.num_again,
}


class Table(NamedTuple):
    """Numbers of every block (first axis) under every option (second axis), by name as in COLUMNS."""

    options: tuple[Option, ...]
    columns: dict[str, Array]


def table(probe: Probe, options: Sequence[Option]) -> Table:
    """Lay out the probe's numbers for ``evaluate``."""

    def column(read: Callable[[Cost, Option], float]) -> Array:
        rows = {
            kind: [float(read(probe.costs[kind, o.level], o)) for o in options] for kind in set(probe.kinds)
        }
        return np.array([rows[kind] for kind in probe.kinds])

    return Table(tuple(options), {name: column(read) for name, read in COLUMNS.items()})


def evaluate(
    probe: Probe, numbers: Table, assignments: NDArray[np.intp], copy_bytes_per_s: float, accumulate: int
) -> Evaluation:
    """Return time and peak of each assignment ([C, L], indices of options; the last block offloads nothing).

    Args:
        copy_bytes_per_s: between GPU and host, each way.
        accumulate: micro-batches a step. The pieces' bytes are of one micro-batch, their work of all.
    """
    num_options = len(numbers.options)
    at = np.ascontiguousarray(assignments.T) + num_options * np.arange(len(probe.kinds))[:, None]

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
