"""The table of evidence/pages/generation.md."""

from evidence.scripts.tables import bench
from trainfit.report.table import markdown_grid
from trainfit.spec.bench import BenchRow


def rows() -> list[BenchRow]:
    """Return the rows of the newest result on a GPU that have numbers."""
    found = bench.newest("generate", "body")
    return [row for row in found.rows if row.numbers] if found else []


def machine() -> str:
    """Return a sentence that names the GPU and the versions."""
    return bench.machine(bench.newest("generate", "body"))


def speeds() -> str:
    """Return tokens a second of both, by batch, with MBU and MFU."""
    found = {(int(row.point["batch"]), str(row.point["body"])): row.numbers for row in rows()}
    lines = []
    for batch in sorted({batch for batch, _ in found}):
        ours, theirs = found[batch, "trainfit"], found[batch, "transformers"]
        speed, other = float(ours["tokens_per_s"]), float(theirs["tokens_per_s"])
        lines.append(
            (
                f"{batch:,}", f"{speed:,.0f}", f"{other:,.0f}", f"{speed / other:.1f}",
                *(f"{1e3 * float(numbers['a_step_s']):.2f}" for numbers in (ours, theirs)),
                *(f"{100 * float(ours[name]):.1f}%" for name in ("mbu_share", "mfu_share")),
            )
        )  # fmt: skip
    heads = (
        "batch", "tokens/s", "transformers", "times as many", "a step, ms", "transformers", "MBU", "MFU",
    )  # fmt: skip
    return markdown_grid(heads, lines, 1) if lines else bench.NOT_MEASURED
