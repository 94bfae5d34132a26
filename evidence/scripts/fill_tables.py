"""Fill the marked tables and figures of the documentation from the records in ``evidence/records/``.

A page is written by hand. Where it shows figures from records, it holds a marker, and this program writes
what is between the marker and the next ``<!-- end -->``::

    <!-- table: accuracy.largest of=device -->
    <!-- end -->

    <!-- figure: accuracy.errors_plot plots/accuracy-errors.svg "Sizes of the errors" -->
    <!-- end -->

``accuracy.largest`` is the function ``largest`` of ``evidence/scripts/tables/accuracy.py``; options are
passed as keyword arguments of type str. A table function returns Markdown, a figure function returns an SVG
document, which is written to the path given (relative to the page).

    python -m evidence.scripts.fill_tables             fill README.md and all of docs/ and evidence/
    python -m evidence.scripts.fill_tables PAGE ...    fill these pages
    python -m evidence.scripts.fill_tables --check     write nothing; name what would change, exit 1
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKED = re.compile(
    r"(?P<open><!-- (?P<kind>table|figure): (?P<name>[\w.]+)(?P<rest>[^\n]*?) -->\n)"
    r"(?P<body>.*?)(?P<close><!-- end -->)",
    re.DOTALL,
)


@dataclass
class Filled:
    """A page's new text and the images it shows, by path."""

    text: str
    images: dict[Path, str] = field(default_factory=dict)

    def changes(self, page: Path) -> list[Path]:
        """Return the files whose content differs from this."""
        files = {page: self.text, **self.images}
        return [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]

    def write(self, page: Path) -> None:
        for path, text in {**self.images, page: self.text}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")


def fill(page: Path) -> Filled:
    """Return ``page`` with every marked table and figure computed anew.

    Raises:
        SystemExit: a marker is not closed, names no function, or has options that the function does not take.
    """
    text = page.read_text("utf-8")
    if len(re.findall(r"^<!-- (?:table|figure): ", text, re.M)) != len(MARKED.findall(text)):
        sys.exit(f"{page}: a marker without <!-- end -->")
    filled = Filled("")

    def content(match: re.Match[str]) -> str:
        function = _function(page, match["name"])
        try:
            words = shlex.split(match["rest"])
            options = dict(word.split("=", 1) for word in words if "=" in word)
            inspect.signature(function).bind(**options)
            if match["kind"] == "figure":
                target, caption = (word for word in words if "=" not in word)
        except (TypeError, ValueError) as error:
            sys.exit(f"{page}: {match['name']}{match['rest']}: {error}")
        made = function(**options)
        if match["kind"] == "figure":
            filled.images[page.parent / target] = made
            made = f"![{caption}]({target})"
        return f"{match['open']}\n{made.strip()}\n\n{match['close']}"

    filled.text = MARKED.sub(content, text)
    return filled


def pages() -> list[Path]:
    """Return every page that a reader may open: README.md and those of docs/ and evidence/."""
    folders = (ROOT / "docs", ROOT / "evidence")
    return [ROOT / "README.md", *(page for folder in folders for page in sorted(folder.rglob("*.md")))]


def _function(page: Path, name: str) -> Callable[..., str]:
    module, _, function = name.rpartition(".")
    try:
        return getattr(importlib.import_module(f"evidence.scripts.tables.{module}"), function)
    except (ImportError, AttributeError) as error:
        sys.exit(f"{page}: {name}: {error}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page would change")
    options = parser.parse_args(arguments)
    stale = False
    for page in options.pages or pages():
        filled = fill(page)
        for path in filled.changes(page):
            stale = True
            print(f"{'stale' if options.check else 'filled'}: {path}")
        if not options.check:
            filled.write(page)
    return int(options.check and stale)


if __name__ == "__main__":
    sys.exit(main())
