"""Draw the memory of a step by category: as a plot, or as an HTML page that names what is alive. No torch.

The page needs nothing else: its drawing, style and script are in it.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainfit.report.html import render
from trainfit.report.plot import CATEGORY_COLORS, INK, WRONG, Panel, Series, check_plot_file, plot_file
from trainfit.spec.explanation import MemoryCourse
from trainfit.spec.files import write_bytes, write_text
from trainfit.spec.printable import printable
from trainfit.spec.result import CATEGORIES
from trainfit.spec.units import format_bytes, format_seconds, size_unit

NUM_MOMENTS = 600
LEAST_OF_CAPACITY = 0.4
"""Share of the capacity from which its line is drawn: below it the memory would be flat."""


class Box(NamedTuple):
    """Pixels of a drawing, and of its margins."""

    width: float
    height: float
    left: float = 64.0
    top: float = 26.0
    bottom: float = 34.0


LETTER = 6.5  # Width of a letter of a phase's name
PAGE = Box(1100.0, 460.0)


def write_plot(course: MemoryCourse, path: Path, title: str) -> None:
    """Write the plot in the format of the file's name.

    Raises:
        InputError: another format, or matplotlib is not installed; a page needs neither.
        OSError: the file cannot be written.
    """
    if path.suffix == ".html":
        write_text(path, page(course, title))
        return
    form = check_plot_file(path)
    content = plot_file([panel(course)], "memory", form, title=title, size=(9.2, 4.6))
    write_bytes(path, content)


def has_capacity_line(course: MemoryCourse) -> bool:
    """Return whether the capacity is drawn."""
    peak = course.peak.alive.total
    return course.capacity_bytes is not None and peak >= LEAST_OF_CAPACITY * course.capacity_bytes


def panel(course: MemoryCourse) -> Panel:
    """Return the stacked areas, the peak and the capacity."""
    unit, size = size_unit([course.peak.alive.total])
    scale = 1e3 if course.is_timed else 1.0
    x = [at * scale for at in _stair_ends(course)]
    series = [
        Series(name, [at / size for at in _stairs(course, name)], x, kind="area",
               color=CATEGORY_COLORS[name])
        for name in _used(course)
    ]  # fmt: skip
    peak = course.peak
    label = f"peak {format_bytes(peak.alive.total + course.unsplit_bytes)}, {peak.phase}"
    series.append(Series("", [peak.alive.total / size], [peak.at * scale], kind="scatter", color=INK,
                         marker="v", text=[label]))  # fmt: skip
    if has_capacity_line(course):
        capacity = (course.capacity_bytes or 0) / size
        series.append(Series("the allocator's limit on the GPU", [capacity, capacity], [x[0], x[-1]],
                             color=WRONG, marker="None", is_hollow=True))  # fmt: skip
    return Panel(
        series=series,
        x_label="predicted time, ms" if course.is_timed else "allocations and frees",
        y_label=f"allocated, {unit}",
        y_limits=(0, None),
        x_limits=(x[0], max(x[-1], course.phases[-1].end * scale)),
        events={one.begin * scale: one.name for one in course.phases if one.end > one.begin},
    )


def _stairs(course: MemoryCourse, name: str) -> list[int]:
    """Return a category's bytes at both ends of each stretch: a moment holds until the next one."""
    return [getattr(one.alive, name) for one in course.moments for _ in range(2)]


def _stair_ends(course: MemoryCourse) -> list[float]:
    """Return both ends of each moment's stretch, the last of which ends with the step."""
    at = [one.at for one in course.moments]
    end = max([at[-1], *(one.end for one in course.phases)])
    return [place for stretch in zip(at, [*at[1:], end], strict=True) for place in stretch]


def _used(course: MemoryCourse) -> list[str]:
    return [name for name in CATEGORIES if any(getattr(one.alive, name) for one in course.moments)]


class Area(NamedTuple):
    """A category's area: its name, color and outline."""

    name: str
    color: str
    path: str


