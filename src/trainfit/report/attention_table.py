"""The catalog's table of attention kernels, written from records of ``trainfit bench``.

``python -m trainfit.report.attention_table RECORDS... [--into src/trainfit/catalog/attention.toml]``

Enters: files of Records. Leaves: the whole file anew, so a shape that no record given has is gone from it. Of several records of a
shape and GPU the newest counts, and only as a whole: kernels of one shape are compared within one run; one that came to fewer kernels
than an older one with the same torch does not take its place. Shapes of fewer heads than
models have are left out: one head leaves most of a large GPU idle. A median of fewer than six samples is left out, too.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainfit.catalog.attention import FILE, AttentionRun, AttentionShape
from trainfit.records import load, replace_text
from trainfit.spec.bench import BenchRow
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.recipe import AttentionKernel
from trainfit.spec.result import Record
from trainfit.spec.value import parse

MADE_BY = "python -m trainfit.report.attention_table RECORDS"
KERNELS: dict[str, AttentionKernel] = {
    "eager": "eager", "pytorch": "sdpa", "flash": "flash", "cudnn": "cudnn", "efficient": "efficient", "ours": "triton",
}  # fmt: skip
"""A benchmark's body -> the recipe's word for it; bodies that no recipe can ask for are left out."""
NEEDED = ("dtype", "head", "causal", "seq", "heads", "batch", "body", "pass")
FEWEST_HEADS = 8
FEWEST_SAMPLES = 6
"""The fewest whose least and greatest hold the median with 95 % (bench/timing.py)."""
Key = tuple[str, int, bool, int]


def main(arguments: list[str] | None = None) -> int:
    """Write the table; exit code 0, or 65 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m trainfit.report.attention_table", description="Write the catalog's attention table."
    )  # fmt: skip
    parser.add_argument("files", type=Path, nargs="+", help="records: JSON Lines or SQLite")
    parser.add_argument("--into", type=Path, default=FILE, help="TOML file to write")
    options = parser.parse_args(arguments)
    try:
        runs = runs_of([record for file in options.files for record in load(file)])
    except (InputError, FileNotFoundError) as error:
        print(f"trainfit: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    replace_text(options.into, text_of(runs))
    print(f"{sum(len(run.shapes) for run in runs)} shapes of {len(runs)} records in {options.into}")
    return 0


def runs_of(records: Sequence[Record]) -> list[AttentionRun]:
    """What the records say of attention, oldest first.

    Raises:
        InputError: no record in full form has two kernels of one shape, on a GPU of the catalog.
    """
    told: dict[tuple[str, Key], Record] = {}
    shapes: dict[tuple[str, Key], AttentionShape] = {}
    for record in sorted(records, key=lambda one: one.created_at):
        result = record.bench
        if result is None or result.form != "full" or result.gpu is None:
            continue
        for shape in shapes_of(result.rows):
            before = told.get((result.gpu, shape.key))
            same_torch = (
                before and before.bench and before.bench.environment.torch == result.environment.torch
            )
            if same_torch and set(shape.seconds) < set(shapes[result.gpu, shape.key].seconds):
                continue
            told[result.gpu, shape.key] = record
            shapes[result.gpu, shape.key] = shape
    if not shapes:
        raise InputError(
            "no benchmark of attention on a GPU of the catalog among the records",
            "make one with trainfit bench flash --record FILE",
        )
    made: dict[str, list[AttentionShape]] = {}
    for at, shape in sorted(shapes.items(), key=lambda one: one[0]):
        made.setdefault(told[at].created_at, []).append(shape)
    newest = {record.created_at: record for record in told.values()}
    return [_run(newest[when], found) for when, found in sorted(made.items())]


def _run(record: Record, shapes: list[AttentionShape]) -> AttentionRun:
    result = record.bench
    assert result is not None
    assert result.gpu is not None
    return AttentionRun(
        gpu=result.gpu, measured_at=record.created_at, commit=record.commit or "", torch=result.environment.torch,
        experiment=result.experiment, shapes=tuple(shapes),
    )  # fmt: skip


def shapes_of(rows: Sequence[BenchRow]) -> list[AttentionShape]:
    """Shapes of which at least two kernels have a time of forward and backward together."""
    found: dict[Key, dict[tuple[int, int], dict[str, float]]] = {}  # By heads and batch within.
    for row in _timed(rows):
        at = row.point
        key = (str(at["dtype"]), int(at["head"]), bool(at["causal"]), int(at["seq"]))
        batch = (int(at["heads"]), int(at["batch"]))
        assert row.times is not None
        found.setdefault(key, {}).setdefault(batch, {})[KERNELS[str(at["body"])]] = row.times.median
    return list(_largest(found))


def _timed(rows: Sequence[BenchRow]) -> Iterator[BenchRow]:
    for row in rows:
        at = row.point
        if row.times is None or row.status not in ("done", "unsteady") or not set(NEEDED) <= set(at):
            continue
        enough = int(at["heads"]) >= FEWEST_HEADS and len(row.times.samples) >= FEWEST_SAMPLES
        if enough and at["pass"] == "both" and at["body"] in KERNELS:
            yield row


def _largest(found: dict[Key, dict[tuple[int, int], dict[str, float]]]) -> Iterator[AttentionShape]:
    for (dtype, head, causal, seq), batches in found.items():
        several = {batch: seconds for batch, seconds in batches.items() if len(seconds) > 1}
        if several:
            heads, batch = max(several)
            yield parse(
                AttentionShape,
                {"dtype": dtype, "head": head, "causal": causal, "seq": seq, "heads": heads, "batch": batch,
                 "seconds": several[heads, batch]},
            )  # fmt: skip


def text_of(runs: Sequence[AttentionRun]) -> str:
    """The TOML file: the same runs give the same bytes."""
    parts = [
        f"# Written by {MADE_BY}; do not edit. Seconds of forward and backward together.\n"
        "# measured_at is the record's time: it names the record in results/.\n"
    ]
    for run in runs:
        head = {name: getattr(run, name) for name in ("gpu", "measured_at", "commit", "torch", "experiment")}
        lines = ["[[run]]", *(f'{name} = "{text}"' for name, text in head.items()), "shapes = ["]
        lines += [f"  {_shape(shape)}," for shape in run.shapes]
        parts.append("\n".join([*lines, "]"]) + "\n")
    return "\n".join(parts)


def _shape(shape: AttentionShape) -> str:
    seconds = ", ".join(f"{name} = {shape.seconds[name]:.6e}" for name in sorted(shape.seconds))
    return (
        f'{{ dtype = "{shape.dtype}", head = {shape.head}, causal = {str(shape.causal).lower()}, seq = {shape.seq}, '
        f"heads = {shape.heads}, batch = {shape.batch}, seconds = {{ {seconds} }} }}"
    )


if __name__ == "__main__":
    sys.exit(main())
