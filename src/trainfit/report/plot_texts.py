"""Place the texts of a plot's points so that they cross nothing: no point, line, other text or edge."""

from collections.abc import Sequence
from typing import Any

TEXT_OFFSETS = tuple(
    (x * far, y * far, align)
    for far in (1, 2, 3.5, 6)
    for x, y, align in (
        (6, 8, "left"), (-6, 8, "right"), (6, -9, "left"), (-6, -9, "right"), (9, 0, "left"),
        (-9, 0, "right"),
    )
)  # fmt: skip
"""Where a point's text may be, the nearest first: points to the right, points up, alignment."""
LEADER_FROM = 13  # Points from which a line leads from a text to its point
PADDING = 2  # Pixels around a text
DOT = 4.5  # Half the size of a point's marker, in points
MUTED = "#66727f"


def place_texts(
    axes: Any, texts: Sequence[tuple[Any, str]], dots: Sequence[Any], lines: Sequence[Sequence[Any]]
) -> None:
    """Write each text near its point, the first ones first; one that would cross something is left out.

    Args:
        axes: of matplotlib, laid out.
        texts: point and text; points and lines are in data units.
        dots: points that are drawn.
        lines: points of each line that is drawn.
    """
    import numpy as np
    from matplotlib.path import Path
    from matplotlib.transforms import Bbox

    to_pixels = axes.transData.transform
    half = DOT * axes.figure.dpi / 72
    taken = [Bbox.from_bounds(x - half, y - half, 2 * half, 2 * half) for x, y in map(to_pixels, dots)]
    paths = [Path(to_pixels(line)) for line in lines if len(line) > 1]
    inside = axes.get_window_extent()

    def is_free(box: Any, point: Any, is_far: bool) -> bool:
        if not (inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0 and box.y1 < inside.y1):
            return False
        if any(path.intersects_bbox(box, filled=False) for path in paths):
            return False
        if any(box.overlaps(other) for other in taken):
            return False
        return not is_far or is_clear(point, box)

    def is_clear(point: Any, box: Any) -> bool:
        """Return whether the leader from the point to its text crosses nothing."""
        start, end = to_pixels(point), np.array([(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2])
        start = start + (end - start) * half * 2 / max(1.0, np.hypot(*(end - start)))
        leader = Path([start, end])
        return not any(leader.intersects_path(path, filled=False) for path in paths) and not any(
            leader.intersects_bbox(other, filled=True) for other in taken
        )

    for point, text in texts:
        for x, y, align in TEXT_OFFSETS:
            is_far = max(abs(x), abs(y)) > LEADER_FROM
            leader = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.5, "shrinkB": DOT} if is_far else None
            drawn = axes.annotate(
                text, point, fontsize=7.5, xytext=(x, y), textcoords="offset points", ha=align, va="center",
                arrowprops=leader,
            )  # fmt: skip
            box = _box(drawn).padded(PADDING)
            if is_free(box, point, is_far):
                taken.append(box)
                break
            drawn.remove()


def _box(drawn: Any) -> Any:
    """Return the pixels of the text alone, without its leader."""
    from matplotlib.text import Text

    drawn.update_positions(drawn.figure.canvas.get_renderer())
    return Text.get_window_extent(drawn)
