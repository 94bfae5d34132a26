"""``trainfit report``: predicted against measured, from record files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from trainfit.cli.options import Json, print_json
from trainfit.spec.files import check_can_write
from trainfit.spec.optional import require
from trainfit.spec.printable import say

if TYPE_CHECKING:
    from trainfit.report.compare import Comparison


def run(
    files: Annotated[
        list[Path], Argument(metavar="FILE...", help="SQLite files that --record made, or JSON Lines.")
    ],
    html: Annotated[Path | None, Option(metavar="FILE", help="Also write a page with plots.")] = None,
    markdown: Annotated[bool, Option("--markdown", help="Print every column as a Markdown table.")] = False,
    json: Json = False,
) -> None:
    """Compare predictions with measurements."""
    from trainfit.records import load, replace_text
    from trainfit.report.compare import compare

    if html is not None:
        require("matplotlib", "plots", field="--html", value=str(html))
        check_can_write(html, "--html")
    comparisons = compare([record for file in files for record in load(file)])
    if json:
        print_json([_content(one) for one in comparisons])
    else:
        _print(comparisons, markdown)
    if html is not None:
        from trainfit.report.html import report_page

        replace_text(html, report_page(comparisons))
        say(f"page with plots: {html}", err=True)


def _print(comparisons: "list[Comparison]", markdown: bool) -> None:
    from trainfit.report.comparisons import loop_tables, markdown_table, text_table

    if markdown:
        say("\n".join([markdown_table(comparisons), *loop_tables(comparisons)]))
        return
    from trainfit.report import loop_text
    from trainfit.report.console import console, heading

    out = console()
    out.print(text_table(comparisons))
    for one in comparisons:
        predicted, measured = one.loops
        if measured is not None:
            heading(out, f"{one.model}  {one.batch}, {one.technique}: recipe {one.recipe.id[:8]}")
            if predicted is None:
                loop_text.show(out, measured, None)
            else:
                loop_text.compared(out, predicted, measured)


def _content(one: "Comparison") -> dict[str, Any]:
    """Return both sides, and the errors as shares of the measured value."""
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "step_s")
    return {
        "recipe": one.recipe.content(),
        "recipe_id": one.recipe.id,
        "predicted": one.predicted and one.predicted.model_dump(mode="json"),
        "measured": one.measured and one.measured.model_dump(mode="json"),
        "predicted_for_other_versions": one.other_versions,
        "peak_met": one.peak_met,
        "errors": {name: one.error(name) for name in names} | one.phase_errors() | one.loop_errors(),
    }
