"""HTML pages of a report and of a sweep: templates filled by Jinja2, which escapes every text.

A page needs nothing else: its style and plots are in it, for light and dark.
"""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from trainfit.report import comparisons, sweep
from trainfit.report.compare import GOAL, PHASE_NAMES, Comparison, Summary, loop_values, summarise
from trainfit.report.plot import can_draw
from trainfit.report.table import Column, Table, or_dash, percent
from trainfit.report.words import batch_text
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import printable
from trainfit.spec.sweep import RUNNING, WAITING, Row
from trainfit.spec.units import format_bytes, format_seconds
from trainfit.techniques.registry import describe

if TYPE_CHECKING:
    from jinja2 import Environment

NO_PLOTS = (
    "No plots: matplotlib is not installed; pip install 'trainfit[plots]', then run the same command again"
)
GOOD, BAD = "#1c8a5c", "#d04a3a"
"""Of verdicts in notebooks: as readable on white as on nearly black."""
BEATEN = "A recipe to the right of and below the line is slower and larger than one on it."
FIGURES = {
    "Predicted against measured":
        ("Peak allocated memory of one training step; the band is the goal.", comparisons.scatter),
    "Error by recipe": ("Predicted minus measured peak, over measured.", comparisons.error_bars),
    "Memory at the peak": ("By category.", comparisons.breakdown_bars),
    "Time": ("Of one optimizer step.", comparisons.time_bars),
}  # fmt: skip
SWEEP_FIGURES = {
    "Memory": ("The peak of a step. The dashed line is the GPU's memory.", sweep.memory_bars),
    "Speed": ("Tokens a second of all GPUs; more is better.", sweep.speed_bars),
    "Perplexity": ("Of held-out documents.", sweep.perplexity_bars),
    "Memory against speed": (f"Both measured. {BEATEN}", sweep.front_scatter),
    "Memory against speed, predicted": (
        f"Recipes far over the GPU's memory are left out. {BEATEN}",
        sweep.predicted_scatter,
    ),
}
"""Captions and functions of the plots, by heading."""


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("trainfit.report"), autoescape=True, undefined=StrictUndefined, finalize=_shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["json"] = lambda value: json.dumps(value, indent=1)
    return found


def _shown(value: Any) -> Any:
    """Show control characters escaped; what is marked as HTML stays as it is."""
    return value if hasattr(value, "__html__") or not isinstance(value, str) else printable(value, lines=True)


def render(template: str, **values: Any) -> str:
    """Fill ``templates/TEMPLATE.j2``."""
    return _templates().get_template(f"{template}.j2").render(**values)


class Line(NamedTuple):
    """A line of a result's table in a notebook."""

    name: str
    value: str | None = None  # None: a heading
    note: str = ""


class Part(NamedTuple):
    """A part of a result in a notebook: a picture, a table, lines of names and values."""

    lines: Sequence[Line] = ()
    picture: str = ""
    """An ``img`` element."""
    table: Table | None = None


def notebook(title: str, verdict: str, parts: Sequence[Part], *, good: bool) -> str:
    """Return a result for a notebook: the verdict in green or red, what it is of, tables and pictures."""
    from markupsafe import Markup

    shown = [part._replace(picture=Markup(part.picture)) for part in parts if any(part)]
    color = GOOD if good else BAD
    return render("notebook.html", title=title, verdict=verdict, parts=shown, color=color)


def _page(command: str, figures: dict[str, Any], rows: Sequence[Any], *, lead: str, **values: Any) -> str:
    """Fill the template of a command's page."""
    from markupsafe import Markup

    plots = [(heading, caption, Markup(draw(rows) or "")) for heading, (caption, draw) in figures.items()
             if can_draw()]  # fmt: skip
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return render(f"{command}.html", lead=f"trainfit {command}, {now}. {lead}", figures=plots, **values)


def report_page(found: Sequence[Comparison], *, title: str = "Predicted against measured") -> str:
    """Return the page of predictions against measurements: summary, plots, table, each recipe's phases."""
    summary = summarise(found)
    elsewhere = sum(one.measured is not None and not one.on_its_device for one in found)
    notes = f" {elsewhere} were measured on another device than the recipe names." if elsewhere else ""
    if len(found) > comparisons.MAX_ROWS:
        notes += f" Plots show the first {comparisons.MAX_ROWS} recipes."
    return _page(
        "report", FIGURES, found, title=title, lead=summary.text(), notes=notes, phases=_phases,
        tiles=_tiles(summary, found), table=comparisons.table(found),
    )  # fmt: skip


