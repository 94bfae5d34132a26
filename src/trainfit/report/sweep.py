"""A sweep's rows as a table, as lines of progress and as plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainfit.report.plot import MEASURED, MUTED, PREDICTED, Kind, Panel, Series, draw, short
from trainfit.report.table import Column, Table, or_dash, percent
from trainfit.spec.result import Outcome
from trainfit.spec.sweep import RUNNING, WAITING, Frontier, Row, front, frontier
from trainfit.spec.units import GIB, MIB, format_count

if TYPE_CHECKING:
    import rich.table

KINDS = {
    "done": "good", WAITING: "waiting", RUNNING: "running", "refused": "warning", "out-of-memory": "warning",
}  # fmt: skip
"""Kinds of cells by status; those of other statuses are bad."""
VERDICTS = {"fits": "good", "tight": "warning", "does not fit": "bad"}
LONGEST_MESSAGE = 160  # Characters of a message in a line of progress
SHORT = {"out-of-memory": "OOM"}
MAX_ROWS = 60  # Bars of more variants are not drawn; the page says so
CUT = 1.5  # Bars end at this multiple of the longest measured one, as far longer ones flatten the others
SPREAD = 6.0  # An axis is logarithmic where the largest value is more than this multiple of the smallest

Values = Sequence[float | None]


def unit(rows: Sequence[Row]) -> tuple[str, int]:
    """Return GiB, or MiB where the largest measured (else predicted) peak is below one GiB; and its bytes."""
    measured = [size for row in rows if (size := row.measured_bytes) is not None]
    sizes = measured or [size for row in rows if (size := row.predicted_bytes) is not None]
    return ("GiB", GIB) if not sizes or max(sizes) >= GIB else ("MiB", MIB)


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns in which some row has a value; the name and the status are always there."""
    name, size = unit(rows)
    predicted_only = not any(row.samples_per_s for row in rows)

    def memory(field: str, digits: int = 2) -> Callable[[Row], str]:
        return lambda row: or_dash(_over(getattr(row, field), size), f"{{:,.{digits}f}}")

    def number(field: str, form: Callable[[float], str] | str = "{:.4g}") -> Callable[[Row], str]:
        return lambda row: or_dash(getattr(row, field), form)

    every = [
        Column(
            "verdict", number("verdict", str), False, kind=lambda row: VERDICTS.get(row.verdict or "", "")
        ),
        Column(f"device {name}", memory("predicted_device_bytes"), rank=3 if predicted_only else 0),
        Column(f"headroom {name}", memory("headroom_bytes"), rank=2),
        Column(f"predicted {name}", memory("predicted_bytes", 3), rank=4),
        Column(f"measured {name}", memory("measured_bytes", 3)),
        Column("error", number("error", percent), rank=1),
        Column("samples/s predicted", number("predicted_samples_per_s"), rank=8),
        Column(
            "tokens/s predicted", number("predicted_tokens_per_s", _count), rank=1 if predicted_only else 7
        ),
        Column("samples/s", number("samples_per_s")),
        Column("samples/s overall", lambda row: or_dash(overall_samples_per_s(row)), rank=5),
        Column("tokens/s", number("tokens_per_s", _count), rank=6),
        Column("MFU", number("mfu", "{:.1%}"), rank=1),
        Column("HFU", number("hfu", "{:.1%}"), rank=9),
        Column("perplexity", number("perplexity"), rank=1),
    ]
    filled = Table(every, rows).filled().columns
    variant = Column("variant", lambda row: row.variant, False)
    status = Column("status", lambda row: row.status, False, kind=lambda row: KINDS.get(row.status, "bad"))
    return [variant, *filled, status]


def table(rows: Sequence[Row]) -> Table:
    """Return the table of all filled columns, with the variants of the frontier marked."""
    best = marked(rows).variants
    return Table(columns(rows), rows, lambda row: row.variant in best)


def text_table(
    rows: Sequence[Row], width: int, *, seconds: dict[str, float] | None = None
) -> rich.table.Table:
    """Return a table that fits ``width`` columns. ``seconds``: for how long each variant has been running."""

    def status(row: Row) -> str:
        if row.status == RUNNING:
            return f"{row.message} {(seconds or {}).get(row.variant, 0.0):.0f} s"
        return f"to {row.message}" if row.status == WAITING else SHORT.get(row.status, row.status)

    shown = table(rows).fitted(width)
    *others, last = shown.columns
    best = marked(rows)
    caption = f"* {best.meaning}" if best.variants else ""
    return replace(shown, columns=[*others, replace(last, cell=status)]).rich(caption)


