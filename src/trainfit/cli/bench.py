"""``trainfit bench NAME``: an experiment on this machine's device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainfit.cli.options import Json, RecordFile, finite, only_json, print_json

if TYPE_CHECKING:
    from trainfit.spec.bench import BenchResult, BenchRow


def register(app: typer.Typer) -> None:
    app.command("bench")(run)


def run(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The experiment; without one, those there are.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:1.")] = "auto",
    form: Annotated[
        Literal["tiny", "full"] | None,
        typer.Option(help="tiny: seconds, to see that it works. Without it: full on a GPU, tiny on a CPU."),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            "--limit-s",
            metavar="SECONDS",
            min=0,
            callback=finite,
            help="Begin no further point after so long.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw it.")] = None,
    files: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write traces (kernels) or snapshots (memory) there."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...", help="Only points whose KEY is one of these, such as compile=model."
        ),
    ] = None,
    json: Json = False,
    record: RecordFile = None,
) -> int:
    """Run an experiment: times with their spread, never a number from a failed or throttled run."""
    from trainfit.bench.run import experiment_names
    from trainfit.bench.run import run as run_experiment

    if name is None:
        print_json({"experiments": experiment_names()}) if json else typer.echo("\n".join(experiment_names()))
        return 0
    _check(record)
    wanted = _wanted(only or [])
    with only_json(json):
        result = run_experiment(
            name, device=device, form=form, limit_s=limit, on_row=_tell, folder=files, on_file=_tell_file,
            only=wanted,
        )  # fmt: skip
        _keep(record, result)
    if json:
        print_json(result)
    else:
        show(result)
    if plot is not None:
        _draw(plot, result)
    return 0


def _wanted(only: list[str]) -> dict[str, list[str]]:
    """Values by key; a key that comes twice has the values of both."""
    from trainfit.spec.errors import InputError

    wanted: dict[str, list[str]] = {}
    for one in only:
        key, equals, values = one.partition("=")
        if not (key and equals and values):
            raise InputError(
                "is not KEY=VALUE", "write for example compile=model,block", field="only", value=one
            )
        wanted.setdefault(key, []).extend(value.strip() for value in values.split(","))
    return wanted


def _check(record: Path | None) -> None:
    if record is not None:
        from trainfit.records import check_can_append

        check_can_append(record)


def _keep(record: Path | None, result: "BenchResult") -> None:
    if record is not None:
        from trainfit.records import append
        from trainfit.spec.provenance import new_bench_record

        append(record, new_bench_record(result))


def _draw(path: Path, result: "BenchResult") -> None:
    from trainfit.records import replace_text
    from trainfit.report.bench_plot import plot_of

    drawn = plot_of(result)
    if drawn is None:
        typer.echo(f"{result.experiment} has nothing to draw", err=True)
    else:
        replace_text(path, drawn)


def _tell(row: "BenchRow") -> None:
    """One line a row on stderr, so that one sees it go on."""
    point = ", ".join(f"{key} {value}" for key, value in row.point.items())
    typer.echo(f"{row.status:>13}  {point}", err=True)


def _tell_file(path: Path) -> None:
    typer.echo(f"{'wrote':>13}  {path}", err=True)


def show(result: "BenchResult") -> None:
    """The result for people: where, then a table for each question."""
    from trainfit.cli.show import console, notes
    from trainfit.report.bench_prose import stories
    from trainfit.report.bench_table import aligned, grids, reasons

    out = console()
    where = result.environment
    out.print(f"{result.experiment}, {result.form} form · {where.device} · torch {where.torch}", style="bold")
    if result.gpu is None:
        out.print("no data sheet of this device in the catalog: no time is called impossible")
    for grid in grids(result.rows):
        out.print(f"\n{grid.same}" if grid.same else "")
        # Not wrapped: a table that is wider than the terminal is still a table.
        out.file.write("".join(f"  {line}\n" for line in aligned(grid)))
    notes(out, "Rows without a rate", reasons(result.rows))
    first = stories()[result.experiment].first(result.rows)
    if first is not None:
        out.print()
        out.file.write("".join(f"  {line}\n" for line in aligned(first)))
    counts = {row.status: 0 for row in result.rows}
    for row in result.rows:
        counts[row.status] += 1
    out.print()
    out.print(
        f"{result.elapsed_s:.1f} s; rows: "
        + ", ".join(f"{count} {status}" for status, count in counts.items())
    )
