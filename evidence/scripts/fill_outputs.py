"""Fill the console blocks of README.md and other pages with what their commands print (``make outputs``).

A block keeps its trim: each stretch between lines ``...`` is replaced by the printed lines from the one most
like its first line to the one most like its last. Blocks with a command that measures or trains, or that asks
for what the reader has to make, are left alone. A fenced file after "Save this as `NAME`" is made first.

    python -m evidence.scripts.fill_outputs                fill every page
    python -m evidence.scripts.fill_outputs PAGE ...       fill these pages
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from pathlib import Path

from evidence.scripts.fill_tables import pages

VERBS = set("predict explain import plan trace mfu gpus models communication ultrascale".split())
BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"Save this as `([\w./-]+)`:\n\n```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBERS = re.compile(r"[\d,.]+|[▀-▟]+|[KMG]iB|\s+")
LIKENESS = 0.5  # Below it a line is not the one that was shown.

Run = Callable[[str, Path], str]


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a block, its continued lines joined, with the lines shown under it."""
    command, shown = "", list[str]()
    for line in block.splitlines():
        if line.startswith("$ ") or command.endswith("\\"):
            if line.startswith("$ ") and command:
                yield command, shown
                command, shown = "", []
            command += line.removeprefix("$ ") if not command else f"\n{line}"
        else:
            shown.append(line)
    yield command, shown


def is_repeatable(command: str) -> bool:
    """Return whether a command's output depends on nothing but the code."""
    words = shlex.split(command)
    if not words:
        return False
    makes_file = words[0] == "printf" and ">" in words
    return makes_file or (words[0] == "trainfit" and words[1] in VERBS and "--record" not in words)


def refreshed(shown: list[str], printed: list[str]) -> list[str]:
    """Return ``printed``, trimmed as ``shown`` is.

    Raises:
        ValueError: no printed line is like one that bounds a shown stretch.
    """
    if not shown:
        return []
    made, at = list[str](), 0
    stretches = _stretches(shown)
    for number, stretch in enumerate(stretches):
        if number:
            made.append("...")
        if not stretch:
            continue
        begin = at if number == 0 else at + _nearest(stretch[0], printed[at:], 0)
        end = len(printed)
        if number < len(stretches) - 1:
            end = begin + _nearest(stretch[-1], printed[begin:], len(stretch) - 1) + 1
        made += printed[begin:end]
        at = end
    return made


def _stretches(shown: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in shown:
        if line == "...":
            found.append([])
        else:
            found[-1].append(line)
    return found


def _nearest(line: str, printed: list[str], expected: int) -> int:
    """Return the index of the printed line most like ``line``; of equal ones the nearest to ``expected``."""

    def likeness(index: int) -> tuple[float, int]:
        one, other = (NUMBERS.sub(" ", text).strip() for text in (line, printed[index]))
        return round(SequenceMatcher(None, one, other, autojunk=False).ratio(), 2), -abs(index - expected)

    best = max(range(len(printed)), key=likeness, default=None)
    if best is None or likeness(best)[0] < LIKENESS:
        raise ValueError(f"no printed line is like {line!r}; trim the block anew")
    return best


def fill(text: str, run: Run) -> str:
    """Return a page's text with the output of every repeatable block made anew by ``run``."""

    def block(match: re.Match[str]) -> str:
        found = list(commands(match[1]))
        if not all(is_repeatable(command) for command, _ in found):
            return match[0]
        lines = list[str]()
        for command, shown in found:
            printed = [line.rstrip() for line in run(command, folder).strip("\n").splitlines()]
            lines += [f"$ {command}", *refreshed([line.rstrip() for line in shown], printed)]
        return "\n".join(["```console", *lines, "```"])

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, content in FILE.findall(text):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content, "utf-8")
        return BLOCK.sub(block, text)


def shell(command: str, folder: Path) -> str:
    """Run a command line 80 columns wide and return what it prints."""
    # "trainfit ... --check" ends with 1 where a recipe does not fit.
    done = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip
    if done.returncode not in (0, 1):
        sys.exit(f"{command}\n{done.stderr}")
    return done.stdout


def main(arguments: list[str] | None = None) -> None:
    """Fill the pages that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    for page in parser.parse_args(arguments).pages or pages():
        before = page.read_text("utf-8")
        after = fill(before, shell)
        if after != before:
            print(f"filled: {page}")
            page.write_text(after, "utf-8")


if __name__ == "__main__":
    main()
