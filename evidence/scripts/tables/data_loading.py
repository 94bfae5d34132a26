"""Tables of evidence/pages/data-loading.md, from ``evidence/records/bench.jsonl``."""

from collections.abc import Sequence

from evidence.scripts.tables import bench
from evidence.scripts.tables.bench import having, of_number
from trainfit.bench.experiments.dataloader import READ_FROM, TOKENISED, VARIED_WORKERS
from trainfit.report.table import markdown_grid
from trainfit.spec.bench import BenchRow, Cell

KEY = "tokenised"


def _rows() -> Sequence[BenchRow]:
    found = bench.newest("dataloader", KEY)
    return () if found is None else found.rows


def machine() -> str:
    """Return the device and the versions."""
    return bench.machine(bench.newest("dataloader", KEY))


def disk() -> str:
    """Return rates of the disk alone."""
    rows = [row for row in _rows() if "reads" in row.point]
    if not rows:
        return bench.NOT_MEASURED
    lines = [
        (
            str(row.point["reads"]), str(row.point["read from"]), of_number("disk_gb_per_s", ",.3g")(row),
            of_number("read_s", ",.1f", 1e6)(row),
        )
        for row in rows
    ]  # fmt: skip
    return markdown_grid(("reads", "from", "GB/s", "a read of 4 KiB, us"), lines, 2)


def text() -> str:
    """Return batches per second and the share of waiting by workers, two batches ahead."""
    rows = [row for row in _rows() if KEY in row.point and row.point["prefetch"] in (0, 2)]
    if not rows:
        return bench.NOT_MEASURED
    workers = sorted({int(row.point["workers"]) for row in rows})
    lines = [
        (tokenised, read_from, *(_cell(rows, tokenised, read_from, count) for count in workers))
        for tokenised in TOKENISED
        for read_from in READ_FROM
    ]
    heads = [f"{count} workers" if count != 1 else "1 worker" for count in workers]
    return markdown_grid(("tokenised", "read from", *heads), lines, 2)


def _cell(rows: Sequence[BenchRow], tokenised: str, read_from: str, workers: int) -> str:
    at: dict[str, Cell] = {"tokenised": tokenised, "read from": read_from, "workers": workers}
    for row in having(rows, at):
        share = of_number("waiting_share", ".0f", 100.0)(row)
        return (
            f"{of_number('batches_per_s', ',.1f')(row)} ({share})"
            if "waiting_share" in row.numbers
            else share
        )
    return ""


def alone() -> str:
    """Return the time of a step whose batch is on the device."""
    rows = [row for row in _rows() if row.point.get("read from") == "device"]
    return f"A step alone takes {of_number('step_s', ',.2f', 1e3)(rows[0])} ms." if rows else ""


def varied() -> str:
    """Return batches per second by prefetch and pinning, with four workers and the page cache."""
    at: dict[str, Cell] = {"read from": "page cache", "workers": VARIED_WORKERS}
    rows = [row for row in having(_rows(), at) if KEY in row.point]
    if not rows:
        return bench.NOT_MEASURED
    rows = sorted(rows, key=lambda row: (row.point[KEY] != TOKENISED[0], row.point["prefetch"]))
    lines = [
        (
            str(row.point[KEY]), str(row.point["prefetch"]), "yes" if row.point["pinned"] else "no",
            of_number("batches_per_s", ",.1f")(row), of_number("waiting_share", ".1f", 100.0)(row),
        )
        for row in rows
    ]  # fmt: skip
    return markdown_grid(("tokenised", "prefetch", "pinned", "batches/s", "waiting, %"), lines, 3)


def plot() -> str:
    """Plot of loaders of text by workers."""
    return bench.plotted("dataloader", KEY, lambda plot: KEY in plot.where)
