"""Draw plots from declared panels and series, as SVG, PNG or PDF, with matplotlib (the extra ``plots``)."""

import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from trainfit.report.plot_texts import place_texts
from trainfit.spec.errors import InputError
from trainfit.spec.files import check_can_write
from trainfit.spec.optional import is_installed, optional, require

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
    "kv_cache": "#c96f8e",
}  # fmt: skip
"""Colors of the categories of memory, in the order in which areas are stacked."""
MARKERS = "os^Dv"
PAGE_COLORS = {INK: "ink", MUTED: "muted", GRID: "line"}
"""Colors that follow a page's light or dark style, by the names of its CSS variables."""
BAR_WIDTH = 0.8  # Share of the distance between two names that their bars take
STYLE: dict[str, Any] = {
    "font.family": "sans-serif", "font.size": 9, "text.color": INK, "text.parse_math": False,
    "axes.labelcolor": INK, "axes.edgecolor": GRID, "axes.facecolor": "none", "axes.axisbelow": True,
    "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "xtick.color": MUTED,
    "ytick.color": MUTED, "grid.color": GRID, "grid.linewidth": 0.8, "legend.frameon": False,
    "figure.facecolor": "none", "svg.fonttype": "path",
}  # fmt: skip

Kind = Literal["line", "step", "scatter", "bar", "area", "band"]
"""An ``area`` is stacked on the areas before it; a ``band`` is between ``low`` and ``high``."""
Bar = tuple[float, float, float, float]  # Position, start, length and width
Form = Literal["svg", "png", "pdf"]
"""Formats of a plot's file, by the suffix of its name."""
can_draw = partial(is_installed, "matplotlib")


