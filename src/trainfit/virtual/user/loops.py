"""Loops of user code that end on a value of the device, which the virtual GPU does not compute.

Such a value reads as zero, so the loop may never end. It is named after ``MOST_FORWARDS`` forwards without a
backward or an update. A loop over batches ends whatever is read.
"""

import ast
import linecache
import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from trainfit.spec.errors import InputError

MOST_FORWARDS = 1000
BOUNDED = ("transformers.generation",)
"""Packages whose loops end at a length as well (``max_new_tokens``)."""
OWN = ("torch.", "trainfit.")


class LoopWatch:
    """Counts forwards since the last backward or update."""

    def __init__(self) -> None:
        self._num_forwards = 0

    def forward(self) -> None:
        """Count a call of an outermost module."""
        self._num_forwards += 1

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
        frame = sys._getframe(1)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.startswith(BOUNDED):
                return
            file, line = frame.f_code.co_filename, frame.f_lineno
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


@cache
def _tests(file: str) -> tuple[Lines, ...]:
    """Return the lines of the conditions that end ``while`` loops of a file: theirs, and those of breaks."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(
        Lines(test.lineno, test.end_lineno or test.lineno)
        for loop in ast.walk(tree)
        if isinstance(loop, ast.While)
        for test in _ends(loop)
    )


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
