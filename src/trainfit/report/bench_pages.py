"""A page for each experiment of ``trainfit bench``, made from records.

``python -m trainfit.report.bench_pages RECORDS... [--into docs/results/bench]``

Enters: files of Records. Leaves: NAME.md for each experiment that has a record in full form, its plot in ``plots/``, and README.md, the
list. Several records of one experiment, device and torch make one page together (bench_merge.py). The same records give the same bytes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trainfit.records import load
from trainfit.report.bench_claims import Claim
from trainfit.report.bench_merge import Merged, merged
from trainfit.report.bench_plot import plot_of
from trainfit.report.bench_prose import Story, stories
from trainfit.report.bench_rows import in_order
from trainfit.report.bench_step_tables import Parts
from trainfit.report.bench_table import Grid, cell_text, grids, number_text, reasons, title
from trainfit.report.page_file import Page, on_white, write_page
from trainfit.report.table import markdown_cell, markdown_grid
from trainfit.spec.bench import BenchResult, BenchRow, Cell
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.printable import say
from trainfit.spec.result import Record
from trainfit.spec.units import format_seconds

MADE_BY = "python -m trainfit.report.bench_pages RECORDS --into docs/results/bench"
INDEX = "README"


def main(arguments: list[str] | None = None) -> int:
    """Write the pages; exit code 0, or 65 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m trainfit.report.bench_pages", description="Write a page for each experiment."
    )
    parser.add_argument("files", type=Path, nargs="+", help="records: JSON Lines or SQLite")
    parser.add_argument("--into", type=Path, default=Path("docs/results/bench"), help="folder to write")
    options = parser.parse_args(arguments)
    try:
        made = pages([record for file in options.files for record in load(file)])
    except (InputError, FileNotFoundError) as error:
        say(f"trainfit: {error}", err=True)
        return EXIT_BAD_INPUT
    for name, page in made.items():
        write_page(page, options.into / f"{name}.md")
    return 0


def pages(records: Sequence[Record]) -> dict[str, Page]:
    """Pages by the name of their file.

    Raises:
        InputError: no record is of a benchmark in full form.
    """
    found = merged(records)
    if not found:
        raise InputError(
            "no benchmark in full form among the records",
            "make one with trainfit bench NAME --form full --record FILE",
        )
    told = stories()
    made: dict[str, Page] = {}
    for name in sorted({one.result.experiment for one in found}):
        made[name] = _page(name, told[name], [one for one in found if one.result.experiment == name])
    made[INDEX] = Page(_index({name: told[name] for name in made}), {})
    return made


def _index(told: dict[str, Story]) -> str:
    lines = [f"- [{name}]({name}.md): {story.title}" for name, story in told.items()]
    return "\n\n".join(["# Experiments", f"Made by `{MADE_BY}`; do not edit.", "\n".join(lines)]) + "\n"


def _page(name: str, story: Story, found: list[Merged]) -> Page:
    """What it shows, how it is measured, what was published, and each device's tables."""
    found = [Merged(_ordered(story, one.result), one.records) for one in found]
    plots: dict[str, str] = {}
    parts = [
        f"# {story.title}",
        f"Made from records by `{MADE_BY}`; do not edit. Run it: `trainfit bench {name}`.",
    ]
    for one in found:
        parts += _shown_first(story, one.result, plots)
    parts += ["## How it is measured", story.about, "## What published results got wrong"]
    claims = [line for claim in story.claims for line in _claim(claim, found)]
    parts.append("\n".join(claims) or "We know of no published course result on this that is wrong.")
    for one in found:
        parts += _result(story, one)
    return Page("\n\n".join(parts) + "\n", plots)


def _ordered(story: Story, result: BenchResult) -> BenchResult:
    return result.model_copy(update={"rows": tuple(in_order(result.rows, story.order))})


def _shown_first(story: Story, result: BenchResult, plots: dict[str, str]) -> list[str]:
    """A device's answers in a sentence each, and its plot."""
    parts: list[str] = []
    svg = plot_of(result)
    said = story.said(result.rows)
    if said or svg is not None:
        parts.append(f"## What it shows: {result.environment.device}")
    if said:
        parts.append("\n".join(f"- {sentence}" for sentence in said))
    if svg is not None:
        file = f"{result.experiment}-{result.gpu or 'cpu'}.svg"
        plots[file] = on_white(svg)
        parts.append(f"![{story.title}](plots/{file})")
    return parts


def _claim(claim: Claim, found: list[Merged]) -> list[str]:
    """What was said, what is right, and what each device's rows have to it."""
    said = f"[{claim.said}]({claim.source})" if claim.source else claim.said
    lines = [f"- Said: {said}", f"  - Right: {claim.right}"]
    for one in found:
        if measured := claim.measured(one.result.rows):
            lines.append(f"  - Measured on {one.result.environment.device}: {measured}")
    return lines