def _tiles(summary: Summary, found: Sequence[Comparison]) -> list[tuple[str, str, str]]:
    """Return large figures: value, meaning, CSS class."""
    tiles = [(f"{len(found)}", f"recipes, {len({one.model for one in found})} models", "")]
    if summary.worst is not None:
        compared = f"{summary.num_within_goal} / {summary.num_compared}"
        good = "good" if summary.num_within_goal == summary.num_compared else ""
        worst = percent(summary.worst.error("peak_allocated_bytes"))
        tiles += [
            (compared, f"within {GOAL:.0%} of the measured peak", good),
            (f"{summary.median_error or 0:.2%}", "median error of the peak", ""),
            (worst, f"largest error: {summary.worst.model}", ""),
        ]
    if summary.num_out_of_memory:
        tiles.append((f"{summary.num_foreseen} / {summary.num_out_of_memory}", "out of memory foreseen", ""))
    if summary.num_other_versions:
        tiles.append((f"{summary.num_other_versions}", "predicted for other versions", "warning"))
    return tiles


def _phases(one: Comparison) -> Table:
    """Return the peaks by phase, both sides; of a policy's loop also peaks and times of its phases."""
    of_loop = [loop_values(loop) for loop in one.loops]
    names = [name for name in of_loop[1] or of_loop[0] if not name.endswith("reserved_bytes")]
    errors = one.loop_errors()

    def value(side: int, name: str) -> str:
        if name not in names:
            return or_dash(one.value(("predicted", "measured")[side], f"phases.{name}"), format_bytes)
        form = format_bytes if name.endswith("_bytes") else format_seconds
        return or_dash(of_loop[side].get(name), form)

    columns = [
        Column("phase", lambda name: name.replace(".peak_allocated_bytes", ""), False),
        Column("predicted", lambda name: value(0, name)),
        Column("measured", lambda name: value(1, name)),
        Column("error", lambda name: percent(errors.get(name, one.error(f"phases.{name}")))),
    ]
    return Table(columns, [*PHASE_NAMES, *names])


def sweep_page(name: str, rows: Sequence[Row], *, notes: Sequence[str] = ()) -> str:
    """Return the page of a sweep: outcome, plots, the table, each variant's recipe."""
    devices = dict.fromkeys(
        [row.measurement.environment.device for row in rows if row.measurement]
        + [row.train["run"]["device"] for row in rows if row.train]
    )
    where = f"Measured on {', '.join(devices)}." if devices else "Nothing was measured."
    shown = sweep.table(rows)
    recipes = {row.variant: recipe_from(row.recipe) for row in rows}
    what = [Column("technique", lambda row: describe(recipes[row.variant]), False)]
    if len({batch_text(recipe) for recipe in recipes.values()}) > 1:
        what.append(Column("batch", lambda row: batch_text(recipes[row.variant]), False))
    failed = [row for row in rows if row.message and row.status not in (WAITING, RUNNING)]
    return _page(
        "sweep", SWEEP_FIGURES, rows, title=f"Sweep {name}", lead=where, tiles=_sweep_tiles(rows),
        notes=_sweep_notes(rows, notes), endings=[(row, sweep.first_line(row.message)) for row in failed],
        table=Table([shown.columns[0], *what, *shown.columns[1:]], rows, shown.is_marked),
    )  # fmt: skip


def _sweep_tiles(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    counts = Counter(row.status for row in rows)
    tiles = [(f"{counts.pop('done', 0)} / {len(rows)}", "variants done", "")]
    if errors := [abs(row.error) for row in rows if row.error is not None]:
        tiles.append((f"{max(errors):.2%}", "largest error of a predicted peak", ""))
    for status, count in counts.items():
        tiles.append((str(count), status.replace("-", " "), "" if status in (WAITING, RUNNING) else "bad"))
    return tiles


def _sweep_notes(rows: Sequence[Row], notes: Sequence[str]) -> str:
    best = sweep.marked(rows)
    found = [
        f"Shaded: {best.meaning}" if best.variants else "",
        "Device: the predicted peak as nvidia-smi would show it; verdict and headroom are of it",
        "An error is predicted minus measured, over measured",
        *notes,
        "" if can_draw() else NO_PLOTS,
        f"Bars show the first {sweep.MAX_ROWS} variants" if len(rows) > sweep.MAX_ROWS else "",
    ]
    return " ".join(f"{one[:1].upper()}{one[1:]}." for one in found if one)