@dataclass(frozen=True)
class Series:
    """Values that are drawn alike."""

    label: str  # Name in the legend; series of one label have one color. Empty: not in the legend
    y: Sequence[float | None]  # None leaves a gap
    x: Sequence[float | str] = ()  # A position for each value, or a name of Panel.names; empty: 0, 1, ...
    kind: Kind = "line"
    low: Sequence[float | None] = ()  # Lower ends of error bars, or of a band
    high: Sequence[float | None] = ()
    text: Sequence[str] = ()  # At each point or at a bar's end, also where the value is None
    stack: str = ""  # Bars of one stack are piled up, different stacks side by side; empty: the label
    color: str = ""
    marker: str = ""  # Of matplotlib; "|" is a tick across a bar
    alpha: float = 1.0
    is_hollow: bool = False  # Markers are hollow, lines dashed and bars hatched


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    series: Sequence[Series]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    names: Sequence[str] = ()  # Of the positions 0, 1, ... of x; by default the names that x holds
    is_horizontal: bool = False  # x runs down and y to the right, which suits long names
    x_log: bool = False
    y_log: bool = False
    x_limits: tuple[float | None, float | None] = (None, None)
    y_limits: tuple[float | None, float | None] = (None, None)
    x_ticks: Mapping[float, str] = field(default_factory=dict)  # The only ticks of x, and their texts
    span: tuple[float, float] | None = None  # A shaded range of y
    lines: Sequence[float] = ()  # Positions on the y axis of reference lines
    limits: Mapping[float, str] = field(default_factory=dict)
    """Dashed lines up the drawing, with a text above: where sizes run to the right, the memory of a GPU."""
    events: Mapping[float, str] = field(default_factory=dict)  # Dotted lines: position on x, and text

    def flipped(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return x and y in the order of the drawing's axes."""
        return (y, x) if self.is_horizontal else (x, y)


def check_plot_file(path: Path, field: str = "--plot") -> Form:
    """Return the format that the file's name asks for, before long work.

    Raises:
        InputError: another format, no such folder, or matplotlib is not installed.
        OSError: not writable.
    """
    check_can_write(path, field)
    form: Any = path.suffix.lower().lstrip(".")
    if form not in get_args(Form):
        known = ", ".join(f"{path.stem}.{one}" for one in get_args(Form))
        problem = "no format of a plot" if form else "names no format"
        raise InputError(problem, f"write one of {known}", field=field, value=str(path))
    require("matplotlib", EXTRA, field=field, value=str(path))
    return form


def draw(panels: Sequence[Panel], name: str, *, is_themed: bool = False, **options: Any) -> str:
    """Return panels as one SVG element.

    Args:
        name: keeps the ids of several plots on one page apart.
        is_themed: no background, and colors of text and lines from the page's CSS variables; else on white.
        options: as ``drawn`` takes them.
    """
    title = options.pop("title", "")  # A page has headings of its own.
    text = drawn(panels, name, "svg", title="" if is_themed else title, **options).decode()
    # For a page: ids of its own; outlines to a tenth of a point and no indents, a third fewer bytes.
    text = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", text[text.index("<svg") :])
    # Those that hash coordinates differ from processor to processor, in the last bit of a sum or logarithm.
    hashed = dict.fromkeys(re.findall(rf"(?<={re.escape(name)}-)[a-z][0-9a-f]{{10}}\b", text))
    for number, one in enumerate(hashed):
        text = text.replace(f"{name}-{one}", f"{name}-{number}")
    text = re.sub(r' d="[^"]+"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0]), text)
    text = re.sub(r"\n +", "\n", text)
    for color, variable in PAGE_COLORS.items() if is_themed else ():
        text = text.replace(color, f"var(--{variable}, {color})")
    label = re.sub(r'[<>&"]', " ", title or name)
    style = "" if is_themed else 'style="background: #fff" '
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" {style}', 1)


def plot_file(panels: Sequence[Panel], name: str, form: Form, **options: Any) -> bytes:
    """Return the content of a file of the panels; ``options`` as ``drawn`` takes them."""
    if form == "svg":
        return draw(panels, name, **options).encode()
    return drawn(panels, name, form, **options)


def drawn(
    panels: Sequence[Panel],
    name: str,
    form: Form,
    *,
    title: str = "",
    columns: int = 0,
    size: tuple[float, float] | None = None,
    share_y: bool = False,
) -> bytes:
    """Return panels as matplotlib writes them: SVG without a background, PNG and PDF on white.

    Args:
        name: makes the ids of an SVG the same every time.
        columns: panels a row; 0: all in one row.
        size: inches of the figure.
        share_y: one scale for all panels.
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
            layout="constrained",
        )  # fmt: skip
        looks = _looks(panels)
        for panel, axes in zip(panels, grid.flat, strict=False):
            _draw_panel(axes, panel, looks)
        if share_y:
            _share_y(grid, grid.flat[: len(panels)])
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        _draw_heads(figure, grid, title)
        for panel, axes in zip(panels, grid.flat, strict=False):
            _draw_texts(figure, axes, panel)
        file = io.BytesIO()
        metadata = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None, "Creator": None}}[form]
        face = "none" if form == "svg" else "white"
        figure.savefig(
            file, format=form, metadata=metadata, facecolor=face, dpi=144, bbox_inches="tight"
        )  # fmt: skip
        plt.close(figure)
    return file.getvalue()


def _share_y(grid: Any, every: Any) -> None:
    """Give all panels one scale, which holds what each would have alone; only the first column has labels."""
    lows, highs = zip(*(axes.get_ylim() for axes in every), strict=True)
    for axes in every:
        axes.set_ylim(min(lows), max(highs))
        if axes not in grid[:, 0]:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)


def _named(panel: Panel) -> Panel:
    """Return the panel with names for every name that its series use, and positions in their place."""
    used = dict.fromkeys(x for series in panel.series for x in series.x if isinstance(x, str))
    names = list(panel.names or used)
    at = {name: index for index, name in enumerate(names)}
    series = [
        replace(one, x=[at[x] if isinstance(x, str) else x for x in one.x] if one.x else range(len(one.y)))
        for one in panel.series
    ]
    return replace(panel, names=[short(name, 80) for name in names], series=series)


def short(text: str, limit: int = 64) -> str:
    """Return the text on one line, cut to ``limit`` characters."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _size(panels: Sequence[Panel], columns: int, num_rows: int) -> tuple[float, float]:
    """Return the inches that suit the panels: rows of horizontal bars get the height that they need."""
    wide = [panel for panel in panels if panel.is_horizontal]
    height, width = 3.6 if len(panels) > 1 else 4.2, 9.2 if wide else 7.2
    if wide:
        stacks = [
            len({one.stack or one.label for one in panel.series if one.kind == "bar"}) for panel in wide
        ]
        needed = max(0.9 + (0.16 + 0.16 * max(1, num)) * len(panel.names)
                     for panel, num in zip(wide, stacks, strict=True))  # fmt: skip
        height = needed if len(wide) == len(panels) else max(height, needed)
    return width if columns == 1 else 0.8 + (4.4 if wide else 3.4) * columns, height * num_rows


def _looks(panels: Sequence[Panel]) -> dict[str, tuple[str, str]]:
    """Return a color and a marker for each label."""
    labels = dict.fromkeys(one.label for panel in panels for one in panel.series if not one.color)
    return {
        label: (COLORS[index % len(COLORS)], MARKERS[(index + index // len(COLORS)) % len(MARKERS)])
        for index, label in enumerate(labels)
    }


def _draw_panel(axes: Any, panel: Panel, looks: Mapping[str, tuple[str, str]]) -> None:
    name, value = panel.flipped("x", "y")
    scales = {f"{name}scale": panel.x_log, f"{value}scale": panel.y_log}
    axes.set(**{key: "log" for key, is_log in scales.items() if is_log})
    if panel.span is not None:
        draw_span = axes.axvspan if panel.is_horizontal else axes.axhspan
        draw_span(*panel.span, color=PREDICTED, alpha=0.12, linewidth=0)
    for at, text in panel.limits.items():
        axes.axvline(at, color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
        axes.annotate(
            text, (at, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
            fontsize=8, ha="center", va="bottom", color=INK,
        )  # fmt: skip
    for at in panel.lines:
        (axes.axvline if panel.is_horizontal else axes.axhline)(at, color=MUTED, linewidth=0.8)
    _draw_series(axes, panel, looks)
    axes.set(**{f"{name}label": panel.x_label, f"{value}label": panel.y_label})
    axes.set_title(panel.title, fontsize=9, loc="left")
    if panel.names:  # Where the names run down, the first is at the top.
        ends = (-0.6, len(panel.names) - 0.4)
        axes.set(**{f"{name}lim": ends[::-1] if panel.is_horizontal else ends})
        getattr(axes, f"set_{name}ticks")(range(len(panel.names)), panel.names)
        axes.spines["left"].set_visible(not panel.is_horizontal)
        axes.tick_params(axis=name, length=0, labelcolor=INK)
        axes.grid(axis=name, visible=False)
        if any(one.text for one in panel.series):
            axes.margins(**{value: 0.12})
    if any(one.text for one in panel.series if one.kind != "bar"):
        axes.margins(0.14, 0.1)
        for axis, is_log in ((axes.xaxis, panel.x_log), (axes.yaxis, panel.y_log)):
            if not is_log and axis.get_data_interval()[0] >= 0 > axis.get_view_interval()[0]:
                axes.set(
                    **{f"{axis.axis_name}lim": (0, None)}
                )  # The margin holds no values that do not exist.
    _plain_numbers(axes, named=name if panel.names else "")
    if panel.x_ticks:
        getattr(axes, f"set_{name}ticks")(list(panel.x_ticks), list(panel.x_ticks.values()))
        getattr(axes, f"{name}axis").set_tick_params(which="minor", length=0)
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
        color, marker = (one.color, "o") if one.color else looks[one.label]
        marker = one.marker or marker
        face = "white" if one.is_hollow else color
        if one.kind == "band":
            axes.fill_between(one.x, one.low, one.high, color=color, alpha=0.15, linewidth=0, label=one.label)
        elif one.kind == "bar" and any(y is not None for y in one.y):
            known = [bar for bar, y in zip(bars[id(one)], one.y, strict=True) if y is not None]
            at, start, length, width = zip(*known, strict=True)
            hatched = {"facecolor": "none", "edgecolor": color, "hatch": "////", "linewidth": 0.8}
            style = {"alpha": one.alpha} | (hatched if one.is_hollow else {"color": color})
            draw_bars = (
                partial(axes.barh, left=start) if panel.is_horizontal else partial(axes.bar, bottom=start)
            )
            draw_bars(at, length, width, **style)
            axes.plot([], [], "s", color=face, markeredgecolor=color, markersize=8, label=one.label)
        elif one.kind in ("line", "step", "scatter"):
            known = [(x, y) for x, y in zip(one.x, one.y, strict=True) if y is not None]
            if not known:  # A line without points takes the layout's space at the figure's corner.
                continue
            style = {
                "color": color, "marker": marker, "markerfacecolor": face, "markersize": 5.5,
                "linestyle": "none" if one.kind == "scatter" else "--" if one.is_hollow else "-",
                "linewidth": 1.5, "alpha": one.alpha,
                "drawstyle": "steps-post" if one.kind == "step" else "default", "label": one.label,
                "clip_on": False,
            }  # fmt: skip
            if marker in "|_":
                style |= {"markersize": 14, "markeredgewidth": 1.8}
            elif marker == "*":
                style |= {"markersize": 11, "markeredgecolor": "white", "markeredgewidth": 0.6}
            axes.plot(*panel.flipped(*zip(*known, strict=True)), **style)
            for x, *ends in zip(one.x, one.low, one.high, strict=True) if one.low else ():
                if None not in ends:
                    style = {"linewidth": 5, "alpha": 0.35, "solid_capstyle": "round"}
                    axes.plot(*panel.flipped((x, x), ends), color=color, **style)


def _bars(panel: Panel) -> dict[int, list[Bar]]:
    """Return the bars of each series, by the id of the series."""
    series = [one for one in panel.series if one.kind == "bar"]
    stacks = list(dict.fromkeys(one.stack or one.label for one in series))
    width = BAR_WIDTH / max(1, len(stacks))
    ends: dict[tuple[str, float], float] = {}
    found: dict[int, list[Bar]] = {}
    for one in series:
        stack = one.stack or one.label
        shift = (stacks.index(stack) - (len(stacks) - 1) / 2) * width
        for x, y in zip(one.x, one.y, strict=True):
            assert not isinstance(x, str)
            start = ends.get((stack, x), 0.0)
            ends[stack, x] = start + (y or 0.0)
            found.setdefault(id(one), []).append((x + shift, start, y or 0.0, width * 0.9))
    return found


def _plain_numbers(axes: Any, *, named: str) -> None:
    """Write numbers in full, with commas from 1,000 on, and between powers of ten where those are few.

    Args:
        named: the axis that has names and no numbers.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, ScalarFormatter

    class Commas(ScalarFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return number(x) if abs(x) >= 1000 else super().__call__(x, pos)

    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            subs = (1.0,) if high / max(low, 1e-12) > 1e3 else (1.0, 2.0, 5.0)
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
            axis.set_minor_formatter(NullFormatter())
        elif name != named:
            plain = Commas(useOffset=False)
            plain.set_scientific(False)
            axis.set_major_formatter(plain)


def number(value: float) -> str:
    """Return a number in at most four digits, from 1,000 on in full with commas: ``0.125``, ``16,384``."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


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
    if panel.limits:
        figure.canvas.draw()
    for one in panel.series:
        if one.text and one.kind == "bar":
            for (at, start, length, _), text in zip(bars[id(one)], one.text, strict=True):
                _draw_bar_text(axes, panel, at, start + length, text)
    points = [one for one in panel.series if one.kind in ("line", "step", "scatter")]
    texts = [item for one in points for item in _texts(panel, one)]
    if texts:
        figure.canvas.draw()  # Texts are placed where the layout has put the axes.
        dots = [panel.flipped(x, y) for one in points for x, y in zip(one.x, one.y, strict=True)
                if y is not None]  # fmt: skip
        place_texts(axes, texts, dots, list(_lines(axes, panel)))


def _texts(panel: Panel, one: Series) -> Iterator[tuple[Any, str]]:
    """Yield point and text, of each value that has both."""
    for x, y, text in zip(one.x, one.y, one.text, strict=False):
        if y is not None and text:
            yield panel.flipped(x, y), short(text, 72)


def _lines(axes: Any, panel: Panel) -> Iterator[Sequence[Any]]:
    """Yield the drawn lines as points, in data units."""
    low, high = axes.get_ylim()
    yield from ([(at, low), (at, high)] for at in (*panel.limits, *panel.events))
    ends = axes.get_ylim() if panel.is_horizontal else axes.get_xlim()
    yield from ([panel.flipped(end, at) for end in ends] for at in panel.lines)
    for one in panel.series:
        known = [panel.flipped(x, y) for x, y in zip(one.x, one.y, strict=True) if y is not None]
        if one.kind == "line":
            yield known
        elif one.kind == "step":
            pairs = list(itertools.pairwise(known))
            yield [*(point for a, b in pairs for point in (a, (b[0], a[1]))), *known[-1:]]


def _draw_bar_text(axes: Any, panel: Panel, at: float, end: float, text: str) -> None:
    side = -1 if end < 0 else 1
    if panel.y_log and end <= 0:  # A logarithm has no 0: the bar begins at the edge.
        end = (axes.get_xlim() if panel.is_horizontal else axes.get_ylim())[0]
    if panel.is_horizontal:
        move, align = (4 * side, 0), {"ha": "right" if side < 0 else "left", "va": "center"}
    else:
        move, align = (0, 3 * side), {"ha": "center", "va": "top" if side < 0 else "bottom"}
    drawn = axes.annotate(
        text, panel.flipped(at, end), xytext=move, textcoords="offset points", fontsize=7.5, color=MUTED,
        **align,
    )  # fmt: skip
    if panel.limits and panel.is_horizontal:
        box = drawn.get_window_extent()
        crossed = [axes.transData.transform((limit, at))[0] for limit in panel.limits]
        if any(box.x0 - 2 < x < box.x1 + 2 for x in crossed):  # Within the bar, which is not crossed there.
            drawn.set(position=(-4, 0), ha="right", color="white")
