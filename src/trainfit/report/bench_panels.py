"""Panels of lines or bars with one legend. Enters: what is drawn, by name. Leaves: an SVG as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainfit.report.plots import INK, MARKERS, MODEL_COLOURS, MUTED, plain_logarithms, svg
from trainfit.spec.bench import Cell

Drawn = dict[str, list[tuple[Cell, float]]]
"""Points (x, y) by the name of their line."""
WIDTH = 0.8
"""Of all bars of one name."""


@dataclass(frozen=True)
class Look:
    """Words and scales. ``bars``: over names that are numbers, too; ``lies``: bars lie, for long names; ``digits``: of the values at bars.

    ``legend``: what the lines' names are values of.
    """

    title: str
    x: str
    y: str
    x_log: bool = False
    y_log: bool = False
    bars: bool = False
    lies: bool = False
    digits: str = ""
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """``missing``: why a point of a line has no value, by line and x."""

    title: str
    drawn: Drawn
    missing: Mapping[tuple[str, Cell], str] = field(default_factory=dict)


def draw_panels(panels: Sequence[Panel], look: Look, name: str) -> str:
    """One picture: panels side by side, of one scale, the title and one legend above."""
    names = list(dict.fromkeys(line for panel in panels for line in panel.drawn))
    colours = colours_of(names)
    xs = list(dict.fromkeys(x for panel in panels for points in panel.drawn.values() for x, _ in points))
    are_bars = any(isinstance(x, str) for x in xs)
    heights = [y for panel in panels for points in panel.drawn.values() for _, y in points]
    least = min((y for y in heights if y > 0), default=1.0)  # An error may be 0, which no logarithm has.

    def draw(plt: Any) -> Any:
        width = 7.2 if len(panels) == 1 else 1.0 + 3.4 * len(panels)
        figure, grid = plt.subplots(1, len(panels), figsize=(width, 4.0), sharey=True, squeeze=False)
        for index, (panel, axes) in enumerate(zip(panels, grid[0], strict=True)):
            if are_bars:
                _bars(axes, panel, look, [str(x) for x in xs], colours, least / 2)
            else:
                _lines(axes, panel, look, colours)
            axes.set_title(panel.title, fontsize=10, loc="left")
            if index:
                axes.set_ylabel("")
        figure.tight_layout(pad=0.4)  # Before what stands above, for which it would make room within.
        above = 1.01
        if len(names) > 1:
            _legend(plt, figure, colours, look, above, are_bars=are_bars)
            above += 0.12 if look.legend else 0.07
        figure.suptitle(look.title, y=above, va="bottom", fontsize=11.5, color=INK)
        return figure

    return svg(draw, name)


def _legend(
    plt: Any, figure: Any, colours: Mapping[str, tuple[str, str]], look: Look, above: float, *, are_bars: bool
) -> None:
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=colour, label=name)
        if are_bars
        else plt.Line2D([], [], color=colour, marker=marker, label=name)
        for name, (colour, marker) in colours.items()
    ]
    figure.legend(
        handles=handles, loc="lower center", ncols=min(len(handles), 6), fontsize=9, title=look.legend or None,
        bbox_to_anchor=(0.5, above - 0.01), handletextpad=0.5, columnspacing=1.4,
    )  # fmt: skip


def colours_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each line; no two lines are the same."""
    assert len(names) <= len(MODEL_COLOURS), "more lines than colours: split the plot into panels"
    return {name: (MODEL_COLOURS[index], MARKERS[index % len(MARKERS)]) for index, name in enumerate(names)}


def _lines(axes: Any, panel: Panel, look: Look, colours: Mapping[str, tuple[str, str]]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set(
        xscale="log" if look.x_log else "linear",
        yscale="log" if look.y_log else "linear",
        xlabel=look.x,
        ylabel=look.y,
    )
    for name, points in panel.drawn.items():
        colour, marker = colours[name]
        axes.plot(*zip(*sorted(points), strict=True), color=colour, marker=marker, markersize=5)
    if look.y_log:
        plain_logarithms(axes)
    else:
        axes.set_ylim(bottom=0)
    xs = sorted({float(x) for points in panel.drawn.values() for x, _ in points})
    axes.xaxis.set_major_locator(FixedLocator(xs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1024:g}K" if value >= 1024 else f"{value:g}")
    )


def _bars(
    axes: Any,
    panel: Panel,
    look: Look,
    xs: Sequence[str],
    colours: Mapping[str, tuple[str, str]],
    foot: float,
) -> None:
    """Bars over names; ``foot``: where they begin on a logarithmic axis, which has no 0."""
    names = list(colours)
    width = WIDTH / len(names)
    for index, name in enumerate(names):
        shift = (index - (len(names) - 1) / 2) * width
        points = [(xs.index(str(x)) + shift, y) for x, y in panel.drawn.get(name, ())]
        bars = (axes.barh if look.lies else axes.bar)(
            [at for at, _ in points], [y for _, y in points], width, color=colours[name][0]
        )
        if look.digits:
            axes.bar_label(
                bars, labels=[look.digits.format(y) for _, y in points], padding=2, fontsize=8, color=MUTED
            )
        for (line, x), why in panel.missing.items():
            if line == name and str(x) in xs:
                _say_why(axes, xs.index(str(x)) + shift, why, lies=look.lies)
    scale = "log" if look.y_log else "linear"
    if look.lies:
        axes.set_yticks(range(len(xs)), xs)
        axes.set(xscale=scale, xlabel=look.y, ylabel=look.x)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    else:
        axes.set_xticks(range(len(xs)), xs)
        axes.set(yscale=scale, xlabel=look.x, ylabel=look.y, xlim=(-0.6, len(xs) - 0.4))
        axes.grid(axis="x", visible=False)
    if look.digits:
        axes.margins(**{"x" if look.lies else "y": 0.12})
    if look.y_log:
        (axes.set_xlim if look.lies else axes.set_ylim)(foot)
        plain_logarithms(axes)


def _say_why(axes: Any, at: float, why: str, *, lies: bool) -> None:
    """The status where a bar would begin."""
    place, turn = ((0.01, at), 0) if lies else ((at, 0.02), 90)
    frame = axes.get_yaxis_transform() if lies else axes.get_xaxis_transform()
    axes.text(
        *place,
        why,
        transform=frame,
        rotation=turn,
        fontsize=6.5,
        color=MUTED,
        ha="left" if lies else "center",
        va="center" if lies else "bottom",
    )
