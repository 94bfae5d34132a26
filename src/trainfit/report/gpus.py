"""A recipe on several kinds or counts of GPUs: verdict, speed, and time and cost of a run."""

from collections.abc import Sequence
from operator import attrgetter

from rich.console import Console

from trainfit.report.console import console, rows
from trainfit.report.html import Line, Part, notebook
from trainfit.report.pictures import bars
from trainfit.report.prediction_text import amount
from trainfit.report.results import prediction_bar
from trainfit.report.table import NOTHING, Column, Table, or_dash
from trainfit.report.words import describe
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import OnGpu
from trainfit.spec.units import GIB, format_count, format_seconds

VERDICTS = {"fits": "good", "does not fit": "bad", "refused": "warning"}
CHEAPEST = "the cheapest that fits"


def show(recipe: Recipe, found: Sequence[OnGpu], tokens: float | None, *, out: Console | None = None) -> None:
    """Print the comparison, the cheapest GPU first; GPUs that it does not fit on come last.

    Args:
        recipe: on any of the GPUs.
        found: for each GPU and count.
        tokens: of the run; None: costs are of a million tokens.
    """
    out = out or console()
    out.print(_subject(recipe, found, tokens), style="bold")
    table = _table(found)
    out.print(table.fitted(out.width).rich(_caption(table)))
    if refused := _refused(table):
        out.print()
        rows(out, refused, "left", "wrap")


def html(recipe: Recipe, found: Sequence[OnGpu], tokens: float | None) -> str:
    """Return the comparison for a notebook: every GPU's memory on one scale, and the table."""
    table = _table(found)
    shown = [
        prediction_bar(_name(one, found), one.estimate) for one in table.rows if one.estimate is not None
    ]
    picture = bars("Memory against each device", shown) if shown else ""
    notes = [Line("note", _caption(table))] if _caption(table) else []
    lines = [*notes, *(Line(name, text) for name, text in _refused(table))]
    num_fitting = sum(map(_fits, found))
    verdict = f"FITS on {num_fitting} of {len(found)}"
    parts = [Part(picture=picture), Part(table=table), Part(lines)]
    return notebook(_subject(recipe, found, tokens), verdict, parts, good=num_fitting > 0)


def _subject(recipe: Recipe, found: Sequence[OnGpu], tokens: float | None) -> str:
    count = found[0].count
    on = f"on {count} GPU{'s' * (count > 1)}" if _is_one_count(found) else "on several counts of GPUs"
    run = "" if tokens is None else f", {format_count(tokens)} tokens"
    return f"{describe(recipe).rpartition(', on ')[0]}, {on}{run}"


def _table(found: Sequence[OnGpu]) -> Table:
    """Return the table in the order of its rows; the cheapest GPU is marked if the recipe fits on it."""
    ordered = sorted(found, key=_order)
    best = ordered[0] if _dollars(ordered[0]) is not None and _fits(ordered[0]) else None
    return Table(_columns(found), ordered, lambda one: one is best)


def _caption(table: Table) -> str:
    captions = [f"* {CHEAPEST}"] if any(map(table.is_marked, table.rows)) else []
    captions += ["(cost) if it fitted"] if any(_cost_text(one).startswith("(") for one in table.rows) else []
    return "; ".join(captions)


def _refused(table: Table) -> list[list[str]]:
    return [[_name(one, table.rows), one.refused] for one in table.rows if one.refused]


def _name(one: OnGpu, found: Sequence[OnGpu]) -> str:
    return one.gpu if _is_one_count(found) else f"{one.count} x {one.gpu}"


def _is_one_count(found: Sequence[OnGpu]) -> bool:
    return len({one.count for one in found}) == 1


def _columns(found: Sequence[OnGpu]) -> list[Column]:
    every = [
        *_of_hardware(found),
        Column("verdict", _verdict, False, kind=lambda one: VERDICTS.get(_verdict(one), "")),
        Column("memory GiB", _memory, False),
        Column("tokens/s predicted", lambda one: _of(one, "tokens_per_s", "{:,.0f}"), rank=1),
        Column("MFU", lambda one: or_dash(one.estimate and one.estimate.mfu, "{:.1%}"), rank=3),
        Column("time", lambda one: or_dash(one.run and one.run.run_s, format_seconds)),
        Column("GPU-hours", lambda one: or_dash(one.run and one.run.gpu_hours, amount)),
        Column("$/h a GPU", lambda one: or_dash(_price(one), "{:.2f}"), rank=2),
        Column("cost $" if any(one.run for one in found) else "$ a million tokens", _cost_text),
    ]
    return list(Table(every, found).filled().columns)


def _of_hardware(found: Sequence[OnGpu]) -> list[Column]:
    """Return the columns of the GPU, and of the count where it differs."""
    counts = [Column("GPUs", lambda one: f"{one.count:,}")] if not _is_one_count(found) else []
    return [Column("GPU", attrgetter("gpu"), False), *counts]


def _fits(one: OnGpu) -> bool:
    return one.estimate is not None and one.estimate.fits


def _order(one: OnGpu) -> tuple[bool, bool, float, float]:
    dollars = _dollars(one)
    speed = one.estimate.tokens_per_s if one.estimate else None
    return not _fits(one), dollars is None, dollars or 0.0, -(speed or 0.0)


def _verdict(one: OnGpu) -> str:
    if one.estimate is None:
        return "refused"
    return "fits" if one.estimate.fits else "does not fit"


def _price(one: OnGpu) -> float | None:
    return one.estimate.cost.price_per_gpu_hour if one.estimate and one.estimate.cost else None


def _dollars(one: OnGpu) -> float | None:
    """Return the run's dollars; without tokens, those of a million."""
    if one.run is not None:
        return one.run.dollars
    return one.estimate.cost.per_million_tokens if one.estimate and one.estimate.cost else None


def _cost_text(one: OnGpu) -> str:
    text = or_dash(_dollars(one), amount if one.run else "{:.4g}")
    return text if text == NOTHING or _fits(one) else f"({text})"


def _memory(one: OnGpu) -> str:
    """Return the peak on the device and the device's memory, which stay together on a narrow terminal."""
    found = one.estimate
    return NOTHING if found is None else f"{found.highest.device / GIB:.1f} of {found.device_bytes / GIB:.1f}"


def _of(one: OnGpu, name: str, pattern: str, unit: float = 1) -> str:
    value = getattr(one.estimate, name, None)
    return or_dash(None if value is None else value / unit, pattern)
