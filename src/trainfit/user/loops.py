"""Loops of user code that end on a value of the device, which the virtual GPU does not compute.

Such a value reads as zero, so the loop may never end. It is named after ``MOST_FORWARDS`` forwards without a
backward or an update. A ``for`` loop ends whatever is read: if the forwards run in one, such as an
evaluation's over its batches, the loops around it are not named.
"""

import ast
import linecache
import sys
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import NamedTuple

from trainfit.spec.errors import InputError

MOST_FORWARDS = 1000
MOST_PASSES = 20
"""Factor of ``MOST_FORWARDS`` where a ``for`` loop runs the forwards."""
BOUNDED = ("transformers.generation",)
"""Packages whose loops also end at a length (``max_new_tokens``)."""
OWN = ("torch.", "trainfit.")


class LoopWatch:
    """Counts forwards since the last backward or update."""

    def __init__(self) -> None:
        self._num_forwards = 0
        self._bounded: set[tuple[int, str, Lines]] = set()
        """``for`` loops around the last forward: their frame's ``id``, file and lines."""

    def forward(self) -> None:
        """Count a call of an outermost module."""
        self._num_forwards += 1
        if self._num_forwards >= MOST_FORWARDS:
            self._bounded = set(_for_loops(sys._getframe(1)))

    def trained(self) -> None:
        """Forget the forwards: a backward or an update began."""
        self._num_forwards = 0

    def read(self) -> None:
        """Check the loops around the running code, which reads a value that is not known.

        Raises:
            InputError: a ``while`` loop that this value decides has run too many forwards.
        """
        if self._num_forwards < MOST_FORWARDS:
            return
        is_at_most = self._num_forwards >= MOST_FORWARDS * MOST_PASSES
        frame = sys._getframe(1)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.startswith(BOUNDED):
                return
            file, line = frame.f_code.co_filename, frame.f_lineno
            if not is_at_most and not module.startswith(OWN) and _for_loop(frame) in self._bounded:
                return
            if not module.startswith(OWN) and any(line in test for test in _tests(file)):
                raise InputError(
                    f"{file}:{line}: this loop ends on a value of the device, which is not computed and "
                    f"reads zero: it did not end in {self._num_forwards} forwards",
                    "bound it by a number of iterations too",
                    field="step",
                )
            frame = frame.f_back


class Lines(NamedTuple):
    """First and last line of a condition."""

    first: int
    last: int

    def __contains__(self, line: object) -> bool:
        return isinstance(line, int) and self.first <= line <= self.last


def _for_loops(frame: FrameType | None) -> Iterator[tuple[int, str, Lines]]:
    """Yield the ``for`` loops that a frame and its callers run."""
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(OWN) and (found := _for_loop(frame)):
            yield found
        frame = frame.f_back


def _for_loop(frame: FrameType) -> tuple[int, str, Lines] | None:
    """Return the ``for`` loop whose body a frame runs, if no ``while`` loop of the frame is nearer."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    around = [
        (lines, is_for)
        for lines, is_for in _bodies(file)
        if line in lines and frame.f_code.co_firstlineno < lines.first
    ]
    lines, is_for = max(around, default=(None, False))
    return (id(frame), file, lines) if lines is not None and is_for else None


@cache
def _parsed(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def _bodies(file: str) -> tuple[tuple[Lines, bool], ...]:
    """Return the lines of a file's loops, of a ``for`` loop without its iterable, and whether each is one."""
    return tuple(
        (_lines(loop.body[0], loop.body[-1]) if is_for else _lines(loop, loop), is_for)
        for loop in ast.walk(_parsed(file))
        if (is_for := isinstance(loop, ast.For)) or isinstance(loop, ast.While)
    )


@cache
def _tests(file: str) -> tuple[Lines, ...]:
    """Return the lines of the conditions that end a file's ``while`` loops: their own, or of breaks."""
    return tuple(
        _lines(test, test)
        for loop in ast.walk(_parsed(file))
        if isinstance(loop, ast.While)
        for test in _ends(loop)
    )


def _lines(first: ast.stmt | ast.expr, last: ast.stmt | ast.expr) -> Lines:
    return Lines(first.lineno, last.end_lineno or last.lineno)


def _ends(loop: ast.While) -> Iterator[ast.expr]:
    yield loop.test
    inside: list[ast.AST] = list(loop.body)
    while inside:
        node = inside.pop()
        if isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and any(
            isinstance(each, ast.Break | ast.Return) for each in ast.walk(node)
        ):
            yield node.test
        inside += ast.iter_child_nodes(node)
