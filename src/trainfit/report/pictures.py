"""Pictures of results in a notebook: memory against the card, memory over the step, memory against speed.

Each is an ``img`` whose source is an SVG: viewers of notebooks (GitHub, JupyterLab before a notebook is
trusted) drop scripts, styles and inline SVG, and show images. No numbers are in a picture alone: the table
beside it has them, and its alternative text says them in words.
"""

import base64
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from trainfit.report.html import render
from trainfit.report.memory_plot import Box, drawing, in_words
from trainfit.report.plot import CATEGORY_COLORS
from trainfit.spec.explanation import MemoryCourse
from trainfit.spec.printable import printable
from trainfit.spec.result import CATEGORIES, Estimate, MemoryBreakdown
from trainfit.spec.units import format_bytes, size_unit

WIDTH, MARGIN = 780, 14
INNER = WIDTH - 2 * MARGIN
KEYS_A_ROW, KEY_HEIGHT = 4, 18
BAR_STEP = 58
OUTSIDE, UNUSED, MORE = "#7d8792", "#a38f78", "#c4452f"
"""Colors of what is no category of the ledger: the CUDA context, fragmentation, a possible higher peak."""


class Size(NamedTuple):
    """A part of a bar."""

    name: str
    num_bytes: int
    color: str


class Bar(NamedTuple):
    """A bar of memory; ``card``: what the device has, None where it has none of its own."""

    name: str
    text: str
    sizes: Sequence[Size]
    card: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(one.num_bytes for one in self.sizes)


class Point(NamedTuple):
    """A recipe on the plot of memory against speed."""

    num_bytes: int
    tokens_per_s: float
    about: str
    changes_numerics: bool = False
    is_over: bool = False
    is_best: bool = False
    is_on_frontier: bool = True


def categories(alive: MemoryBreakdown) -> list[Size]:
    """Return the categories that hold memory, as the parts of a bar."""
    sizes = {name: getattr(alive, name) for name in CATEGORIES}
    return [
        Size(name.replace("kv_cache", "KV cache"), size, CATEGORY_COLORS[name])
        for name, size in sizes.items()
        if size
    ]


def on_device(estimate: Estimate) -> list[Size]:
    """Return what a step takes on the device: categories at the peak, then what lies outside the tensors."""
    highest = estimate.highest.device
    more = [
        Size("fragmentation", estimate.peak_reserved_bytes - estimate.peak_allocated_bytes, UNUSED),
        Size("CUDA context", estimate.peak_device_bytes - estimate.peak_reserved_bytes, OUTSIDE),
        Size("possible more", highest - estimate.peak_device_bytes, MORE),
    ]
    return [*categories(estimate.breakdown), *(one for one in more if one.num_bytes > 0)]


def bars(title: str, shown: Sequence[Bar]) -> str:
    """Return bars of memory on one scale, each against its card."""
    whole = max(1, *(max(one.total, one.card or 0) for one in shown))
    scale = INNER / whole
    drawn: list[dict[str, Any]] = []
    for number, bar in enumerate(shown):
        at, parts = 0.0, []
        for size in bar.sizes:
            length = size.num_bytes * scale
            parts.append(
                (round(at, 1), round(length, 1), size.color, f"{size.name} {format_bytes(size.num_bytes)}")
            )
            at += length
        drawn.append({
            "y": 26 + BAR_STEP * number, "name": bar.name, "text": bar.text, "parts": parts,
            "card": None if bar.card is None else round(bar.card * scale, 1),
            "is_over": bar.card is not None and bar.total > bar.card,
        })  # fmt: skip
    named = {size.name: size for bar in shown for size in bar.sizes}
    single = len(shown) == 1
    keys = [
        (one.color, f"{one.name} {format_bytes(one.num_bytes)}" if single else one.name)
        for one in named.values()
    ]
    height = BAR_STEP * len(shown)
    about = "; ".join(f"{bar.name}: {bar.text} ({_listed(bar.sizes)})" for bar in shown)
    return _image("bars", title, about, keys, height, bars=drawn, inner=INNER)


def course(title: str, of: MemoryCourse) -> str:
    """Return the memory of a step over time, by category."""
    found = drawing(of, Box(INNER, 290.0, left=58.0, bottom=28.0))
    keys = [(area.color, area.name.replace("kv_cache", "KV cache")) for area in found["areas"]]
    return _image("course", title, in_words(of), keys, 290, **found)