def markdown_table(rows: Sequence[Row]) -> str:
    """Return every filled column as a Markdown table; the variants that are ``marked`` are bold."""
    return table(rows).markdown() + "\n"


def marked(rows: Sequence[Row]) -> Frontier:
    """Return the frontier, if it chooses between variants: one of a single variant marks nothing."""
    best = frontier(rows)
    chooses = len(rows) > 1 if best.is_predicted else len(best.variants) > 1
    return best if chooses else best._replace(variants=())


def overall_samples_per_s(row: Row) -> float | None:
    """Return the speed of the whole training run, its first steps included."""
    return row.train["speed"]["samples_per_s"] if row.perplexity is not None and row.train else None


def line(row: Row, part: str, outcome: Outcome) -> str:
    """Return the result of one part (predict, measure or train) in one plain line."""
    if outcome.status != "done":
        message = first_line(outcome.message)
        if len(message) > LONGEST_MESSAGE:
            message = message[: LONGEST_MESSAGE - 1] + "…"
        return f"{part} {row.variant}: {outcome.status}: {message}".rstrip(": ")
    name, size = unit([row])
    peak, speed = f"peak {{:.3f}} {name}", "{:.4g} samples/s"
    shown: list[tuple[float | None, str]] = {
        "predict": [(_over(row.predicted_bytes, size), peak)],
        "measure": [
            (_over(row.measured_bytes, size), peak),
            (None, "") if row.error is None else (1, f"error {percent(row.error)}"),
            (row.samples_per_s, speed),
        ],
        "train": [(row.perplexity, "perplexity {:.4g}"), (overall_samples_per_s(row), speed)],
    }[part]
    words = ", ".join(pattern.format(value) for value, pattern in shown if value)
    return f"{part} {row.variant}: {words}  ({outcome.seconds:.1f} s)"


def first_line(message: str) -> str:
    """Return the first line of a message; of several lines, with the last one, which names the exception."""
    first, *rest = [part.strip() for part in message.splitlines() if part.strip()] or [""]
    return f"{first.rpartition(': ')[0] or first}: {rest[-1]}" if rest else first


def _count(value: float) -> str:
    return format_count(value) if value >= 1e6 else f"{value:,.0f}"


def _over(value: float | None, size: float) -> float | None:
    return None if value is None else value / size


def memory_bars(rows: Sequence[Row]) -> str | None:
    """Draw peak allocated memory, predicted above measured."""
    name, size = unit(rows)
    fields = {"predicted": "predicted_bytes", "measured": "measured_bytes"}
    sides = {side: [_over(getattr(row, field), size) for row in rows] for side, field in fields.items()}
    return _bars(rows, sides, f"peak allocated, {name}", "memory", "{:,.2f}" if name == "GiB" else "{:,.1f}")


def speed_bars(rows: Sequence[Row]) -> str | None:
    """Draw samples a second; tokens a second where the sequences of the variants differ in length."""
    by = _speed_unit(rows)
    fields = {"predicted": "predicted_samples_per_s", "measured": "samples_per_s"}
    sides = {
        side: [_over(getattr(row, field), 1 / _per_sample(row, by)) for row in rows]
        for side, field in fields.items()
    }
    return _bars(rows, sides, f"{by} a second", "speed", "{:,.4g}" if by == "samples" else "{:,.0f}")


def perplexity_bars(rows: Sequence[Row]) -> str | None:
    """Draw perplexity on documents that training did not see."""
    sides = {"measured": [row.perplexity for row in rows]}
    return _bars(rows, sides, "perplexity after training (lower is better)", "perplexity", "{:.3f}")


