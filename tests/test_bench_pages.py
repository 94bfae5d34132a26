"""The pages of ``docs/bench`` are those that the records in ``results/`` make."""

from pathlib import Path

from trainfit.records import load
from trainfit.report.bench_pages import pages


def test_the_pages_in_the_docs_are_made_from_the_records_in_results() -> None:
    root = Path(__file__).parent.parent
    made = pages(load(root / "results/bench.jsonl"))
    there = {file.stem: file.read_text() for file in (root / "docs/bench").glob("*.md")}
    assert {name: page.text for name, page in made.items()} == there, (
        "run the command that a page's top names"
    )
    # The plots' bytes depend on matplotlib's version, so only that they are there.
    plots = {file.name for file in (root / "docs/bench/plots").iterdir()}
    assert {name for page in made.values() for name in page.plots} == plots