def frontier(title: str, points: Sequence[Point], limit_bytes: int, limit: str) -> str:
    """Return recipes by memory and speed, numbered as they come, and the limit."""
    box = Box(INNER, 300.0, left=62.0, top=30.0, bottom=36.0)
    most = 1.04 * max(limit_bytes, *(one.num_bytes for one in points))
    fastest = 1.12 * max(one.tokens_per_s for one in points)

    def x(num_bytes: float) -> float:
        return round(box.left + num_bytes / most * (box.width - box.left), 1)

    def y(tokens_per_s: float) -> float:
        return round(box.top + (1 - tokens_per_s / fastest) * (box.height - box.top - box.bottom), 1)

    unit, size = size_unit([most])
    best = "; ".join(f"the best: {one.about}" for one in points if one.is_best) or "none fits"
    line = " L".join(f"{x(one.num_bytes)},{y(one.tokens_per_s)}" for one in points if one.is_on_frontier)
    colors = ("var(--one)", "var(--other)")
    keys = [(colors[0], "numerics unchanged")]
    keys += [(colors[1], "numerics changed")] if any(one.changes_numerics for one in points) else []
    keys += [("var(--ink)", "outlined: the best")] if any(one.is_best for one in points) else []
    keys += [("var(--line)", "hollow: over the limit")] if any(one.is_over for one in points) else []
    shown = [
        {"x": x(one.num_bytes), "y": y(one.tokens_per_s), "color": colors[one.changes_numerics],
         "is_over": one.is_over, "is_best": one.is_best, "about": one.about,
         "is_numbered": one.is_on_frontier}
        for one in points
    ]  # fmt: skip
    return _image(
        "frontier", title, f"{len(points)} recipes; {limit}; {best}", keys, 300,
        box=box, points=list(_numbered(shown)), line=f"M{line}", limit=(x(limit_bytes), limit),
        x_label=f"{unit} on the device", x_ticks=[(x(at * size), f"{at:g}") for at in _round(most / size)],
        y_ticks=[(y(at), f"{at:,g}") for at in _round(fastest)],
    )  # fmt: skip


def _numbered(points: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the points with their numbers, left out where one would lie on another."""
    last: dict[str, Any] | None = None
    for number, point in enumerate(points, 1):
        close = last is not None and abs(point["x"] - last["x"]) < 16 and abs(point["y"] - last["y"]) < 13
        if (close and not point["is_best"]) or not point["is_numbered"]:
            yield {**point, "number": None}
            continue
        last = point
        yield {**point, "number": number}


def _round(most: float, num: int = 5) -> list[float]:
    """Return about ``num`` round numbers from 0 to ``most``."""
    power = 10 ** math.floor(math.log10(most / num))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= most / num)
    return [step * number for number in range(int(most / step) + 1)]


def _listed(sizes: Sequence[Size]) -> str:
    return ", ".join(f"{one.name} {format_bytes(one.num_bytes)}" for one in sizes)


def _image(
    template: str, title: str, about: str, keys: Sequence[tuple[str, str]], height: int, **values: Any
) -> str:
    """Return an ``img`` element of a template: a row of keys of colors, then the drawing."""
    from markupsafe import Markup, escape

    each = INNER // KEYS_A_ROW
    placed = [
        (MARGIN + number % KEYS_A_ROW * each, 24 + number // KEYS_A_ROW * KEY_HEIGHT, color, text)
        for number, (color, text) in enumerate(keys)
    ]
    top = 18 + math.ceil(len(keys) / KEYS_A_ROW) * KEY_HEIGHT
    svg = render(
        f"{template}.svg", title=title, about=about, keys=placed, width=WIDTH, height=top + height + MARGIN,
        margin=MARGIN, top=top, **values,
    )  # fmt: skip
    source = base64.b64encode(svg.encode()).decode()
    alt = escape(printable(f"{title}. {about}", lines=True))
    image = '<img src="data:image/svg+xml;base64,{}" width="{}" style="max-width: 100%" alt="{}">'
    return Markup(image).format(Markup(source), WIDTH, alt)
