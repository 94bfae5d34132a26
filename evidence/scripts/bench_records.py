"""Merge records of one experiment from the same GPU and torch: several processes may share an experiment.

Of rows with equal points the newest counts, except that a row that was not run or throttled never replaces
one with more information. The failure of a point that lacks keys is left out once a row has all of them. A
list of findings (a step's top kernels) comes from one record. Rows keep the experiment's order as far as the
records show it: a point that only a later record has follows the point before it there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.spec.bench import WITHOUT_NUMBERS, BenchResult, BenchRow, Cell
from trainfit.spec.result import Record

At = frozenset[tuple[str, Cell]]
FOUND = {
    "top of": ("operation", "kernel"), "peak of": ("made at", "operation"), "code of": ("mark", "line"),
}  # fmt: skip
"""Where a point has the first key, the other keys are findings and not part of the question."""


@dataclass(frozen=True)
class Merged:
    """One experiment on one device and torch; ``records`` are those whose rows are used, oldest first."""

    result: BenchResult
    records: tuple[Record, ...]


def merged(records: Sequence[Record]) -> list[Merged]:
    """Return the benchmarks in full form by experiment and device, of the newest record's torch."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=lambda one: one.created_at):
        if record.bench is not None and record.bench.form == "full":
            groups.setdefault((record.bench.experiment, record.bench.environment.device), []).append(record)
    return [_of(group) for _, group in sorted(groups.items())]


def _of(group: list[Record]) -> Merged:
    results = [record.bench for record in group if record.bench is not None]
    torch = results[-1].environment.torch
    rows: dict[At, tuple[BenchRow, int]] = {}
    lists: dict[At, int] = {}
    order: list[At] = []
    for index, result in enumerate(results):
        found = {
            frozenset(row.point.items()): row for row in result.rows if result.environment.torch == torch
        }
        order = _woven(order, list(found))
        for at, row in found.items():
            if at not in rows or _weight(row) >= _weight(rows[at][0]):
                rows[at] = (row, index)
                lists[_question(row)] = index
    kept = [
        rows[at]
        for at in order
        if lists[_question(rows[at][0])] == rows[at][1]
        and not (rows[at][0].status in WITHOUT_NUMBERS and any(at < other for other in rows))
    ]
    used = sorted({index for _, index in kept}) or [len(group) - 1]
    clocks: dict[str, int] = {}
    for index in used:
        for name, clock in results[index].environment.clocks_mhz.items():
            clocks[name] = min(clock, clocks.get(name, clock))
    newest = results[used[-1]]
    update = {
        "rows": tuple(_without_first_steps_lost([row for row, _ in kept])),
        "elapsed_s": sum(results[index].elapsed_s for index in used),
        "environment": newest.environment.model_copy(update={"clocks_mhz": clocks}),
    }
    return Merged(newest.model_copy(update=update), tuple(group[index] for index in used))


def _weight(row: BenchRow) -> int:
    """Rank the information of a row: none, throttled, or more."""
    return {"not-run": 0, "throttled": 1}.get(row.status, 2)


def _without_first_steps_lost(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Mark a series without warm-up as throttled where its first step was discarded.

    It then has the samples of the series after one warm-up step. Newer records have the status themselves.
    """
    after_one = {
        frozenset((row.point | {"warm-up": 0}).items()): row.times
        for row in rows
        if row.point.get("warm-up") == 1 and row.times
    }
    return [
        BenchRow(point=row.point, status="throttled", message="the first step was lost to held clocks")
        if row.point.get("warm-up") == 0
        and row.times
        and row.times == after_one.get(frozenset(row.point.items()))
        else row
        for row in rows
    ]


def _question(row: BenchRow) -> At:
    """Return the point without its findings."""
    found = {name for key, names in FOUND.items() if key in row.point for name in names}
    return frozenset((key, cell) for key, cell in row.point.items() if key not in found)


def _woven(order: list[At], found: list[At]) -> list[At]:
    """Return ``order`` with the points that only ``found`` has, each after its predecessor in ``found``."""
    known, woven = set(order), list(order)
    index = next((order.index(at) for at in found if at in known), len(order))
    for at in found:
        if at in known:
            index = woven.index(at) + 1
        else:
            woven.insert(index, at)
            index += 1
    return woven