def _result(story: Story, one: Merged) -> list[str]:
    """One device's tables."""
    result = one.result
    where = result.environment
    clocks = f", SM clock at least {where.clocks_mhz['sm']} MHz" if "sm" in where.clocks_mhz else ""
    sheet = "" if result.gpu else " No data sheet of this device is known, so no time is called impossible."
    timed = f" {story.timed}" if story.timed and any(row.times for row in result.rows) else ""
    parts = [
        f"## {where.device}",
        f"torch {where.torch}{f', driver {where.driver}' if where.driver else ''}{clocks}, {_sources(one)}; "
        f"{format_seconds(result.elapsed_s)}.{sheet}{timed}",
    ]
    if (first := story.first(result.rows)) is not None:
        parts.append(_markdown(first))
    for part in _tables(story, _without_lines_not_run(story, result.rows)):
        if isinstance(part, str):
            parts.append(part)
            continue
        parts += [part.same] if part.same else []
        parts.append(_markdown(part))
    if not_run := [row for row in result.rows if row.status == "not-run"]:
        parts.append(
            f"{len(not_run)} of {len(result.rows)} points were not run: the time limit came first. A line of nothing else is left out."
        )
    if why := reasons([row for row in result.rows if row.status != "not-run"]):
        parts += ["Rows without a result:", "\n".join(f"- {markdown_cell(line)}" for line in why)]
    return parts


def _without_lines_not_run(story: Story, rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Rows of the lines of which some cell was run."""
    run = {_line(row, story.pivot) for row in rows if row.status != "not-run"}
    return [row for row in rows if _line(row, story.pivot) in run]


def _sources(one: Merged) -> str:
    """The records: how many, their commits and days."""
    commits = dict.fromkeys((record.commit or "unknown")[:12] for record in one.records)
    days = dict.fromkeys(record.created_at[:10] for record in one.records)
    several = f"{len(one.records)} records, " if len(one.records) > 1 else ""
    return f"{several}commit{'s' * (len(commits) > 1)} {', '.join(commits)}, {', '.join(days)}"


def _tables(story: Story, rows: Sequence[BenchRow]) -> Parts:
    if story.tables is not None:
        return story.tables(rows)
    if not story.pivot:
        return [grid for grid in grids(rows)]
    apart = [row for row in rows if story.pivot not in row.point]
    rows = [row for row in rows if story.pivot in row.point]
    tables = [pivoted(group, story.pivot, story.shows) for group in _alike(rows, story.apart)]
    for name in story.besides:
        having = [row for row in rows if name in row.numbers]
        passed = [row for row in having if row.point.get("pass") == story.beside_pass]
        lines = {_line(row, story.pivot) for row in passed or having}
        told = [row for row in rows if _line(row, story.pivot) in lines]
        tables += [pivoted(group, story.pivot, name) for group in _alike(told)]
    return [*tables, *grids(apart)]


def _alike(rows: Sequence[BenchRow], apart: str = "") -> list[list[BenchRow]]:
    """Rows whose points have the same keys, and the same value of ``apart`` where one is named; each group is a table."""
    groups: dict[tuple[Cell, ...], list[BenchRow]] = {}
    for row in rows:
        groups.setdefault((*row.point, row.point[apart] if apart else ""), []).append(row)
    return list(groups.values())


def _line(row: BenchRow, pivot: str) -> tuple[Cell, ...]:
    """What names the line of a pivoted table that a row is of."""
    return tuple(cell for key, cell in row.point.items() if key != pivot)


def _markdown(grid: Grid) -> str:
    cells = [[markdown_cell(cell) for cell in line] for line in grid.lines]
    return markdown_grid([markdown_cell(name) for name in grid.titles], cells, is_number=grid.is_number)


def pivoted(rows: Sequence[BenchRow], pivot: str, shows: str) -> Grid:
    """One line for each point without ``pivot``; a column for each of its values, with the median or a number, or the status.

    What is the same in every row is told once, above.
    """
    columns = list(dict.fromkeys(str(row.point[pivot]) for row in rows))
    every = [key for key in rows[0].point if key != pivot]
    keys = [key for key in every if len({row.point[key] for row in rows}) > 1] or every[-1:]
    same = ", ".join(f"{key} {cell_text('', rows[0].point[key])}" for key in every if key not in keys)
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        at = tuple(cell_text("", row.point[key]) for key in keys)
        lines.setdefault(at, {})[str(row.point[pivot])] = _shown(row, shows)
    named = "" if any(isinstance(row.point[pivot], str) for row in rows) else f"{pivot} "
    shown = "median" if shows == "median_s" else title(shows)
    titles = [*keys, *(f"{named}{column}, {shown}" for column in columns)]
    cells = [(*at, *(found.get(column, "") for column in columns)) for at, found in lines.items()]
    return Grid(tuple(titles), tuple(cells), (False,) * len(keys) + (True,) * len(columns), same)


def _shown(row: BenchRow, name: str) -> str:
    if row.status == "impossible" and name == "median_s" and row.times:
        return f"{cell_text(name, row.times.median)}: impossible"
    if row.status not in ("done", "unsteady"):
        return row.status
    mark = "" if row.status == "done" else " (unsteady)"
    if name == "median_s":
        return cell_text(name, row.times.median if row.times else 0.0) + mark
    return number_text(row, name) + mark if name in row.numbers else ""


if __name__ == "__main__":
    sys.exit(main())
