"""``python -m trainfit.report.examples results/examples/h200.jsonl [--into docs/guide/trace.md]``

Enters: a file of rows, one a line: the command of an example, what ``--predict`` said and what a GPU measured. Leaves: a
Markdown table of both on standard output, or in the page's place for it, between the two comments that name this module.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from trainfit.spec.printable import say

BEGIN, END = "<!-- trainfit.report.examples -->", "<!-- /trainfit.report.examples -->"
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or put it into a page.

    Raises:
        ValueError: the page has no place for it.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--into", type=Path, help="Markdown page with a place for the table")
    options = parser.parse_args(arguments)
    rows = [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
    text = table(rows)
    if options.into is None:
        say(text)
        return 0
    before, begin, rest = options.into.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{options.into}: no lines {BEGIN} and {END}")
    options.into.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Exact bytes, signed errors, and a sentence that sums them up."""
    lines = [
        "| command | allocated: measured | predicted | error | reserved: measured | predicted | error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [f"`{row['command']}`"]
        for name in PEAKS:
            cells += [f"{row['measured'][name]:,}", f"{row['predicted'][name]:,}", f"{error(row, name):+.3%}"]
        lines.append(f"| {' | '.join(cells)} |")
    sums = []
    for name, word in zip(PEAKS, ("allocated", "reserved"), strict=True):
        errors = [error(row, name) for row in rows]
        exact = sum(e == 0 for e in errors)
        sums.append(
            f"{word}: {exact} of {len(rows)} to the byte, median error {median(map(abs, errors)):.3%}, worst "
            f"{max(errors, key=abs):+.3%}"
        )
    gpus = ", ".join(sorted({row["measured"]["gpu"] for row in rows}))
    versions = ", ".join(
        sorted({f"torch {row['torch']}, transformers {row['transformers']}" for row in rows})
    )
    return "\n".join([f"Bytes; {gpus}; {versions}. {'; '.join(sums)}.", "", *lines])


def error(row: dict[str, Any], name: str) -> float:
    """(predicted - measured) / measured."""
    measured = row["measured"][name]
    return (row["predicted"][name] - measured) / measured


if __name__ == "__main__":
    sys.exit(main())
