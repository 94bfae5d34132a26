"""Console, aligned rows, bars and bullets. Widths follow the terminal, or are 80 columns without one."""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from trainfit.report.table import layout
from trainfit.spec.files import writing
from trainfit.spec.printable import PROGRESS_THREAD, STANDARD_OUTPUT, printable
from trainfit.spec.terminal import Terminal

FIRST_LINE_S, NEXT_LINE_S = 0.3, 5.0
"""Seconds after which progress is written where there is no terminal, and between its lines."""

console = Terminal  # On standard output; it reads no styles out of text.


@contextmanager
def progress(text: str, *, live: bool = True) -> Iterator[Callable[[str], None]]:
    """Show ``text`` and the seconds passed on standard error: live on a terminal, else a line now and then.

    Args:
        live: False: lines on a terminal too, as other output, such as a script's, stands between them.

    Yields:
        a function that replaces the text.
    """
    errors = Terminal(stderr=True)
    if not errors.is_terminal or not live:
        lines = _Lines(text)
        try:
            yield lines.replace
        finally:
            lines.end()
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, redirect_stdout=False) as shown:
        task = shown.add_task(text, total=None)
        yield lambda text: shown.update(task, description=text)


class _Lines:
    """Lines of progress where standard error is no terminal: the first within a second, then every few.

    The thread holds no lock that a fork of the process could inherit: it waits, and writes to the descriptor.
    """

    def __init__(self, text: str):
        self._text, self._done = text, threading.Event()
        try:
            self._descriptor = sys.stderr.fileno()
        except (OSError, ValueError):  # Replaced by an object in memory: nobody watches it.
            return
        threading.Thread(target=self._run, name=PROGRESS_THREAD, daemon=True).start()

    def _run(self) -> None:
        since_s, wait_s = time.monotonic(), FIRST_LINE_S
        while not self._done.wait(wait_s):
            wait_s = NEXT_LINE_S
            line = f"{printable(self._text)} ({time.monotonic() - since_s:.0f} s)\n"
            try:
                os.write(self._descriptor, line.encode(errors="replace"))
            except OSError:  # Closed or full: progress is not worth an error.
                return

    def replace(self, text: str) -> None:
        self._text = text

    def end(self) -> None:
        self._done.set()


def bar(share: float, width: int, *, blocks: bool = True) -> str:
    """Return a bar of ``share`` (0 to 1, clipped) of ``width`` characters; without ``blocks``, of ``#``."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    if not blocks:
        return "#" * round(eighths / 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]).rstrip()


def can_draw(out: Console) -> bool:
    """Return whether the output's encoding has block characters."""
    return (out.encoding or "").lower().replace("-", "").startswith("utf")


def rows(out: Console, lines: Iterable[Sequence[str | Text]], *justify: str, min_width: int = 0) -> None:
    """Print aligned rows, indented.

    Args:
        justify: left, right or wrap, of each column.
        min_width: least characters of a line, also on a narrower terminal.
    """
    table = layout((("", *line) for line in lines), ("left", *justify))
    table.width = min_width if min_width > out.width else None
    with writing(STANDARD_OUTPUT):
        with out.capture() as drawn:
            out.print(table, crop=False)
        # A table pads its last column; what is pasted into a text should not.
        out.file.write("".join(line.rstrip() + "\n" for line in drawn.get().splitlines()))
        out.file.flush()


def broken(text: str, width: int, at: str = r"(?=[. ])") -> str:
    """Return text on lines of at most ``width`` characters, broken where the pattern ``at`` matches."""
    lines = [""]
    for part in re.split(at, text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part if lines[-1] else part.lstrip(" ")
    return "\n".join(line.rstrip() for line in lines)


def heading(out: Console, text: str) -> None:
    """Print a blank line and a bold title."""
    out.print()
    out.print(Text(text, style="bold"))


def notes(out: Console, title: str, items: Sequence[str]) -> None:
    """Print a title and one bullet an item; nothing where there are none."""
    if items:
        heading(out, title)
        rows(out, [["-", item] for item in items], "left", "wrap")
