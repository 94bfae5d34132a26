"""``trainfit bench NAME``: an experiment on this machine's device."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainfit.cli.options import Json, RecordFile, finite, only_json, print_json
from trainfit.spec.errors import EXIT_STOPPED
from trainfit.spec.optional import require
from trainfit.spec.printable import say

if TYPE_CHECKING:
    from trainfit.spec.bench import BenchResult, BenchRow


MARGIN = "  "


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
        typer.Option(
            metavar="DIR", help="Also write traces (kernels) or, on CUDA, snapshots (memory) there."
        ),
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
    """Run an experiment: times with their spread, never a number from a failed or throttled run.

    Stopped by SIGTERM or Ctrl-C (exit 75), what was measured until then is printed and recorded; the other rows are not-run.
    """
    from trainfit.bench.harness.runner import experiment_names
    from trainfit.bench.harness.runner import run as run_experiment
    from trainfit.bench.harness.signals import Signalled

    if name is None:
        _list(experiment_names(), json)
        return 0
    _check(record, plot)
    wanted = _wanted(only or [])
    results: list[BenchResult] = []

    def keep(result: "BenchResult") -> None:
        results.append(result)
        _keep(record, result)

    code = 0
    try:
        with only_json(json):
            run_experiment(
                name, device=device, form=form, limit_s=limit, on_row=_tell, folder=files, on_file=_tell_file,
                only=wanted, keep=keep,
            )  # fmt: skip
    except Signalled as signalled:
        rest = "--only runs what is not-run" if results else "nothing was measured"
        say(f"{signalled}: stopped; {rest}", err=True)
        code = EXIT_STOPPED
    finally:  # Whatever ended it, what was measured is shown.
        for result in results:
            print_json(result) if json else show(result)
    if plot is not None and results:
        _draw(plot, results[0])
    return code


def _list(names: list[str], json: bool) -> None:
    """The experiments there are, each with the title of its page."""
    from trainfit.report.bench_prose import stories

    titles = {name: stories()[name].title for name in names}
    if json:
        print_json({"experiments": names, "titles": titles})
        return
    width = max(map(len, names))
    say("\n".join(f"{name:<{width}}  {title}" for name, title in titles.items()))


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


def _check(record: Path | None, plot: Path | None) -> None:
    """Refuse before the run what could not be written after it."""
    from trainfit.spec.errors import InputError

    if plot is not None:
        require("matplotlib", "plots", field="--plot", value=str(plot))
    for field, path in (("record", record), ("plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise InputError(
                "no such folder", "make it, or name another", field=field, value=str(path.parent)
            )
        if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError("may not be written", "name another place", field=field, value=str(path))
        if path is not None and path.is_dir():
            raise InputError("is a folder", "name a file", field=field, value=str(path))
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
        say(f"{result.experiment} has nothing to draw", err=True)
    else:
        replace_text(path, drawn)


def _tell(row: "BenchRow") -> None:
    """One line a row on stderr, so that one sees it go on."""
    point = ", ".join(f"{key} {value}" for key, value in row.point.items())
    say(f"{row.status:>13}  {point}", err=True)


def _tell_file(path: Path) -> None:
    say(f"{'wrote':>13}  {path}", err=True)


def show(result: "BenchResult") -> None:
    """The result for people: where, then a table for each question."""
    from trainfit.cli.fitted import fitted
    from trainfit.report.bench_prose import stories
    from trainfit.report.bench_table import aligned, grids, reasons
    from trainfit.report.bench_words import words
    from trainfit.report.console import console, notes

    out = console()
    where = result.environment
    out.print(f"{result.experiment}, {result.form} form · {where.device} · torch {where.torch}", style="bold")
    if result.gpu is None:
        out.print("No data sheet of this device is known: no time is checked against its peaks.")
    first = stories()[result.experiment].first(result.rows)
    for grid in [*grids(result.rows), *([first] if first else [])]:
        for table in fitted(grid, out.width - len(MARGIN)):
            out.print(f"\n{table.same}" if table.same else "")
            # Not wrapped: a table that is wider than the terminal is still a table.
            say("".join(f"{MARGIN}{line}\n" for line in aligned(table)), end="")
    notes(out, "Rows without a result", reasons(result.rows))
    notes(out, "Words", words(result))
    counts = {row.status: 0 for row in result.rows}
    for row in result.rows:
        counts[row.status] += 1
    out.print()
    out.print(
        f"{result.elapsed_s:.1f} s; rows: "
        + ", ".join(f"{count} {status}" for status, count in counts.items())
    )
