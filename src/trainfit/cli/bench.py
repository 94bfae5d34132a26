"""``trainfit bench NAME``: run an experiment on this machine's device."""

import os
from collections import Counter
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from trainfit.cli.options import Device, Json, RecordFile, finite, only_json, print_json
from trainfit.spec.errors import EXIT_STOPPED
from trainfit.spec.optional import require
from trainfit.spec.printable import say

if TYPE_CHECKING:
    from trainfit.spec.bench import BenchResult, BenchRow


MARGIN = "  "
Name = Annotated[str | None, typer.Argument(metavar="NAME", help="The experiment; without it, list them.")]
FORM_HELP = "tiny: seconds, a trial run. Default: full on a GPU, tiny on a CPU."
Form = Annotated[Literal["tiny", "full"] | None, typer.Option(help=FORM_HELP)]
LIMIT_HELP = "Begin no further point after this time."
Limit = Annotated[
    float | None, typer.Option("--limit-s", metavar="SECONDS", min=0, callback=finite, help=LIMIT_HELP)
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw the result.")]
FILES_HELP = "Also write the experiment's traces or snapshots there."
Files = Annotated[Path | None, typer.Option(metavar="DIR", help=FILES_HELP)]
ListAll = Annotated[bool, typer.Option("--list", help="List the experiments and their questions.")]
ONLY_HELP = "Only points whose KEY is one of these, such as compile=model."
Only = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE,...", help=ONLY_HELP)]


class BenchCommand(TyperCommand):
    """Lists the experiments below the options of ``--help``."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from trainfit.bench.harness.discovery import experiment_names

        with formatter.section("Experiments"):
            formatter.write_text(", ".join(experiment_names()))


def register(app: typer.Typer) -> None:
    app.command("bench", cls=BenchCommand)(run)


def run(
    name: Name = None,
    device: Device = "auto",
    form: Form = None,
    limit: Limit = None,
    plot: Plot = None,
    files: Files = None,
    only: Only = None,
    list_all: ListAll = False,
    json: Json = False,
    record: RecordFile = None,
) -> int:
    """Run an experiment: times with their spread, never a number from a failed or throttled run.

    Stopped by SIGTERM or Ctrl-C (exit 75), it prints and records what was measured; other rows are not-run.
    """
    from trainfit.bench.harness.runner import run as run_experiment
    from trainfit.bench.harness.signals import Signalled

    if name is None or list_all:
        _list(json)
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
                name, device=device, form=form, limit_s=limit, on_row=_print_row, folder=files,
                on_file=_print_file, only=wanted, keep=keep,
            )  # fmt: skip
    except Signalled as signalled:
        rest = "--only runs what is not-run" if results else "nothing was measured"
        say(f"{signalled}: stopped; {rest}", err=True)
        code = EXIT_STOPPED
    finally:  # Whatever ended the run, what was measured is shown.
        for result in results:
            print_json(result) if json else show(result)
    if plot is not None and results:
        _draw(plot, results[0])
    return code


def _list(json: bool) -> None:
    """Print the experiments, each with its title and question."""
    from trainfit.bench.harness.discovery import experiment, experiment_names

    found = {name: experiment(name) for name in experiment_names()}
    if json:
        titles = {name: one.title for name, one in found.items()}
        questions = {name: one.question for name, one in found.items()}
        print_json({"experiments": list(found), "titles": titles, "questions": questions})
        return
    width = max(map(len, found))
    for name, one in found.items():
        say(f"{name:<{width}}  {one.title}")
        say(indent(fill(one.question, 78 - width), " " * (width + 2)))


def _wanted(only: list[str]) -> dict[str, list[str]]:
    """Return values by key; a key given twice has the values of both."""
    from trainfit.spec.errors import InputError

    wanted: dict[str, list[str]] = {}
    for one in only:
        key, equals, values = one.partition("=")
        if not (key and equals and values):
            remedy = "write for example compile=model,block"
            raise InputError("is not KEY=VALUE", remedy, field="only", value=one)
        wanted.setdefault(key, []).extend(value.strip() for value in values.split(","))
    return wanted


def _check(record: Path | None, plot: Path | None) -> None:
    """Refuse before the run files that could not be written after it."""
    from trainfit.spec.errors import InputError

    if plot is not None:
        require("matplotlib", "plots", field="--plot", value=str(plot))
    for field, path in (("record", record), ("plot", plot)):
        if path is not None and not path.parent.is_dir():
            remedy = "make it, or name another"
            raise InputError("no such folder", remedy, field=field, value=str(path.parent))
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
    from trainfit.bench.harness.discovery import experiment
    from trainfit.records import replace_text
    from trainfit.report.bench_plot import plot_of

    drawn = plot_of(result, experiment(result.experiment).plots)
    if drawn is None:
        say(f"{result.experiment} has nothing to draw", err=True)
    else:
        replace_text(path, drawn)


def _print_row(row: "BenchRow") -> None:
    """Print one line a row on stderr, to show progress."""
    point = ", ".join(f"{key} {value}" for key, value in row.point.items())
    say(f"{row.status:>13}  {point}", err=True)


def _print_file(path: Path) -> None:
    say(f"{'wrote':>13}  {path}", err=True)


def show(result: "BenchResult") -> None:
    """Print the environment, then a table for each set of keys, then the meaning of the columns."""
    from trainfit.bench.harness.discovery import experiment
    from trainfit.cli.fitted import fitted
    from trainfit.report import bench_table
    from trainfit.report.console import console, notes

    out, columns = console(), experiment(result.experiment).columns
    where = result.environment
    head = f"{result.experiment}, {result.form} form · {where.device} · torch {where.torch}"
    out.print(head, style="bold")
    if result.gpu is None:
        out.print("No data sheet of this device is known: no time is checked against its peaks.")
    for grid in bench_table.grids(result.rows, columns):
        for table in fitted(grid, out.width - len(MARGIN)):
            out.print(f"\n{table.same}" if table.same else "")
            # Not wrapped: a table wider than the terminal stays a table.
            say("".join(f"{MARGIN}{line}\n" for line in bench_table.aligned(table)), end="")
    notes(out, "Rows without a result", bench_table.reasons(result.rows))
    notes(out, "Columns", bench_table.notes(result.rows, columns))
    counts = Counter(row.status for row in result.rows)
    out.print()
    out.print(
        f"{result.elapsed_s:.1f} s; rows: "
        + ", ".join(f"{count} {status}" for status, count in counts.items())
    )
