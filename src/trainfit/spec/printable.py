"""Text for a terminal, with control characters escaped, which could recolour, overwrite or hide output.

``say`` prints plain lines; ``trainfit.spec.terminal.Terminal`` is the console for tables and progress bars.
"""

import sys
import unicodedata

from trainfit.spec.files import writing

PROGRESS_THREAD = "progress"
"""Name of the thread that writes lines of progress (``report.console``)."""
STANDARD_OUTPUT, STANDARD_ERROR = "standard output", "standard error"
CONTROL_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's control and format characters, lone surrogates, line and paragraph separators (UAX #44)."""
JOINERS = "\u200c\u200d"
"""Format characters that Persian, Indic scripts and emoji are written with; they move and hide nothing."""


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return ``text`` with every control character escaped, such as ``\x1b`` and ``\u202e``.

    Args:
        lines: keep line feeds and tabs, for text of several lines.
    """
    if text.isascii() and text.isprintable():
        return text
    kept = JOINERS + ("\n\t" if lines else "")
    return "".join(letter if letter in kept else _escaped(letter) for letter in text)


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print lines on standard output or, with ``err``, on standard error, control characters escaped."""
    with writing(STANDARD_ERROR if err else STANDARD_OUTPUT):
        print(printable(text, lines=True), file=sys.stderr if err else sys.stdout, end=end, flush=True)


def _escaped(letter: str) -> str:
    if unicodedata.category(letter) not in CONTROL_CATEGORIES:
        return letter
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
