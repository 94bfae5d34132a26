"""Plots drawn from declared series: well-formed SVG with ids of its own, texts that are no markup."""

import xml.etree.ElementTree as ET

import pytest

from trainfit.report.plot import MEASURED, Form, Panel, Series, draw, plot_file

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


@pytest.mark.parametrize("form", ["svg", "png", "pdf"])
def test_a_file_is_of_its_format_and_the_same_every_time(form: Form):
    content = plot_file([LINES], "name", form, title=HOSTILE)
    assert content.startswith({"svg": b"<svg ", "png": b"\x89PNG", "pdf": b"%PDF"}[form])
    assert content == plot_file([LINES], "name", form, title=HOSTILE)


def test_a_themed_plot_takes_the_colors_of_the_page():
    assert "var(--ink, #1f2933)" in draw([LINES], "lines", is_themed=True)
    assert "var(" not in draw([LINES], "lines")
