"""Records of one experiment from the same GPU and torch made into one: several processes may share the work of an experiment.

Of rows with equal points the newest record's counts, except that a row that was not run never takes the place of one that was:
what a later run had no time for is still known, what it failed at is said. A failure of a point without all of its parts is left
out once a row says more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.spec.bench import WITHOUT_NUMBERS, BenchResult, BenchRow, Cell
from trainfit.spec.result import Record

At = frozenset[tuple[str, Cell]]


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
    for index, result in enumerate(results):
        for row in result.rows if result.environment.torch == torch else ():
            at = frozenset(row.point.items())
            if at not in rows or not _not_run(row) or _not_run(rows[at][0]):
                rows[at] = (row, index)
    kept = [
        one
        for at, one in rows.items()
        if not (one[0].status in WITHOUT_NUMBERS and any(at < other for other in rows))
    ]
    used = sorted({index for _, index in kept}) or [len(group) - 1]
    clocks: dict[str, int] = {}
    for index in used:
        for name, clock in results[index].environment.clocks_mhz.items():
            clocks[name] = min(clock, clocks.get(name, clock))
    newest = results[used[-1]]
    update = {
        "rows": tuple(row for row, _ in kept),
        "elapsed_s": sum(results[index].elapsed_s for index in used),
        "environment": newest.environment.model_copy(update={"clocks_mhz": clocks}),
    }
    return Merged(newest.model_copy(update=update), tuple(group[index] for index in used))


def _not_run(row: BenchRow) -> bool:
    return row.status == "not-run"
