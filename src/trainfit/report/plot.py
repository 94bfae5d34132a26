"""Draw plots from declared panels and series, as SVG, with matplotlib (the extra ``plots``)."""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainfit.spec.optional import is_installed, optional

EXTRA = "plots"
INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e7eb"
PREDICTED, MEASURED, WRONG = "#2f6fb2", "#e07b39", "#c0392b"
COLORS = (
    "#2f6fb2", "#e07b39", "#4a9d7c", "#8b6bb1", "#d9b54a",
    "#c0567a", "#5b9aa0", "#7f8c3a", "#9a6b4f", "#66727f",
)  # fmt: skip
CATEGORY_COLORS = {
    "weights": "#2f6fb2", "gradients": "#8fbce6", "optimizer": "#e07b39", "activations": "#4a9d7c",
    "temporary": "#b9c2cc", "communication": "#8b6bb1", "workspace": "#d9b54a",
}  # fmt: skip
"""Colors of the categories of memory, in the order in which areas are stacked."""
MARKERS = "os^Dv"
PAGE_COLORS = {INK: "ink", MUTED: "muted", GRID: "line"}
"""Colors that follow a page's light or dark style, by the names of its CSS variables."""
BAR_WIDTH = 0.8
"""Share of the distance between two names that their bars take."""
TEXT_OFFSETS = ((5, 8, "left"), (-5, 8, "right"), (5, -9, "left"), (-5, -9, "right"), (8, 0, "left"))
"""Where a point's text may be: points to the right, points up, alignment."""
STYLE: dict[str, Any] = {
    "font.family": "sans-serif", "font.size": 9, "text.color": INK, "text.parse_math": False,
    "axes.labelcolor": INK, "axes.edgecolor": GRID, "axes.facecolor": "none", "axes.axisbelow": True,
    "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "xtick.color": MUTED,
    "ytick.color": MUTED, "grid.color": GRID, "grid.linewidth": 0.8, "legend.frameon": False,
    "figure.facecolor": "none", "svg.fonttype": "path",
}  # fmt: skip

Kind = Literal["line", "step", "scatter", "bar", "area", "band"]


