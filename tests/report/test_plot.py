"""Plots drawn from declared series: well-formed SVG with ids of its own, texts that are no markup."""

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from matplotlib.path import Path
from matplotlib.text import Text

from trainfit.report.plot import MEASURED, Form, Panel, Series, draw, number, plot_file
from trainfit.report.plot_texts import place_texts

HOSTILE = "<script>alert('x')</script> $\\frac{1}{2}$"
LINES = Panel([Series("a", [1, 2, 9], [512, 1024, 2048], text=["", "two", ""])], x_log=True, y_log=True)
BARS = Panel(
    [
        Series("predicted", [4.0, 2.0], x=[HOSTILE, "b"], kind="bar", text=["4", "2"]),
        Series(
            "measured", [None, 2.1], x=[HOSTILE, "b"], kind="bar", text=["crashed", "2.1"], color=MEASURED
        ),
        Series("bound", [5.0, 3.0], kind="scatter", marker="|", low=[4.5, None], high=[5.5, None]),
    ],
    is_horizontal=True,
    span=(-1, 1),
    lines=[0],
)  # fmt: skip
AREAS = Panel([Series("x", [1, 2], kind="area"), Series("y", [2, 1], kind="area")], events={1: "backward"})


@pytest.mark.parametrize("panel", [LINES, BARS, AREAS], ids=["lines", "bars", "areas"])
def test_every_kind_draws_well_formed_svg_with_ids_of_its_own(panel: Panel):
    tree = ET.fromstring(draw([panel, panel], "name", title=HOSTILE, columns=1))
    ids = [element.attrib["id"] for element in tree.iter() if "id" in element.attrib]
    assert len(set(ids)) == len(ids)
    assert all(one.startswith("name-") for one in ids)
    assert not any(re.search(r"[0-9a-f]{10}", one) for one in ids)  # Hashes differ between processors.


@pytest.mark.parametrize("form", ["svg", "png", "pdf"])
def test_a_file_is_of_its_format_and_the_same_every_time(form: Form):
    content = plot_file([LINES], "name", form, title=HOSTILE)
    assert content.startswith({"svg": b"<svg ", "png": b"\x89PNG", "pdf": b"%PDF"}[form])
    assert content == plot_file([LINES], "name", form, title=HOSTILE)


def test_a_themed_plot_takes_the_colors_of_the_page():
    assert "var(--ink, #1f2933)" in draw([LINES], "lines", is_themed=True)
    assert "var(" not in draw([LINES], "lines")


def test_numbers_have_commas():
    assert [number(value) for value in (0.125, 12.0, 999.5, 1234.5, 1.2e7)] == [
        "0.125", "12", "999.5", "1,234", "12,000,000",
    ]  # fmt: skip
    for is_log in (False, True):
        text = draw([Panel([Series("a", [1_000, 90_000], [1, 2])], y_log=is_log)], "commas")
        assert "<!-- 10,000 -->" in text or "<!-- 20,000 -->" in text


def test_texts_of_points_cross_nothing():
    """Thirty points with long names around a front: every text that is written is apart from all else."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    points = [(1 + (7 * i) % 29, 1 + (11 * i) % 30) for i in range(30)]
    front = sorted(points)[:6]
    axes.plot(*zip(*points, strict=True), "o")
    axes.margins(0.14, 0.1)
    figure.canvas.draw()
    texts = [(point, f"micro={i} full fused lora") for i, point in enumerate(points)]
    place_texts(axes, texts, points, [front, [(25, 0), (25, 40)]])
    boxes = [Text.get_window_extent(one) for one in axes.texts]
    assert len(boxes) > 10
    dots = axes.transData.transform(points)
    lines = [Path(axes.transData.transform(line)) for line in (front, [(25, 0), (25, 40)])]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])
        assert not any(box.contains(*dot) for dot in dots)
        assert not any(line.intersects_bbox(box, filled=False) for line in lines)
        assert axes.get_window_extent().contains(box.x0, box.y0)
        assert axes.get_window_extent().contains(box.x1, box.y1)
    plt.close(figure)


def test_panels_with_one_scale_hold_the_highest_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are not clipped, so one above its panel would cross the title."""
    from trainfit.report import plot

    seen: list[tuple[float, float]] = []
    share = plot._share_y

    def shared(grid: Any, every: Any) -> None:
        share(grid, every)
        seen.extend(axes.get_ylim() for axes in grid.flat)

    monkeypatch.setattr(plot, "_share_y", shared)
    panels = [Panel([Series("a", [1.0, 2.0])]), Panel([Series("a", [1.0, 9.0])])]
    plot_file(panels, "scale", "svg", share_y=True)
    assert len(set(seen)) == 1
    assert seen[0][1] >= 9
