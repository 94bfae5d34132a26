"""A sweep's report as one HTML page that needs nothing else, for light and dark: what came of it, plots, the table.

Enters: Rows. Leaves: the page's text. Whatever came from a file or a trial is escaped.
"""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from trainfit.records import replace_text
from trainfit.report import html, sweep_plots
from trainfit.report.sweep_table import Column, columns, first_line, marked
from trainfit.spec.optional import is_installed
from trainfit.spec.recipe_file import recipe_from
from trainfit.spec.sweep import RUNNING, WAITING, Row
from trainfit.techniques.registry import describe

CSS = (
    html.CSS
    + """
:root { color-scheme: light dark; --paper: #fff; --soft: #fafbfc; --mark: #fdf3ea; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --muted: #9ba7b4; --line: #343d48; --good: #58c492; --bad: #f28b82; --paper: #14181d; --soft: #1b2128; --mark: #2c2620; }
}
body, .wide td:first-child, .wide th:first-child { background: var(--paper); }
th, pre, .wide th:first-child { background: var(--soft); }
tr.best td, .wide tr.best td:first-child { background: var(--mark); }
"""
)

NO_PLOTS = (
    "No plots: matplotlib is not installed; pip install 'trainfit[plots]', then run the same command again"
)
PLOTS = (
    (
        "Memory",
        "Peak allocated memory of a step, as predicted without a GPU and as measured.",
        sweep_plots.memory_bars,
    ),
    ("Speed", "More is better.", sweep_plots.speed_bars),
    ("Perplexity", "Of documents kept from training.", sweep_plots.perplexity_bars),
    (
        "Memory against speed",
        "Both measured. What lies to the right of and below the line is beaten by something on it.",
        sweep_plots.front_scatter,
    ),
    (
        "Memory against speed, predicted",
        "Predicted, among the variants that fit. What lies to the right of and below the line is beaten by something on it.",
        sweep_plots.predicted_scatter,
    ),
)


def page(name: str, rows: Sequence[Row], *, notes: Sequence[str] = ()) -> str:
    """The whole page."""
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    title = f"Sweep {name}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">trainfit sweep, {made}. {escape(_where(rows))}</p>',
        _tiles(rows),
        *(html.figure(heading, caption, draw(rows)) for heading, caption, draw in PLOTS if has_plots()),
        "<h2>All variants</h2>",
        _note(rows, notes),
        _table(rows),
        _endings(rows),
        "<h2>Each recipe</h2>",
        *(_details(row) for row in rows),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    start = f'<!doctype html>\n<html lang="en"><head>{head}<style>{CSS}</style></head>\n<body>\n'
    return start + "\n".join(body) + "\n</body></html>\n"


def write_page(name: str, rows: Sequence[Row], path: str | Path, *, notes: Sequence[str] = ()) -> None:
    """Write the page to ``path``, replacing what is there."""
    replace_text(path, page(name, rows, notes=notes))


def has_plots() -> bool:
    """Whether pages are drawn: hours of a sweep do not end without their page for want of matplotlib."""
    return is_installed("matplotlib")


def _where(rows: Sequence[Row]) -> str:
    devices = dict.fromkeys(
        [row.measurement.environment.device for row in rows if row.measurement]
        + [row.train["run"]["device"] for row in rows if row.train]
    )
    return f"Measured on {', '.join(devices)}." if devices else "Nothing was measured."


def _tiles(rows: Sequence[Row]) -> str:
    counts = Counter(row.status for row in rows)
    tiles = [(f"{counts.get('done', 0)} / {len(rows)}", "variants done", "")]
    errors = [abs(row.error) for row in rows if row.error is not None]
    if errors:
        tiles.append((f"{max(errors):.2%}", "largest error of a predicted peak", ""))
    for status, count in counts.items():
        if status != "done":
            kind = "" if status in (WAITING, RUNNING) else "bad"
            tiles.append((str(count), status.replace("-", " "), kind))
    return html.tile_row(tiles)


def _note(rows: Sequence[Row], notes: Sequence[str]) -> str:
    said = [*notes] if has_plots() else [*notes, NO_PLOTS]
    if len(rows) > sweep_plots.MAX_ROWS:
        said.append(f"bars show the first {sweep_plots.MAX_ROWS} variants")
    more = "".join(f" {one[:1].upper()}{one[1:]}." for one in said)
    shaded = f"Shaded: {marked(rows).meaning}. " if marked(rows).variants else ""
    what = "Device: the predicted peak as nvidia-smi would show it; verdict and headroom are of it."
    return f"<p>{escape(shaded)}{what} An error is predicted minus measured, over measured.{escape(more)}</p>"


def _table(rows: Sequence[Row]) -> str:
    shown = columns(rows)
    what = Column("what it does", _technique, is_number=False)
    size = [Column("batch", _batch, is_number=False)] if len({_batch(row) for row in rows}) > 1 else []
    shown = [shown[0], what, *size, *shown[1:]]
    head = "".join(f'<th class="{_kind(one)}" scope="col">{escape(one.title)}</th>' for one in shown)
    best = marked(rows).variants
    lines = []
    for row in rows:
        cells = [f'<td class="{_kind(one)}">{escape(one.cell(row))}</td>' for one in shown]
        mark = ' class="best"' if row.variant in best else ""
        lines.append(f"<tr{mark}>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _endings(rows: Sequence[Row]) -> str:
    """Why a variant did not come to its end, in the trial's own words."""
    told = [row for row in rows if row.message and row.status not in (WAITING, RUNNING)]
    items = (
        f"<li><b>{escape(row.variant)}</b>, {escape(row.status)}: {escape(first_line(row.message))}</li>" for row in told
    )  # fmt: skip
    return f"<ul>{''.join(items)}</ul>" if told else ""


def _kind(column: Column) -> str:
    return "n" if column.is_number else ""


def _technique(row: Row) -> str:
    return describe(recipe_from(row.recipe))


def _batch(row: Row) -> str:
    batch = row.recipe["batch"]
    return f"{batch['micro']} x {batch['seq']}" + (
        f" x {batch['accumulate']}" if batch["accumulate"] > 1 else ""
    )


def _details(row: Row) -> str:
    head = f"{escape(row.variant)} <small>{escape(row.status)}, recipe {escape(row.recipe_id)}</small>"
    message = f"<p>{escape(row.message)}</p>" if row.message else ""
    parts = [
        f"<tr><td>{escape(part)}</td><td>{escape(outcome.status)}</td><td class=\"n\">{outcome.seconds:.1f} s</td></tr>"
        for part, outcome in row.outcomes.items()
    ]  # fmt: skip
    table = f"<table><tbody>{''.join(parts)}</tbody></table>"
    recipe = escape(json.dumps(row.recipe, indent=1))
    return f"<details><summary>{head}</summary>{message}<div>{table}<pre>{recipe}</pre></div></details>"