@dataclass(frozen=True)
class Series:
    """Values that are drawn alike.

    Attributes:
        label: name in the legend; series of one label have one color. Empty: not in the legend.
        y: values; None leaves a gap.
        x: a position for each value, or a name of ``Panel.names``; empty: 0, 1, ...
        kind: an ``area`` is stacked on the areas before it; a ``band`` is between ``low`` and ``high``.
        low: lower ends of error bars (or of a band); ``high``: upper ends.
        text: what is written at each point or at a bar's end, also where the value is None.
        stack: bars of one stack are piled up, bars of different stacks stand side by side; empty: the label.
        marker: of matplotlib; ``|`` is a tick across a bar.
        is_hollow: markers are hollow, lines dashed and bars hatched.
    """

    label: str
    y: Sequence[float | None]
    x: Sequence[float | str] = ()
    kind: Kind = "line"
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    text: Sequence[str] = ()
    stack: str = ""
    color: str = ""
    marker: str = ""
    alpha: float = 1.0
    is_hollow: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        names: names of the positions 0, 1, ... of x; by default the names that ``x`` holds.
        is_horizontal: x runs down and y to the right, which suits long names.
        span: a shaded range of y.
        lines: positions on the y axis of reference lines.
        events: positions on the x axis of dotted lines, and the text at each.
        x_ticks: the only ticks of x, and the text of each.
    """

    series: Sequence[Series]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    names: Sequence[str] = ()
    is_horizontal: bool = False
    x_log: bool = False
    y_log: bool = False
    x_limits: tuple[float | None, float | None] = (None, None)
    y_limits: tuple[float | None, float | None] = (None, None)
    x_ticks: Mapping[float, str] = field(default_factory=dict)
    span: tuple[float, float] | None = None
    lines: Sequence[float] = ()
    events: Mapping[float, str] = field(default_factory=dict)


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return is_installed("matplotlib")


def draw(
    panels: Sequence[Panel],
    name: str,
    *,
    title: str = "",
    columns: int = 0,
    size: tuple[float, float] | None = None,
    share_y: bool = False,
    is_themed: bool = False,
) -> str:
    """Return panels as one SVG element on white.

    Args:
        name: keeps the ids of several plots on one page apart.
        columns: panels a row; 0: all in one row.
        size: inches of the figure.
        share_y: one scale for all panels.
        is_themed: no background, and colors of text and lines from the page's CSS variables.
    """
    matplotlib: Any = optional("matplotlib", EXTRA)
    matplotlib.use("Agg")
    plt: Any = optional("matplotlib.pyplot", EXTRA)
    columns = columns or len(panels)
    num_rows = math.ceil(len(panels) / columns)
    panels = [_named(panel) for panel in panels]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure, grid = plt.subplots(
            num_rows, columns, figsize=size or _size(panels, columns, num_rows), squeeze=False,
            sharey=share_y, layout="constrained",
        )  # fmt: skip
        looks = _looks(panels)
        for panel, axes in zip(panels, grid.flat, strict=False):
            _draw_panel(axes, panel, looks)
            if share_y and axes not in grid[:, 0]:
                axes.set_ylabel("")
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        _draw_heads(figure, grid, title)
        for panel, axes in zip(panels, grid.flat, strict=False):
            _draw_texts(figure, axes, panel)
        file = io.StringIO()
        metadata = {"Date": None, "Creator": None}
        figure.savefig(file, format="svg", metadata=metadata, facecolor="none", dpi=144, bbox_inches="tight")
        plt.close(figure)
    text = file.getvalue()
    return _embedded(text[text.index("<svg") :], name, title or name, is_themed=is_themed)


def _embedded(text: str, name: str, title: str, *, is_themed: bool) -> str:
    """Return the SVG element for a page: ids of its own, fewer bytes, its colors or the page's."""
    text = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", text)
    # Outlines to a tenth of a point, and no indents: a third fewer bytes.
    text = re.sub(r' d="[^"]+"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0]), text)
    text = re.sub(r"\n +", "\n", text)
    if is_themed:
        for color, variable in PAGE_COLORS.items():
            text = text.replace(color, f"var(--{variable}, {color})")
    label = re.sub(r'[<>&"]', " ", title)
    style = "" if is_themed else 'style="background: #fff" '
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" {style}', 1)


def _named(panel: Panel) -> Panel:
    """Return the panel with names for every name that its series use, and positions in their place."""
    used = dict.fromkeys(x for series in panel.series for x in series.x if isinstance(x, str))
    names = list(panel.names or used)
    at = {name: index for index, name in enumerate(names)}
    series = [
        replace(one, x=[at[x] if isinstance(x, str) else x for x in one.x] if one.x else range(len(one.y)))
        for one in panel.series
    ]
    return replace(panel, names=[short(name) for name in names], series=series)


def short(text: str, limit: int = 64) -> str:
    """Return the text on one line, cut to ``limit`` characters."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _size(panels: Sequence[Panel], columns: int, num_rows: int) -> tuple[float, float]:
    """Return the inches that suit the panels: rows of horizontal bars get the height that they need."""
    heights = [3.6 if len(panels) > 1 else 4.2]
    for panel in panels:
        if panel.is_horizontal:
            stacks = len({one.stack or one.label for one in panel.series if one.kind == "bar"})
            heights.append(0.9 + (0.16 + 0.16 * max(1, stacks)) * len(panel.names))
    wide = any(panel.is_horizontal for panel in panels)
    width = (9.2 if wide else 7.2) if columns == 1 else 0.8 + (4.4 if wide else 3.4) * columns
    return width, (max(heights[1:]) if wide else heights[0]) * num_rows


def _looks(panels: Sequence[Panel]) -> dict[str, tuple[str, str]]:
    """Return a color and a marker for each label."""
    labels = dict.fromkeys(one.label for panel in panels for one in panel.series if not one.color)
    return {
        label: (COLORS[index % len(COLORS)], MARKERS[(index + index // len(COLORS)) % len(MARKERS)])
        for index, label in enumerate(labels)
    }


def _draw_panel(axes: Any, panel: Panel, looks: Mapping[str, tuple[str, str]]) -> None:
    value, name = ("x", "y") if panel.is_horizontal else ("y", "x")
    scales = {f"{name}scale": panel.x_log, f"{value}scale": panel.y_log}
    axes.set(**{key: "log" for key, is_log in scales.items() if is_log})
    if panel.span is not None:
        draw_span = axes.axvspan if panel.is_horizontal else axes.axhspan
        draw_span(*panel.span, color=PREDICTED, alpha=0.12, linewidth=0)
    for at in panel.lines:
        (axes.axvline if panel.is_horizontal else axes.axhline)(at, color=MUTED, linewidth=0.8)
    _draw_series(axes, panel, looks)
    axes.set(**{f"{name}label": panel.x_label, f"{value}label": panel.y_label})
    axes.set_title(panel.title, fontsize=9, loc="left")
    if panel.names:
        _name_positions(axes, panel)
    _plain_logarithms(axes)
    if panel.x_ticks:
        set_ticks = axes.set_yticks if panel.is_horizontal else axes.set_xticks
        set_ticks(list(panel.x_ticks), list(panel.x_ticks.values()))
        (axes.yaxis if panel.is_horizontal else axes.xaxis).set_tick_params(which="minor", length=0)
    for limits, axis in ((panel.x_limits, name), (panel.y_limits, value)):
        if limits != (None, None):
            axes.set(**{f"{axis}lim": limits})
    for at, text in panel.events.items():
        axes.axvline(at, color=INK, linewidth=0.6, linestyle=":")
        axes.annotate(
            text, (at, 1), xycoords=("data", "axes fraction"), xytext=(2, -8), textcoords="offset points",
            fontsize=7, color=MUTED,
        )  # fmt: skip


def _draw_series(axes: Any, panel: Panel, looks: Mapping[str, tuple[str, str]]) -> None:
    bars = _bars(panel)
    areas = [one for one in panel.series if one.kind == "area"]
    if areas:
        axes.stackplot(
            areas[0].x, [one.y for one in areas], labels=[one.label for one in areas], linewidth=0,
            colors=[one.color or looks[one.label][0] for one in areas],
        )  # fmt: skip
        axes.margins(x=0)
    for one in panel.series:
        if one.kind == "bar" and not any(y is not None for y in one.y):
            continue
        color, marker = (one.color, one.marker or "o") if one.color else looks[one.label]
        marker = one.marker or marker
        face = "white" if one.is_hollow else color
        if one.kind == "band":
            axes.fill_between(one.x, one.low, one.high, color=color, alpha=0.15, linewidth=0, label=one.label)
        elif one.kind == "bar":
            at, start, length, width = zip(*bars[id(one)], strict=True)
            hatched = {"facecolor": "none", "edgecolor": MUTED, "hatch": "////"}
            style = hatched if one.is_hollow else {"color": color}
            if panel.is_horizontal:
                axes.barh(at, length, width, left=start, alpha=one.alpha, **style)
            else:
                axes.bar(at, length, width, bottom=start, alpha=one.alpha, **style)
            axes.plot([], [], "s", color=face, markeredgecolor=color, markersize=8, label=one.label)
        elif one.kind != "area":
            known = [(x, y) for x, y in zip(one.x, one.y, strict=True) if y is not None]
            style = {
                "color": color, "marker": marker, "markerfacecolor": face, "markersize": 5.5,
                "linestyle": "none" if one.kind == "scatter" else "--" if one.is_hollow else "-",
                "linewidth": 1.5, "alpha": one.alpha,
                "drawstyle": "steps-post" if one.kind == "step" else "default", "label": one.label,
            }  # fmt: skip
            if marker in "|_":
                style |= {"markersize": 14, "markeredgewidth": 1.8}
            x, y = zip(*known, strict=True) if known else ((), ())
            axes.plot(*((y, x) if panel.is_horizontal else (x, y)), **style)
            for x, *ends in zip(one.x, one.low, one.high, strict=True) if one.low else ():
                if None not in ends:
                    line = (ends, (x, x)) if panel.is_horizontal else ((x, x), ends)
                    axes.plot(*line, color=color, linewidth=5, alpha=0.35, solid_capstyle="round")


def _bars(panel: Panel) -> dict[int, list[tuple[float, float, float, float]]]:
    """Return (position, start, length, width) of the bars of each series, by the id of the series."""
    series = [one for one in panel.series if one.kind == "bar"]
    stacks = list(dict.fromkeys(one.stack or one.label for one in series))
    width = BAR_WIDTH / max(1, len(stacks))
    ends: dict[tuple[str, float], float] = {}
    found: dict[int, list[tuple[float, float, float, float]]] = {}
    for one in series:
        stack = one.stack or one.label
        shift = (stacks.index(stack) - (len(stacks) - 1) / 2) * width
        for x, y in zip(one.x, one.y, strict=True):
            assert not isinstance(x, str)
            start = ends.get((stack, x), 0.0)
            ends[stack, x] = start + (y or 0.0)
            found.setdefault(id(one), []).append((x + shift, start, y or 0.0, width * 0.9))
    return found


def _name_positions(axes: Any, panel: Panel) -> None:
    """Name the positions of x; where they run down, the first is at the top."""
    positions = range(len(panel.names))
    if panel.is_horizontal:
        axes.set_yticks(positions, panel.names)
        axes.set_ylim(len(panel.names) - 0.4, -0.6)
        axes.spines["left"].set_visible(False)
    else:
        axes.set_xticks(positions, panel.names)
        axes.set_xlim(-0.6, len(panel.names) - 0.4)
    axis = "y" if panel.is_horizontal else "x"
    axes.tick_params(axis=axis, length=0, labelcolor=INK)
    axes.grid(axis=axis, visible=False)
    if any(one.text for one in panel.series):
        axes.margins(**{"x" if panel.is_horizontal else "y": 0.12})


def _plain_logarithms(axes: Any) -> None:
    """Write plain numbers on logarithmic axes, also between powers of ten where few of those are in sight."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            subs = (1.0,) if high / max(low, 1e-12) > 1e3 else (1.0, 2.0, 5.0)
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())


