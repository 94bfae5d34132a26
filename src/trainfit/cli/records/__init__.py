"""``trainfit records``: list, export, import and recover record files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainfit.cli.options import Json, print_json
from trainfit.spec.printable import printable, say

if TYPE_CHECKING:
    from trainfit.spec.result import Record

File = Annotated[Path, typer.Argument(metavar="FILE", help="An SQLite file that --record made.")]
Kind = Annotated[Literal["predict", "measure", "train", "bench"] | None, typer.Option(help="Only this kind.")]


GROUP = typer.Typer(help="List, export, import or recover records.")


@GROUP.command("list")
def list_records(file: File, kind: Kind = None, json: Json = False) -> None:
    """List the records, oldest first."""
    from trainfit.records import read
    from trainfit.report.console import console, rows

    found = read(file, kind=kind)
    if json:
        print_json([record.model_dump(mode="json") for record in found])
        return
    head = ["when (UTC)", "kind", "recipe", "what", "peak", "step"]
    rows(console(), [head, *map(_line, found)], "left", "left", "left", "wrap", "right", "right")


def _line(record: "Record") -> list[str]:
    from trainfit.report.words import quantity
    from trainfit.spec.parsing.recipe_file import recipe_from

    when = record.created_at[:19].replace("T", " ")
    if record.bench is not None:
        what = f"{record.bench.experiment}, {record.bench.form}: {len(record.bench.rows)} rows"
        return [when, record.kind, "", what, "", ""]
    result, trained = record.estimate or record.measurement, record.train or {}
    peak = trained.get("peak_memory_bytes", trained.get("peak_allocated_bytes"))
    peak = result.peak_allocated_bytes if result is not None else peak
    seconds = result.step_s if result is not None else trained.get("step_s")
    if record.recipe:
        recipe = recipe_from(record.recipe)
        what = f"{recipe.model.display_name} {recipe.precision} {recipe.batch.micro} x {recipe.batch.seq}"
    else:  # Of a loop that is not trainfit's.
        what = f"{trained.get('name')}, {trained.get('steps')} steps watched"
    sizes = [
        "" if value is None else quantity(unit, value) for unit, value in (("_bytes", peak), ("_s", seconds))
    ]
    return [when, record.kind, record.recipe_id[:8], what, *sizes]


@GROUP.command("export")
def export_records(
    file: File,
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Where to write one JSON object a line.")],
) -> None:
    """Write every record as a line of JSON."""
    from trainfit.records import export

    written = export(file, out)
    say(f"{written} records written to {out}", err=True)


@GROUP.command("import")
def import_records(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An SQLite file of records; made if missing.")],
    lines: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Records, one JSON object a line.")],
) -> None:
    """Add the records of a JSON Lines file that FILE does not hold yet."""
    from trainfit.records import check_can_append, import_jsonl

    check_can_append(file)
    say(f"{import_jsonl(file, lines)} new records in {file}", err=True)


@GROUP.command("recover")
def recover_records(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A damaged SQLite or JSON Lines file.")],
    out: Annotated[Path, typer.Argument(metavar="NEW.jsonl", help="A new file for its intact records.")],
) -> int:
    """Copy a damaged file's intact records to a new file; name the lost ones (exit 65)."""
    from trainfit.records import recover
    from trainfit.spec.errors import EXIT_BAD_INPUT

    written, damaged = recover(file, out)
    for line in damaged:
        say(f"lost: {printable(line)}", err=True)
    say(f"{written} records written to {out}, {len(damaged)} lost", err=True)
    return EXIT_BAD_INPUT if damaged else 0
