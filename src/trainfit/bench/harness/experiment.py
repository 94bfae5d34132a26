"""Declaration of an experiment: how it runs, its tables' columns and its plots. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainfit.spec.bench import BenchRow, Cell

if TYPE_CHECKING:
    from trainfit.bench.harness.bench import Bench

MEDIAN = "median_s"  # The median of a row's samples, where a number's name is expected
Number = str | Callable[[BenchRow], float | None]
"""The name of a row's number, or a function that computes one from the row."""


@dataclass(frozen=True)
class Column:
    """One column of an experiment's tables.

    Attributes:
        value: key of a row's point or name of one of its numbers. The name's ending (``_s``, ``_bytes``,
            ``_share``) is the unit by which cells are formatted.
    """

    value: str
    title: str = ""  # Heading; empty: the name without its unit
    format: str = ""  # Format specification that replaces the unit's
    note: str = ""  # Meaning of the column, printed below the tables
    deviation: str = ""  # Name of the standard deviation that is printed with the value


@dataclass(frozen=True)
class Plot:
    """One plot: ``y`` over ``x``, a line or a group of bars for each value of ``series``.

    Attributes:
        y: number on the vertical axis; several names are stacked in one bar; ``curve``: the row's
            curve, stacked by category; ``timeline``: the row's curve of computation and communication.
        where: values allowed for each key; rows of other points are left out.
        order: values of keys in the order in which they are drawn; others follow, numbers by size.
    """

    x: tuple[str, ...]  # Keys of the point; several are joined to one name
    y: Number | tuple[str, ...]
    title: str
    series: str = ""  # Key with a line for each value
    panels: tuple[str, ...] = ()  # Keys with a panel for each combination of values
    where: Mapping[str, tuple[Cell, ...]] = field(default_factory=dict)
    bound: Number = ""  # Number drawn as a tick at each bar
    bound_label: str = ""
    names: Mapping[Cell, str] = field(default_factory=dict)  # Labels of values of series, panels and x
    order: Mapping[str, tuple[Cell, ...]] = field(default_factory=dict)
    x_label: str = ""
    y_label: str = ""
    scale: float = 1.0  # Factor of y, for another unit
    text: str = ""  # Format of the value written at each bar
    x_log: bool = False
    y_log: bool = False
    is_bar: bool = False
    is_horizontal: bool = False  # Bars lie, which suits long names


@dataclass(frozen=True)
class Experiment:
    """One benchmark of ``trainfit bench``, the value ``EXPERIMENT`` of a file.

    Attributes:
        columns: columns in the order of the tables. Keys of points need one only for a title or a note.
    """

    title: str  # Subject, for trainfit bench --list
    question: str  # What the experiment answers, in one sentence
    run: Callable[[Bench], Iterator[BenchRow]]  # Yields a row for each point
    limit_s: float  # Default time limit in full form, in seconds
    columns: tuple[Column, ...] = ()
    plots: tuple[Plot, ...] = ()  # Plots drawn into one figure
    on_host: bool = False  # All work is the CPU's, whatever device is chosen
    files: str = ""  # Which files it writes in addition to its rows; empty: none
