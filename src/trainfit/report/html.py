"""The report as one HTML page that needs nothing else: summary, plots, the whole table, every recipe's phases.

Enters: Comparisons. Leaves: the page's text. Whatever came from a recipe or a record is escaped.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from trainfit.records import replace_text
from trainfit.report import plots
from trainfit.report.compare import GOAL, Comparison, Summary, summarise
from trainfit.report.table import filled_columns, percent, size_text
from trainfit.spec.result import PHASES

CSS = """
:root { color-scheme: light; --ink: #1f2933; --muted: #66727f; --line: #e4e7eb; --good: #1e7d57; --bad: #c0392b; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 2.5rem 1.5rem 4rem; color: var(--ink); background: #fff;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.6rem 0 .6rem; }
.lead { color: var(--muted); margin: 0 0 1.6rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1.1rem; min-width: 11rem; }
.tile b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; } .tile span { color: var(--muted); font-size: .85rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
figure { margin: 0; overflow-x: auto; } figure svg { max-width: 100%; height: auto; }
figcaption { color: var(--muted); font-size: .88rem; margin-bottom: .5rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; font-size: .83rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide table { width: 100%; } th, td { padding: .35rem .55rem; text-align: left; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--muted); background: #fafbfc; white-space: normal; vertical-align: bottom; line-height: 1.25; } tr:last-child td { border-bottom: 0; }
.n { text-align: right; } details { border-bottom: 1px solid var(--line); padding: .45rem 0; }
summary { cursor: pointer; } summary small { color: var(--muted); } details > div { display: flex; flex-wrap: wrap; gap: 2rem; padding: .6rem 0 .8rem; align-items: flex-start; }
pre { font-size: .75rem; background: #fafbfc; border: 1px solid var(--line); border-radius: 6px; padding: .7rem; margin: 0; max-width: 100%; max-height: 19rem; overflow: auto; }
.wide td:first-child, .wide th:first-child { position: sticky; left: 0; background: #fff; }
@media print { details > * { display: block; } }
"""

PLOTS = (
    (
        "Predicted against measured",
        "Peak allocated memory of one training step; the band is the goal.",
        plots.scatter,
    ),
    ("Error by recipe", "Predicted minus measured peak, over measured.", plots.error_bars),
    ("What holds memory at the peak", "By category, in GiB.", plots.breakdown_bars),
    ("Time", "Seconds of one optimizer step.", plots.time_bars),
)


def page(comparisons: Sequence[Comparison], *, title: str = "Predicted against measured") -> str:
    """The whole page."""
    summary = summarise(comparisons)
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">trainfit report, {made}. {escape(summary.text())}</p>',
        _tiles(summary, comparisons),
        *(figure(heading, caption, draw(comparisons)) for heading, caption, draw in PLOTS),
        "<h2>All recipes</h2>",
        _note_on_devices(comparisons),
        _table(comparisons),
        "<h2>Each recipe</h2>",
        *(_details(one) for one in comparisons),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{CSS}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def write_page(
    comparisons: Sequence[Comparison], path: str | Path, *, title: str = "Predicted against measured"
) -> None:
    """Write the page to ``path``, replacing what is there."""
    replace_text(path, page(comparisons, title=title))


def _tiles(summary: Summary, comparisons: Sequence[Comparison]) -> str:
    models = {one.model for one in comparisons}
    tiles = [(f"{len(comparisons)}", f"recipes, {len(models)} models", "")]
    if summary.worst is not None:
        good = "good" if summary.num_within_goal == summary.num_compared else ""
        tiles.append(
            (
                f"{summary.num_within_goal} / {summary.num_compared}",
                f"within {GOAL:.0%} of the measured peak",
                good,
            )
        )
        tiles.append((f"{summary.median_error or 0:.2%}", "median error of the peak", ""))
        tiles.append(
            (
                percent(summary.worst.error("peak_allocated_bytes")),
                f"largest error: {summary.worst.model}",
                "",
            )
        )
    if summary.num_out_of_memory:
        tiles.append((f"{summary.num_foreseen} / {summary.num_out_of_memory}", "out of memory foreseen", ""))
    return tile_row(tiles)


def tile_row(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Large figures side by side: (value, what it is, CSS class such as ``bad``)."""
    cells = (
        f'<div class="tile"><b class="{kind}">{escape(value)}</b><span>{escape(words)}</span></div>'
        for value, words, kind in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def figure(heading: str, caption: str, svg: str | None) -> str:
    """A plot under its heading; nothing where there is no plot."""
    if svg is None:
        return ""
    return f"<h2>{escape(heading)}</h2><figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _note_on_devices(comparisons: Sequence[Comparison]) -> str:
    elsewhere = sum(one.measured is not None and not one.on_its_device for one in comparisons)
    more = f" {elsewhere} were measured on another device than the recipe names." if elsewhere else ""
    many = f" Plots show the first {plots.MAX_ROWS} recipes." if len(comparisons) > plots.MAX_ROWS else ""
    return f"<p>Sizes are peaks (GiB is 2<sup>30</sup> bytes); an error is predicted minus measured, over measured.{more}{many}</p>"


def _table(comparisons: Sequence[Comparison]) -> str:
    columns = filled_columns(comparisons)
    head = "".join(f'<th class="{_kind(column.is_number)}">{escape(column.title)}</th>' for column in columns)
    lines = []
    for one in comparisons:
        cells = []
        for column in columns:
            mark = _verdict(one) if column.title == "allocated error" else ""
            cells.append(f'<td class="{_kind(column.is_number)} {mark}">{escape(column.cell(one))}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _kind(is_number: bool) -> str:
    return "n" if is_number else ""


def _verdict(one: Comparison) -> str:
    error = one.error("peak_allocated_bytes")
    return "" if error is None else "good" if abs(error) <= GOAL else "bad"


def _details(one: Comparison) -> str:
    head = f"{escape(one.model)} <small>{escape(one.technique)}, {escape(one.batch)}, {escape(one.device)}</small>"
    notes = (
        [f"<p>{escape(one.status)}: {escape(one.measured.message)}</p>"]
        if one.measured and one.measured.message
        else []
    )
    recipe = escape(json.dumps(one.recipe.content(), indent=1))
    return f"<details><summary>{head}</summary>{''.join(notes)}<div>{_phases(one)}<pre>{recipe}</pre></div></details>"


def _phases(one: Comparison) -> str:
    """Peaks by phase, both sides."""
    names = ["after_init", *(f"{step}.{phase}" for step in ("first", "steady") for phase in PHASES)]
    lines = []
    for name in names:
        sizes = [
            _phase_bytes(side.phases, name) if side and side.phases else None
            for side in (one.predicted, one.measured)
        ]
        error = percent(one.error(f"phases.{name}"))
        lines.append(
            f'<tr><td>{name}</td><td class="n">{size_text(sizes[0])}</td><td class="n">{size_text(sizes[1])}</td><td class="n">{error}</td></tr>'
        )
    head = '<tr><th>phase</th><th class="n">predicted</th><th class="n">measured</th><th class="n">error</th></tr>'
    return f"<table><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table>"


def _phase_bytes(phases: object, name: str) -> int:
    value: object = phases
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, int)
    return value
