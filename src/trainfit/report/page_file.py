"""A generated page and its files. Enters: what makes the page of two folders. Leaves: the Markdown file, plots beside it."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.printable import say


@dataclass(frozen=True)
class Page:
    """The Markdown, and the plots it shows: file name to SVG."""

    text: str
    plots: dict[str, str]


def read_and_write(
    parser: argparse.ArgumentParser, make_page: Callable[[Path, Path], Page], arguments: list[str] | None
) -> int:
    """The command of a page that is made of the folders of recipes and results; exit code 0, or 65 for bad input."""
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="of trainfit sweep --out results/NAME"
    )
    parser.add_argument("--recipes", type=Path, default=Path("recipes"))
    parser.add_argument("--into", type=Path, help="Markdown page to write, with plots/ beside it")
    options = parser.parse_args(arguments)
    try:
        page = make_page(options.recipes, options.results)
    except (InputError, FileNotFoundError) as error:
        say(f"trainfit: {error}", err=True)
        return EXIT_BAD_INPUT
    if options.into is None:
        say(page.text)
    else:
        write_page(page, options.into)
    return 0


def write_page(page: Page, into: Path) -> None:
    """The page, and its plots in ``plots/`` beside it."""
    folder = into.parent / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    into.write_text(page.text, encoding="utf-8")
    for name, svg in page.plots.items():
        (folder / name).write_text(svg, encoding="utf-8")


def on_white(svg: str) -> str:
    """The plot on white paper, because a page may be dark and its lines are not."""
    return svg.replace("<svg ", '<svg style="background: #fff" ', 1)
