"""Records of one experiment from the same GPU and torch made into one: several processes may share the work of an experiment.

Of rows with equal points the newest record's counts, except that a row that was not run, or whose GPU's clocks were held down, never
takes the place of one that says more: what a later run had no time for is still known, what it failed at is said. A failure of a point without all of its parts is left out
once a row says more. A list of what was found (a step's top kernels) is one record's, not several lists mixed. Rows stand in the experiment's order, as far as the records tell it: a point that only a later record has
comes right after the one that it follows there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.spec.bench import WITHOUT_NUMBERS, BenchResult, BenchRow, Cell
from trainfit.spec.result import Record

At = frozenset[tuple[str, Cell]]
FOUND = {"top of": ("operation", "kernel"), "peak of": ("made at", "operation")}
"""Of a row whose point has the first key, the others are no question but what a run found."""


@dataclass(frozen=True)
class Merged:
    """One experiment on one device and torch; ``records``: whose rows are in ``result``, oldest first."""

    result: BenchResult
    records: tuple[Record, ...]


def merged(records: Sequence[Record]) -> list[Merged]:
    """Benchmarks in full form, by experiment, device and torch.

    Of several versions of torch on one device the one of the newest record is kept.
    """
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
    """How much a row says of what it is a row of: nothing, that the clocks were held down, or more."""
    return {"not-run": 0, "throttled": 1}.get(row.status, 2)


def _without_first_steps_lost(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """A series without warm-up that has the samples of the one after a warm-up step has lost its first step: no number for it.

    Records since 2026-11-21 say ``throttled`` themselves.
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
    """The point without what a run found."""
    found = {name for asked, names in FOUND.items() if asked in row.point for name in names}
    return frozenset((key, cell) for key, cell in row.point.items() if key not in found)


def _woven(order: list[At], found: list[At]) -> list[At]:
    """``order`` and the points that only ``found`` has, each right after the one before it in ``found``."""
    known, woven = set(order), list(order)
    place = next((order.index(at) for at in found if at in known), len(order))
    for at in found:
        if at in known:
            place = woven.index(at) + 1
        else:
            woven.insert(place, at)
            place += 1
    return woven
