"""``trainfit bench NAME``: run an experiment on this machine's device."""

from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option
from typer.core import TyperCommand

from trainfit.cli.completion import experiments
from trainfit.cli.options import Device, Json, RecordFile, finite, only_json, print_json
from trainfit.spec.errors import EXIT_STOPPED
from trainfit.spec.printable import printable, say

if TYPE_CHECKING:
    from trainfit.report.plot import Form
    from trainfit.spec.bench import BenchResult, BenchRow


FORM_HELP = "tiny: seconds, a trial run. Default: full on a GPU, tiny on a CPU."
LIMIT_HELP = "Start no further point after this time."
FILES_HELP = "Also write the experiment's traces or snapshots there."
PLOT_HELP = "Also draw the result: .svg, .png or .pdf."
ONLY_HELP = "Only points whose KEY is one of these, such as compile=model."


class BenchCommand(TyperCommand):
    """A command that lists the experiments below the options of ``--help``."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from trainfit.bench.harness.discovery import experiment_names

        with formatter.section("Experiments"):
            formatter.write_text(", ".join(experiment_names()))


OPTIONS = {"cls": BenchCommand}


def run(
    name: Annotated[
        str | None,
        Argument(metavar="NAME", help="The experiment; without it, list them.", autocompletion=experiments),
    ] = None,
    device: Device = "auto",
    form: Annotated[Literal["tiny", "full"] | None, Option(help=FORM_HELP)] = None,
    limit: Annotated[
        float | None, Option("--limit-s", metavar="SECONDS", min=0, callback=finite, help=LIMIT_HELP)
    ] = None,
    plot: Annotated[Path | None, Option(metavar="FILE", help=PLOT_HELP)] = None,
    files: Annotated[Path | None, Option(metavar="DIR", help=FILES_HELP)] = None,
    only: Annotated[list[str] | None, Option(metavar="KEY=VALUE,...", help=ONLY_HELP)] = None,
    list_all: Annotated[bool, Option("--list", help="List the experiments and their questions.")] = False,
    json: Json = False,
    record: RecordFile = None,
) -> int:
    """Run an experiment: times of this device with their spread.

    Stopped by SIGTERM or Ctrl-C, it prints and records what was measured (exit 75 if anything was); other
    rows are not-run.
    """
    from trainfit.bench.harness.discovery import experiment
    from trainfit.bench.harness.runner import run as run_experiment
    from trainfit.records import append
    from trainfit.spec.files import write_bytes
    from trainfit.spec.provenance import new_bench_record
    from trainfit.spec.stop import Stopped

    if name is None or list_all:
        _list(json)
        return 0
    file_form = _check(record, plot)
    wanted, code = _wanted(only or []), 0
    results: list[BenchResult] = []

    def keep(result: "BenchResult") -> None:
        results.append(result)
        if record is not None:
            append(record, new_bench_record(result))

    try:
        with only_json(json):
            run_experiment(
                name, device=device, form=form, limit_s=limit, on_row=_print_row, folder=files,
                on_file=lambda path: _print_progress("wrote", str(path)), only=wanted, keep=keep,
            )  # fmt: skip
    except Stopped as stopped:
        rest = (
            "rows marked not-run were not measured; select them with --only"
            if results
            else "nothing was measured"
        )
        say(f"{stopped.name}: stopped; {rest}", err=True)
        code = EXIT_STOPPED if results else stopped.exit_code
    finally:  # Whatever ended the run, what was measured is shown.
        from trainfit.cli.text.bench import show

        for result in results:
            print_json(result) if json else show(result)
    if plot is not None and file_form is not None and results:
        from trainfit.report.bench_plot import plot_of

        drawn = plot_of(results[0], experiment(name).plots, file_form)
        if drawn is not None:
            write_bytes(plot, drawn)
        say(f"{name} has nothing to draw" if drawn is None else f"plot: {printable(str(plot))}", err=True)
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


def _check(record: Path | None, plot: Path | None) -> "Form | None":
    """Check before the run that its output files can be written; return the format of the plot."""
    from trainfit.records import check_can_append
    from trainfit.spec.files import check_can_write

    if record is not None:
        check_can_write(record, "--record")
        check_can_append(record)
    if plot is None:
        return None
    from trainfit.report.plot import check_plot_file

    return check_plot_file(plot)


def _print_row(row: "BenchRow") -> None:
    _print_progress(row.status, ", ".join(f"{key} {value}" for key, value in row.point.items()))


def _print_progress(status: str, text: str) -> None:
    say(f"{status:>13}  {text}", err=True)