def _bars(rows: Sequence[Row], sides: Mapping[str, Values], axis: str, name: str, digits: str) -> str | None:
    """Draw horizontal bars, a group for each row; a row without a value names its status."""
    known = {side: values for side, values in sides.items() if any(value is not None for value in values)}
    shown = {side: values[:MAX_ROWS] for side, values in known.items()}
    if not shown:
        return None
    pairs = [pair for pair in zip(*shown.values(), strict=True) if None not in pair]
    most = CUT * max(map(max, pairs)) if len(shown) > 1 and pairs else float("inf")
    series = [
        Series(
            side, [None if value is None else min(value, most) for value in values], kind="bar",
            text=[_bar_text(row, side, y, most, digits) for row, y in zip(rows, values, strict=False)],
            color=PREDICTED if side == "predicted" else MEASURED,
        )
        for side, values in shown.items()
    ]  # fmt: skip
    names = [short(row.variant, 34) for row in rows[:MAX_ROWS]]
    panel = Panel(series, y_label=axis, names=names, is_horizontal=True, y_limits=(0, None))
    return draw([panel], name, title=axis, is_themed=True)


def _bar_text(row: Row, side: str, value: float | None, most: float, digits: str) -> str:
    """Return the value, or why there is none."""
    if value is not None:
        return digits.format(value) + (" (cut)" if value > most else "")
    if side == "predicted":
        outcome = row.outcomes.get("predict")
        return "" if outcome is None or outcome.status == "done" else f"not predicted: {outcome.status}"
    return "" if row.status in ("done", WAITING, RUNNING) else row.status


def front_scatter(rows: Sequence[Row]) -> str | None:
    """Draw measured memory against speed, with the front of the variants."""
    points = {row.variant: point for row in rows if (point := row.place()) is not None}
    return _scatter(rows, points, front(rows), "peak allocated, measured", "measured")


def predicted_scatter(rows: Sequence[Row]) -> str | None:
    """Draw predicted bytes on the device against speed, of the variants that fit, where none is measured."""
    best = frontier(rows)
    points = {
        row.variant: (size, speed)
        for row in (rows if best.is_predicted else ())
        if row.verdict == "fits"
        and (size := row.predicted_device_bytes)
        and (speed := row.predicted_tokens_per_s)
    }
    cards = {row.device_bytes: row.recipe["hardware"]["gpu"] for row in rows if row.variant in points}
    return _scatter(rows, points, best.variants, "peak on the device, predicted", "predicted", cards)


def _scatter(
    rows: Sequence[Row],
    points: dict[str, tuple[int, float]],
    best: Sequence[str],
    x_label: str,
    side: str,
    cards: Mapping[int, str] | None = None,
) -> str | None:
    """Draw points of (bytes, tokens a second), those of ``best`` joined, and a line at each card's bytes."""
    if not points:
        return None
    shown = [row for row in rows if row.variant in points]
    (name, size), by = unit(shown), _speed_unit(shown)
    per_token = {row.variant: _per_sample(row, by) / row.recipe["batch"]["seq"] for row in shown}
    at = {variant: (x / size, y * per_token[variant]) for variant, (x, y) in points.items()}
    color = PREDICTED if side == "predicted" else MEASURED
    others = [variant for variant in at if variant not in best]
    groups: list[tuple[str, Kind, str, Sequence[str]]] = [
        ("front: nothing else is both smaller and faster", "step", color, best),
        ("dominated", "scatter", MUTED, others),
    ]
    series = [
        Series(
            label, [at[one][1] for one in group], [at[one][0] for one in group], kind, text=group, color=ink
        )
        for label, kind, ink, group in groups
        if group
    ]
    lines = {num_bytes / size: card for num_bytes, card in (cards or {}).items()}
    sizes, speeds = zip(*at.values(), strict=True)
    wide = [max(values) > SPREAD * min(values) for values in ((*sizes, *lines), speeds)]
    panel = Panel(
        series, events=lines, x_label=f"{x_label}, {name} (less is better)", x_log=wide[0], y_log=wide[1],
        y_label=f"{by} a second, {side} (more is better)",
    )  # fmt: skip
    return draw([panel], "front", title=f"Memory against speed, {side}", is_themed=True)


def _speed_unit(rows: Sequence[Row]) -> str:
    return "samples" if len({row.recipe["batch"]["seq"] for row in rows}) <= 1 else "tokens"


def _per_sample(row: Row, by: str) -> int:
    return 1 if by == "samples" else row.recipe["batch"]["seq"]
