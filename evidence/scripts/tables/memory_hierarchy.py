"""Tables of evidence/pages/memory-hierarchy.md, from ``evidence/records/bench.jsonl``."""

from collections.abc import Sequence

from evidence.scripts.tables import bench
from evidence.scripts.tables.bench import of_number
from trainfit.bench.workloads import pointer_chase
from trainfit.report.bench_plot import number
from trainfit.report.table import markdown_grid
from trainfit.spec.bench import BenchRow
from trainfit.spec.units import KIB, format_bytes

KEY, CODE = "chase", "code of"
EACH = {
    "registers": "a multiprocessor", "shared memory": "a multiprocessor", "L1": "a multiprocessor, as chased",
    "local memory": "a thread at most", "constant memory": "the GPU", "L2": "the GPU",
    "device memory": "the GPU",
}  # fmt: skip
"""What has a memory of that size, from the nearest to the farthest."""


def _rows() -> Sequence[BenchRow]:
    found = bench.newest("gpu", KEY)
    return () if found is None else found.rows


def machine() -> str:
    """Return the device, its clocks and the versions."""
    return bench.machine(bench.newest("gpu", KEY))


def levels() -> str:
    """Return size, latency and bandwidth of each level."""
    rows = [row for row in _rows() if row.point.get("level") in EACH]
    if not rows:
        return bench.NOT_MEASURED
    lines = []
    for level, each in EACH.items():
        for row in (one for one in rows if one.point["level"] == level):
            size = _chased_sizes()["L1"] if level == "L1" else number(row, "size_bytes")
            lines.append(
                (
                    level, "" if size is None else f"{format_bytes(size)}, {each}",
                    format_bytes(float(row.point["set_kib"]) * KIB), of_number("cycles", ",.1f")(row),
                    of_number("latency_ns", ",.3g")(row), of_number("gb_per_s", ",.0f")(row),
                )
            )  # fmt: skip
    heads = ("memory", "size", "set", "latency, cycles", "latency, ns", "GB/s of all multiprocessors")
    return markdown_grid(heads, lines, 2)


def chased() -> str:
    """Return the latency of each set."""
    rows = [row for row in _rows() if KEY in row.point]
    if not rows:
        return bench.NOT_MEASURED
    spaces = list(dict.fromkeys(str(row.point[KEY]) for row in rows if row.point["set_kib"]))
    sets = sorted({int(row.point["set_kib"]) for row in rows} - {0})
    text = of_number("latency_ns", ",.3g")
    found = {(row.point[KEY], row.point["set_kib"]): text(row) for row in rows}
    lines = [(format_bytes(size * KIB), *(found.get((space, size), "") for space in spaces)) for size in sets]
    return markdown_grid(("set", *(f"{space}, ns" for space in spaces)), lines)


def sizes() -> str:
    """Return the sizes of L1 and L2 that the chase shows."""
    found = [f"{level} {format_bytes(size)}" for level, size in _chased_sizes().items()]
    return f"The chase shows: {', '.join(found)}." if found else ""


def _chased_sizes() -> dict[str, float]:
    """Return the sizes by today's rule: a record states those of the rule that it was made with."""
    latencies = pointer_chase.global_latencies(_rows())
    return {level: pointer_chase.edge(level, latencies) for level in ("L1", "L2")} if latencies else {}


def plot() -> str:
    """Plot of latencies by the size of the set, and of bandwidths."""
    return bench.plotted("gpu", KEY, lambda plot: plot.y in ("latency_ns", "gb_per_s"))


def code() -> str:
    """Return the marked lines of the GPU's chase in CUDA C++, PTX and SASS."""
    found = bench.newest("gpu", CODE, needs_gpu=False)
    rows = (
        [row for row in found.rows if row.point.get(CODE) == "global_chase" and "mark" in row.point]
        if found
        else []
    )
    if not rows:
        return "*Not compiled yet.*"
    stages = list(dict.fromkeys(str(row.point["in"]) for row in rows))
    width = max(map(len, stages))
    lines: list[str] = []
    for mark in sorted({int(row.point["mark"]) for row in rows}):
        for stage in stages:
            some = [row for row in rows if row.point["mark"] == mark and row.point["in"] == stage]
            for index, row in enumerate(some):
                lines.append(f"{'' if index else stage:<{width}}  {_instruction(row)}")
        lines.append("")
    (by,) = {str(row.numbers["made_by"]) for row in rows if "made_by" in row.numbers}
    return "\n".join([f"By {by}:", "", "```text", *lines[:-1], "```"])


def _instruction(row: BenchRow) -> str:
    text, count = str(row.numbers["text"]), int(row.numbers["count"])
    return f"{text}  x {count}" if count > 1 else text
