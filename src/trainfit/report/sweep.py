"""A sweep's rows as a table, as lines of progress and as plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainfit.report.plot import MEASURED, MUTED, PREDICTED, WRONG, Kind, Panel, Series, draw, short
from trainfit.report.table import Column, Table, or_dash, percent
from trainfit.spec.result import Outcome
from trainfit.spec.sweep import RUNNING, WAITING, Frontier, Row, front, frontier
from trainfit.spec.units import format_bytes, format_count, size_unit

if TYPE_CHECKING:
    import rich.table

KINDS = {
    "done": "good", WAITING: "waiting", RUNNING: "running", "refused": "warning", "out-of-memory": "warning",
}  # fmt: skip
"""Style of a cell by status; other statuses are styled as bad."""
VERDICTS = {"fits": "good", "tight": "warning", "does not fit": "bad"}
LONGEST_MESSAGE = 160  # Characters of a message in a line of progress
SHORT = {"out-of-memory": "OOM"}
MAX_ROWS = 60  # Bars of more variants are not drawn; the page says so
CUT = 1.5  # Bars end at this multiple of the longest measured one, and of the GPU's memory
ZOOM = 1.3  # Points over this multiple of the GPU's memory are left out
IN_SIGHT = 3.0  # A GPU's memory is drawn up to this multiple of the largest peak
LONGEST_NAME = 58
BASIC = ("none", "false", "null", "standard")
"""Values of a choice that mean it is off."""
DOES_NOT_FIT, TIGHT = "does not fit", "tight: a later step may run out of memory"
AMBER = "#b8860b"
SPREAD = 6.0  # An axis is logarithmic where the largest value is more than this multiple of the smallest

Values = Sequence[float | None]


def unit(rows: Sequence[Row]) -> tuple[str, int]:
    """Return the unit that fits the largest measured (else predicted) peak, and its bytes."""
    measured = [size for row in rows if (size := row.measured_bytes) is not None]
    return size_unit(measured or [size for row in rows if (size := row.predicted_bytes) is not None])


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
        *(
            Column(
                f"{phase} error", lambda row, phase=phase: or_dash(row.phase_error(phase), percent), rank=2
            )
            for phase in ("rollout", "scoring", "update")
        ),
        Column("loop s predicted", lambda row: or_dash(row.loop_s("estimate"), "{:.4g}"), rank=5),
        Column("loop s", lambda row: or_dash(row.loop_s("measurement"), "{:.4g}"), rank=4),
        Column("loop error", number("loop_error", percent), rank=2),
        Column(
            "expected loop s predicted",
            lambda row: or_dash(row.loop_s("estimate", "expected"), "{:.4g}"),
            rank=9,
        ),
        Column(
            "expected loop s", lambda row: or_dash(row.loop_s("measurement", "expected"), "{:.4g}"), rank=9
        ),
        Column("expected loop error", number("expected_error", percent), rank=3),
        Column("peak met", number("peak_met", str), False, rank=9),
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
        Column("reward", number("reward"), rank=1),
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
    """Return the frontier; empty where it has a single variant, so that nothing is marked."""
    best = frontier(rows)
    chooses = len(rows) > 1 if best.is_predicted else len(best.variants) > 1
    return best if chooses else best._replace(variants=())


def overall_samples_per_s(row: Row) -> float | None:
    """Return the speed of the whole training run, its first steps included."""
    is_trained = row.perplexity is not None or row.reward is not None
    return row.train["speed"]["samples_per_s"] if is_trained and row.train else None


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
        "train": [
            (row.perplexity, "perplexity {:.4g}"),
            (row.reward, "reward {:.4g}"),
            (overall_samples_per_s(row), speed),
        ],
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
    """Draw peak memory, predicted above measured, against what the GPU has.

    Allocated bytes are drawn where some were measured, else bytes on the device, which decide the verdict.
    """
    is_measured = any(row.measured_bytes is not None for row in rows)
    fields = {"predicted": "predicted_bytes" if is_measured else "predicted_device_bytes"}
    fields |= {"measured": "measured_bytes"} if is_measured else {}
    held = [size for row in rows for field in fields.values() if (size := getattr(row, field)) is not None]
    if not held:
        return None
    name, size = size_unit(held)
    sides = {side: [_over(getattr(row, field), size) for row in rows] for side, field in fields.items()}
    limits = {at / size: text for at, text in _capacities(rows).items() if at <= IN_SIGHT * max(held)}
    axis = f"peak {'allocated' if is_measured else 'on the device, predicted'}, {name}"
    return _bars(rows, sides, axis, "memory", "{:,.2f}", limits=limits)


def speed_bars(rows: Sequence[Row]) -> str | None:
    """Draw tokens a second of all GPUs, predicted above measured."""
    sides = {
        "predicted": [row.predicted_tokens_per_s for row in rows],
        "measured": [row.tokens_per_s for row in rows],
    }
    return _bars(rows, sides, "tokens/s", "speed", "{:,.0f}")


def perplexity_bars(rows: Sequence[Row]) -> str | None:
    """Draw perplexity on held-out documents."""
    sides = {"measured": [row.perplexity for row in rows]}
    return _bars(rows, sides, "perplexity after training (lower is better)", "perplexity", "{:,.3f}")


def _capacities(rows: Sequence[Row]) -> dict[int, str]:
    """Return the memory of each GPU of the rows, and its text; equal memories are one."""
    cards: dict[int, list[str]] = {}
    for row in rows:
        if row.device_bytes is not None:
            gpu = row.recipe["hardware"]["gpu"]
            cards[row.device_bytes] = list(dict.fromkeys([*cards.get(row.device_bytes, ()), gpu]))
    return {size: f"{', '.join(names)}: {format_bytes(size)}" for size, names in cards.items()}


def _bars(
    rows: Sequence[Row],
    sides: Mapping[str, Values],
    axis: str,
    name: str,
    digits: str,
    *,
    limits: Mapping[float, str] | None = None,
) -> str | None:
    """Draw horizontal bars, a group for each row; a row without a value names its status.

    Bars of variants that are predicted not to fit are hatched. Far longer ones than the others, or than what
    the GPU has, are cut.
    """
    shown = {
        side: values[:MAX_ROWS]
        for side, values in sides.items()
        if any(value is not None for value in values)
    }
    if not shown:
        return None
    pairs = [pair for pair in zip(*shown.values(), strict=True) if None not in pair]
    most = CUT * max(map(max, pairs)) if len(shown) > 1 and pairs else math.inf
    if limits:
        most = min(most, CUT * max(limits))
    series = [
        Series(
            label, [None if value is None else min(value, most) for value in values], kind="bar",
            text=[_bar_text(row, side, y, most, digits) if (row.verdict == DOES_NOT_FIT) == over else ""
                  for row, y in zip(rows, whole, strict=False)],
            color=WRONG if over else PREDICTED if side == "predicted" else MEASURED, stack=side,
            is_hollow=over,
        )
        for side, whole in shown.items()
        for over, label, values in _by_fit(rows, side, whole)
    ]  # fmt: skip
    panel = Panel(
        series, y_label=axis, names=[short(row.variant, LONGEST_NAME) for row in rows[:MAX_ROWS]],
        is_horizontal=True, y_limits=(0, None), limits=limits or {},
    )  # fmt: skip
    return draw([panel], name, title=axis, is_themed=True)


def _by_fit(rows: Sequence[Row], side: str, values: Values) -> list[tuple[bool, str, Values]]:
    """Split values into those of rows that may fit and, if there are some, those of rows that do not."""
    over = [row.verdict == DOES_NOT_FIT for row in rows[: len(values)]]
    fit = [None if bad else value for value, bad in zip(values, over, strict=True)]
    rest = [value if bad else None for value, bad in zip(values, over, strict=True)]
    word = f"{side}: {DOES_NOT_FIT}"
    return [(False, side, fit), *([(True, word, rest)] if any(value is not None for value in rest) else [])]


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
    return _scatter(rows, points, front(rows), "measured")


def predicted_scatter(rows: Sequence[Row]) -> str | None:
    """Draw predicted bytes on the device against speed, where none is measured."""
    best = frontier(rows)
    points = {
        row.variant: (size, speed)
        for row in (rows if best.is_predicted else ())
        if (size := row.predicted_device_bytes) and (speed := row.predicted_tokens_per_s)
    }
    return _scatter(rows, points, best.variants, "predicted")


def _scatter(
    rows: Sequence[Row], points: Mapping[str, tuple[int, float]], best: Sequence[str], side: str
) -> str | None:
    """Draw points of (bytes, tokens a second), those of ``best`` joined, and a line at each GPU's memory.

    What is far over every GPU's memory is left out.
    """
    capacities = _capacities([row for row in rows if row.variant in points])
    end = ZOOM * max(capacities, default=0)
    kept = {variant: point for variant, point in points.items() if not capacities or point[0] <= end}
    if not kept:
        return None
    name, size = size_unit([x for x, _ in kept.values()])
    at = {variant: (x / size, speed) for variant, (x, speed) in kept.items()}
    over, tight = ([row.variant for row in rows if row.variant in at and row.verdict == verdict]
                   for verdict in (DOES_NOT_FIT, "tight"))  # fmt: skip
    others = [variant for variant in at if variant not in (*best, *over, *tight)]
    shorter = dict(zip((row.variant for row in rows), telling([row.variant for row in rows]), strict=True))
    groups: list[tuple[str, Kind, str, Sequence[str]]] = [
        ("frontier: no other variant is both smaller and faster", "step",
         PREDICTED if side == "predicted" else MEASURED, best),
        ("dominated", "scatter", MUTED, others),
        (TIGHT, "scatter", AMBER, tight),
        (DOES_NOT_FIT, "scatter", WRONG, over),
    ]  # fmt: skip
    series = [
        Series(
            label, [at[one][1] for one in group], [at[one][0] for one in group], kind, color=ink,
            text=[shorter[one] for one in group], is_hollow=label in (DOES_NOT_FIT, TIGHT),
        )
        for label, kind, ink, group in groups
        if group
    ]  # fmt: skip
    sizes, speeds = zip(*at.values(), strict=True)
    limits = {cap / size: text for cap, text in capacities.items() if cap / size <= IN_SIGHT * max(sizes)}
    wide = [max(values) > SPREAD * min(values) for values in ((*sizes, *limits), speeds)]
    where = "allocated" if side == "measured" else "on the device"
    panel = Panel(
        series, limits=limits, x_label=f"peak {where}, {side}, {name} (less is better)", x_log=wide[0],
        y_log=wide[1], y_label=f"tokens/s, {side} (more is better)",
    )  # fmt: skip
    return draw([panel], "front", title=f"Memory against speed, {side}", is_themed=True, size=(9.2, 4.8))


def telling(names: Sequence[str]) -> list[str]:
    """Shorten names of variants to what differs: ``micro=4 full`` of ``micro=4 recompute=full adapter=none``.

    Words that all names share, and ``key=none``, are dropped; of other words the value is kept. Names that
    would become equal stay as they are.
    """
    words = [name.split() for name in names]
    keys = [[word.partition("=")[0] for word in one] for one in words]
    if any(one != keys[0] for one in keys) or not all("=" in word for one in words for word in one):
        return list(names)
    same = [len(set(column)) == 1 for column in zip(*words, strict=True)]

    def shortened(word: str) -> str:
        value = word.partition("=")[2]
        return "" if value in BASIC else value if value.isalpha() and value != "true" else word

    found = [
        " ".join(
            filter(None, (shortened(word) for word, is_same in zip(one, same, strict=True) if not is_same))
        )
        for one in words
    ]
    bare = [one or " ".join(word for word, is_same in zip(full, same, strict=True) if not is_same)
            for one, full in zip(found, words, strict=True)]  # fmt: skip
    return bare if len(set(bare)) == len(bare) else list(names)