class _Scales:
    """Pixels of a moment and of bytes."""

    def __init__(self, course: MemoryCourse, box: Box):
        self.box = box
        self.begin = course.moments[0].at
        self.end = max(_stair_ends(course)[-1], self.begin + 1e-12)
        highest = course.peak.alive.total
        if has_capacity_line(course):
            highest = max(highest, course.capacity_bytes or 0)
        self.highest = max(1.0, highest * 1.06)

    def x(self, at: float) -> float:
        return self.box.left + (at - self.begin) / (self.end - self.begin) * (self.box.width - self.box.left)

    def y(self, num_bytes: float) -> float:
        height = self.box.height - self.box.top - self.box.bottom
        return self.box.top + (1 - num_bytes / self.highest) * height

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the height and the text of round sizes."""
        unit, size = size_unit([self.highest])
        step = 2.0**-6
        while self.highest / size / step > 6:
            step *= 2
        for number in range(int(self.highest / size / step) + 1):
            yield self.y(number * step * size), f"{number * step:g} {unit}"


def drawing(course: MemoryCourse, box: Box) -> dict[str, Any]:
    """Return what ``templates/course.j2`` draws: areas, axes, phases, the limit and the peak."""
    scales = _Scales(course, box)
    peak = course.peak
    capacity = course.capacity_bytes if has_capacity_line(course) else None
    return {
        "box": box,
        "areas": _areas(course, scales),
        "ticks": list(scales.ticks()),
        "phases": list(_labels(course, scales)),
        "peak": (scales.x(peak.at), scales.y(peak.alive.total)),
        "capacity": None if capacity is None else (scales.y(capacity), format_bytes(capacity)),
        "begins": f"{'predicted time' if course.is_timed else 'allocations and frees'}: 0",
        "ends": _place(course, scales.end),
    }  # fmt: skip


def _labels(course: MemoryCourse, scales: _Scales) -> Iterator[tuple[float, str]]:
    """Yield where each phase begins, and its name if there is room for it."""
    for one in course.phases:
        begin, width = scales.x(one.begin), scales.x(one.end) - scales.x(one.begin)
        is_last = one is course.phases[-1]
        if width > 1:
            yield begin, one.name if is_last or width > LETTER * len(one.name) else ""


def _place(course: MemoryCourse, at: float) -> str:
    return format_seconds(at) if course.is_timed else f"{at:,.0f}"


def in_words(course: MemoryCourse) -> str:
    """Return a sentence with the peak and the allocator's limit."""
    size, peak = course.peak.alive.total + course.unsplit_bytes, course.peak
    limit = course.capacity_bytes
    more = f" The allocator's limit on the GPU is {format_bytes(limit)}." if limit else ""
    return f"Peak {format_bytes(size)} in the {peak.phase}.{more}"


def page(course: MemoryCourse, title: str) -> str:
    """Return the page."""
    from markupsafe import Markup

    scales = _Scales(course, PAGE)
    peak = course.peak
    moments = [
        {
            "x": round(scales.x(one.at), 1),
            "at": format_seconds(one.at) if course.is_timed else f"{one.at:,.0f} allocations and frees",
            "phase": one.phase,
            "total": format_bytes(one.alive.total),
            "alive": [[name, format_bytes(getattr(one.alive, name))] for name in _used(course)[::-1]
                      if getattr(one.alive, name)],
            "largest": [[printable(name), format_bytes(size)] for name, size in one.largest],
        }
        for one in course.moments
    ]  # fmt: skip
    # JSON inside a script element: nothing in it may end the element.
    data = Markup(json.dumps(moments).replace("<", "\\u003c"))
    first = moments[course.moments.index(peak)]
    drawn = drawing(course, PAGE)
    return render("memory.html", title=title, lead=in_words(course), data=data, first=first, **drawn)


def _areas(course: MemoryCourse, scales: _Scales) -> list[Area]:
    """Return the stacked areas, the lowest first."""
    xs = [round(scales.x(at), 1) for at in _stair_ends(course)]
    below = [0] * len(xs)
    found: list[Area] = []
    for name in _used(course):
        above = [at + size for at, size in zip(below, _stairs(course, name), strict=True)]
        up, down = ([(x, round(scales.y(size), 1)) for x, size in zip(xs, sizes, strict=True)]
                    for sizes in (above, below))  # fmt: skip
        found.append(Area(name, CATEGORY_COLORS[name], _outline([*up, *down[::-1]])))
        below = above
    return found


def _outline(points: Sequence[tuple[float, float]]) -> str:
    """Return the closed path through points, of which each is beside, above or below the one before."""
    corners = [points[0]]
    for before, point, after in zip(points[:-1], points[1:], [*points[2:], points[0]], strict=True):
        if not (before[0] == point[0] == after[0] or before[1] == point[1] == after[1]):
            corners.append(point)
    path = [f"M{corners[0][0]:g},{corners[0][1]:g}"]
    for before, point in itertools.pairwise(corners):
        along = "H" if before[1] == point[1] else "V" if before[0] == point[0] else "L"
        path.append(f"{along}{point[0]:g}" if along == "H" else f"{along}{point[1]:g}" if along == "V"
                    else f"L{point[0]:g},{point[1]:g}")  # fmt: skip
    return f"{''.join(path)}Z"
