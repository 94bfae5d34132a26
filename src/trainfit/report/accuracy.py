"""The accuracy page: every prediction held against its measurement.

``python -m trainfit.report.accuracy results/*.jsonl [--into docs/results/accuracy.md] [--causes results/causes.toml] [--json]``

Enters: files of Records. Leaves: a summary on standard output; with ``--into`` the Markdown page and its plots in
``plots/`` beside it. The same records give the same bytes: nothing on the page comes from the clock, the machine or
the order of the files.
"""

import argparse
import json
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

from trainfit.records import load
from trainfit.report.accuracy_page import page, text
from trainfit.report.accuracy_plots import plots_of
from trainfit.report.accuracy_summary import judge
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.printable import say


def read_causes(path: Path) -> dict[str, str]:
    """The table ``[causes]`` of a TOML file: recipe id to what was found to be the cause.

    Raises:
        InputError: not TOML, or not text by recipe id.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("causes", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not TOML: {error}", "correct it", file=str(path)) from None
    for recipe_id, cause in table.items():
        if not isinstance(cause, str):
            raise InputError("a cause is text", "quote it", field=recipe_id, value=cause, file=str(path))
    return table


def main(arguments: list[str] | None = None) -> int:
    """Print the summary, write the page; exit code 0, or 65 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m trainfit.report.accuracy", description="Hold predictions against measurements."
    )
    parser.add_argument("files", type=Path, nargs="+", help="records: JSON Lines or SQLite")
    parser.add_argument("--into", type=Path, help="Markdown page to write, with plots/ beside it")
    parser.add_argument("--causes", type=Path, help="TOML table (default: causes.toml beside the first file)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    causes_file = options.causes or options.files[0].parent / "causes.toml"
    try:
        causes = read_causes(causes_file) if options.causes or causes_file.is_file() else {}
        accuracy, shown = judge([record for file in options.files for record in load(file)], causes)
    except (InputError, FileNotFoundError) as error:
        say(f"trainfit: {error}", err=True)
        return EXIT_BAD_INPUT
    say(json.dumps(asdict(accuracy), ensure_ascii=False) if options.json else text(accuracy))
    if options.into is not None:
        write_all(options.into, page(accuracy), plots_of(shown))
    return 0


def write_all(into: Path, markdown: str, plots: dict[str, str]) -> None:
    """The page, and its plots (file name to SVG) in ``plots/`` beside it."""
    folder = into.parent / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    into.write_text(markdown, encoding="utf-8")
    for name, svg in plots.items():
        (folder / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
