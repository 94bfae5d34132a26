"""``accumulation``: a sum of many small floats, by dtypes and order of addition.

0.01 has no exact binary form: fp16's nearest value is 0.01000213623046875, so a thousand of them sum to
10.0021 however exactly they are added. Between 8 and 16, fp16 values are 2**-7 apart, so each addition rounds
0.01 to 0.0078125.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from trainfit.bench.harness.bench import Bench, Part, Point
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.timing import Lap, Rule
from trainfit.spec.bench import BenchRow, Cell

NUM_ADDENDS, ADDEND = 1000, 0.01
SUMS = (
    ("fp32", "fp32", False, "each addition rounds to 24 bits"),
    ("fp16", "fp16", False, "each addition rounds to 11 bits: past 8 in steps of 0.0078"),
    ("fp32", "fp16", False, "added in fp32, but the addend is already 0.010002136"),
    ("fp32", "fp16", True, "casting to fp32 does not bring back what fp16 lost"),
)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
NUM_FLOATS = {"tiny": 500, "full": 100_000}
RULE = Rule(warmup=1, min_samples=6, max_samples=20, spread=0.05, cap_s=5.0, flush=False)


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield the four sums, then five ways to add many floats."""
    for into, addend, cast, why in SUMS:
        point: Point = {"sum": into, "addend": addend, "cast": cast}
        how = (into, addend, cast)
        yield from bench.find(
            point, lambda how=how, why=why: {"total": thousand_hundredths(*how), "why": why}
        )
    count = NUM_FLOATS[bench.form]
    for name, add in METHODS.items():
        numbers: dict[str, Cell] = {}
        build = partial(_built, add, count, numbers)
        part = Part({"method": name, "floats": count})
        yield from bench.time([part], build, RULE, numbers=numbers, on_host=True)


def _built(
    add: Callable[[np.ndarray], np.float32], count: int, numbers: dict[str, Cell]
) -> Callable[[Lap], object]:
    """Return a run of one way to add; its error against the exact sum goes into ``numbers``."""
    floats = spread_out(count)
    exact = math.fsum(floats.astype(np.float64).tolist())
    numbers["relative_error"] = abs(float(add(floats)) - exact) / exact
    return lambda lap: add(floats)


def thousand_hundredths(into: str, addend: str, cast: bool) -> float:
    """Add 0.01 a thousand times into a sum of dtype ``into``; ``cast``: each addend is cast to it first."""
    total = torch.tensor(0, dtype=DTYPES[into])
    for _ in range(NUM_ADDENDS):
        one = torch.tensor(ADDEND, dtype=DTYPES[addend])
        total += one.type(DTYPES[into]) if cast else one
    return total.item()


def spread_out(count: int) -> np.ndarray:
    """Return ``count`` positive fp32 of magnitudes from 1e-4 to 1e4, the same each time."""
    random = np.random.default_rng(0)
    return (10.0 ** random.uniform(-4, 4, count)).astype(np.float32)


def naive(floats: np.ndarray) -> np.float32:
    """Add one after the other."""
    total = np.float32(0)
    for one in floats:
        total += one
    return total


def pairwise(floats: np.ndarray) -> np.float32:
    """Add halves recursively: the error grows with log n (Higham, SIAM J. Sci. Comput., 1993)."""
    if len(floats) == 1:
        return floats[0]
    middle = len(floats) // 2
    return pairwise(floats[:middle]) + pairwise(floats[middle:])


def kahan(floats: np.ndarray) -> np.float32:
    """Add what each addition lost to the next addend (Kahan, CACM, 1965)."""
    total = lost = np.float32(0)
    for one in floats:
        corrected = one - lost
        larger = total + corrected
        lost = (larger - total) - corrected
        total = larger
    return total


def smallest_two(floats: np.ndarray) -> np.float32:
    """Replace the two smallest by their sum until one is left."""
    heap = list(floats)
    heapq.heapify(heap)
    while len(heap) > 1:
        heapq.heapreplace(heap, heapq.heappop(heap) + heap[0])
    return heap[0]


METHODS: dict[str, Callable[[np.ndarray], np.float32]] = {
    "naive": naive, "sorted": lambda floats: naive(np.sort(floats)), "pairwise": pairwise, "Kahan": kahan,
    "smallest two first": smallest_two,
}  # fmt: skip
"""Plain Python over fp32 scalars: their times compare only with each other."""

EXPERIMENT = Experiment(
    title="Adding many small floats",
    question="What does a sum of many small floats lose, by dtype and order?",
    run=run,
    limit_s=60,
    on_host=True,
    columns=(
        Column("cast", note="whether each addend is cast to the sum's dtype before it is added"),
        Column("total", format=".4f"),
        Column("relative_error", note="against the exactly rounded sum"),
        Column("why"),
    ),
    plots=(
        Plot(
            x=("method",), y="relative_error", series="floats", y_log=True, is_bar=True, is_horizontal=True,
            title="Error of a sum, by the order of addition", y_label="relative error", text=".1e",
        ),
    ),
)  # fmt: skip