def _draw_heads(figure: Any, grid: Any, title: str) -> None:
    """Draw one legend for all panels, where several series have a label, and the title above it."""
    found = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        if label and not label.startswith("_")
    }
    if len(found) > 1:
        widest = max(map(len, found))
        num_columns = max(1, min(len(found), int(figure.get_figwidth() * 13 / (widest + 6))))
        figure.legend(
            list(found.values()), list(found), loc="outside upper left", ncols=num_columns, fontsize=8.5,
            title=title or None, title_fontsize=11, alignment="left", handletextpad=0.5, columnspacing=1.4,
        )  # fmt: skip
    elif title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def _draw_texts(figure: Any, axes: Any, panel: Panel) -> None:
    """Write the texts of bars at their ends, and those of points where they cover nothing."""
    bars = _bars(panel)
    for one in panel.series:
        if one.text and one.kind == "bar":
            for (at, start, length, _), text in zip(bars[id(one)], one.text, strict=True):
                _draw_bar_text(axes, panel, at, start + length, text)
    points = [item for one in panel.series if one.kind != "bar" for item in _texts(one)]
    if not points:
        return
    figure.canvas.draw()  # Texts are placed where the layout has put the axes.
    flip = slice(None, None, -1) if panel.is_horizontal else slice(None)
    dots = [axes.transData.transform(point[flip]) for point, _, _ in points]
    taken: list[Any] = []
    for point, text, is_needed in points:
        for offset in TEXT_OFFSETS:
            *move, align = offset
            style = {"xytext": move, "textcoords": "offset points", "ha": align, "va": "center"}
            drawn = axes.annotate(text, point[flip], fontsize=7.5, **style)
            box = drawn.get_window_extent()
            covers = any(box.contains(*dot) for dot in dots) or any(box.overlaps(other) for other in taken)
            if not covers or (is_needed and offset == TEXT_OFFSETS[-1]):
                taken.append(box)
                break
            drawn.remove()


def _texts(one: Series) -> Iterator[tuple[Any, str, bool]]:
    """Yield point, text and whether the text must be drawn, which holds on lines."""
    for x, y, text in zip(one.x, one.y, one.text, strict=False):
        if y is not None and text:
            yield (x, y), short(text, 34), one.kind != "scatter"


def _draw_bar_text(axes: Any, panel: Panel, at: float, end: float, text: str) -> None:
    side = -1 if end < 0 else 1
    if panel.is_horizontal:
        point, move, align = (end, at), (4 * side, 0), {"ha": "right" if end < 0 else "left", "va": "center"}
    else:
        point, move, align = (at, end), (0, 3 * side), {"ha": "center", "va": "top" if end < 0 else "bottom"}
    if panel.y_log and end <= 0:  # A logarithm has no 0: the bar begins at the edge.
        low = (axes.get_xlim() if panel.is_horizontal else axes.get_ylim())[0]
        point = (low, at) if panel.is_horizontal else (at, low)
    axes.annotate(text, point, xytext=move, textcoords="offset points", fontsize=7.5, color=MUTED, **align)
