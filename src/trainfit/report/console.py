"""How results look to people: a console, aligned rows, bars. Widths follow the terminal (80 columns where none is known)."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainfit.spec.files import writing
from trainfit.spec.printable import STANDARD_OUTPUT
from trainfit.spec.terminal import Terminal

EIGHTHS = " ▏▎▍▌▋▊▉"


def console() -> Console:
    """Standard output; text is only text: no colours guessed at, and no styles read out of a name or an error's [...]."""
    return Terminal()


@contextmanager
def progress(text: str) -> Iterator[None]:
    """While entered, ``text`` and the seconds that it has taken, in a line of standard error that goes when it is done.

    Only on a terminal: elsewhere nothing is printed.
    """
    errors = Terminal(stderr=True)
    if not errors.is_terminal:
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, redirect_stdout=False) as shown:
        shown.add_task(text, total=None)
        yield


def bar(share: float, width: int, *, blocks: bool = True) -> str:
    """A bar of ``share`` (0 to 1, clipped) of ``width`` characters; ``blocks`` False draws with ``#``."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    if not blocks:
        return "#" * round(eighths / 8)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def can_draw(out: Console) -> bool:
    """Whether the output's encoding has block characters."""
    return (out.encoding or "").lower().replace("-", "").startswith("utf")


def grid(*justify: str) -> Table:
    """An unframed table with two spaces between columns and two before the first; ``justify`` a column: left or right."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=0)
    for one in justify:
        table.add_column(
            justify="right" if one == "right" else "left", no_wrap=one != "wrap", overflow="fold"
        )
    return table


def rows(out: Console, lines: Iterable[Sequence[str | Text]], *justify: str) -> None:
    """Print aligned rows."""
    table = grid(*justify)
    for line in lines:
        table.add_row("", *line)
    with writing(STANDARD_OUTPUT):
        with out.capture() as drawn:
            out.print(table)
        # A table pads its last column; what is pasted into a text should not.
        out.file.write("".join(line.rstrip() + "\n" for line in drawn.get().splitlines()))
        out.file.flush()


def broken(text: str, width: int) -> str:
    """Dotted names on lines of at most ``width`` characters, broken at spaces and before dots where that is possible."""
    lines = [""]
    for part in re.split(r"(?=[. ])", text):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part if lines[-1] else part.lstrip(" ")
    return "\n".join(lines)


def heading(out: Console, text: str) -> None:
    """A blank line and a bold title."""
    out.print()
    out.print(Text(text, style="bold"))


def notes(out: Console, title: str, items: Sequence[str]) -> None:
    """A title and one bullet an item, each wrapped under itself; nothing where there are none."""
    if not items:
        return
    heading(out, title)
    rows(out, [["-", item] for item in items], "left", "wrap")
