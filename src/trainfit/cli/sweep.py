"""``trainfit sweep``: predict, measure and train variants of a recipe, each in a process of its own."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from trainfit.cli.options import (
    Json,
    PeakFlops,
    Settings,
    at_most,
    attempt,
    finite,
    only_json,
    print_json,
    takes_recipe,
)
from trainfit.spec.errors import EXIT_STOPPED
from trainfit.spec.printable import printable, say
from trainfit.spec.stop import StopSignal, resumable

if TYPE_CHECKING:
    from trainfit.spec.result import Record
    from trainfit.sweeps.parts import PartRequest
    from trainfit.sweeps.read import Sweep
    from trainfit.sweeps.run import Executor, Run

REFRESH_PER_S = 4
MAX_LIVE_ROWS = 60  # Longer sweeps print a line for each result
GO_ON = "results are kept: run the same command again to continue"

FILES_HELP = "A sweep's YAML file (docs/guide/sweep.md), or recipe files and .jsonl files of recipes."
OUT_HELP = (
    "Folder of records, logs and report (runs/NAME), or a file NAME.jsonl for records alone. An existing one "
    "is continued."
)
RAY_HELP = "Address of a running cluster; default: start one here."
JOBS_HELP = "Measured trials in parallel (no GPU is shared; a CPU: 1)."
RETRY_HELP = "Repeat trials that crashed, were killed or lost, timed out, or have no time."
PREDICT_HELP = "Measure and train nothing; a later run without it does the rest."
SHARED_HELP = "Others use the device too: keep no times and no device memory."
SECONDS = {"metavar": "SECONDS", "callback": finite}
DeviceName = Literal["auto", "cpu", "cuda"]


@takes_recipe
def run(
    files: Annotated[list[Path], Argument(metavar="FILE...", help=FILES_HELP)],
    out: Annotated[Path | None, Option(metavar="FOLDER", help=OUT_HELP)] = None,
    settings: Settings = None,
    executor: Annotated[Literal["local", "ray"], Option(help="This machine or Ray.")] = "local",
    ray_address: Annotated[str | None, Option(metavar="ADDRESS", help=RAY_HELP)] = None,
    jobs: Annotated[int | None, Option(min=1, max=1024, metavar="N", help=JOBS_HELP)] = None,
    device: Annotated[DeviceName | None, Option(help="Instead of the file's device.")] = None,
    retry: Annotated[bool, Option("--retry", help=RETRY_HELP)] = False,
    again: Annotated[
        bool, Option("--again", help="Repeat everything, even variants that have a result.")
    ] = False,
    predict_only: Annotated[bool, Option("--predict-only", help=PREDICT_HELP)] = False,
    measure: Annotated[
        bool, Option("--measure", help="Measure too, even if the sweep's file does not request it.")
    ] = False,
    measure_only: Annotated[bool, Option("--measure-only", help="Neither predict nor train.")] = False,
    steps: Annotated[
        int | None, Option(min=0, callback=at_most, metavar="N", help="Timed steps a measurement (10).")
    ] = None,
    warmup: Annotated[
        int | None, Option(min=0, callback=at_most, metavar="N", help="Untimed steps before them (3).")
    ] = None,
    timeout: Annotated[float | None, Option(min=0.001, help="Limit of one trial (600).", **SECONDS)] = None,
    stop_after: Annotated[
        float | None, Option(min=0, help="Start no trial after this time; exit 75.", **SECONDS)
    ] = None,
    memory_limit_gib: Annotated[
        float | None, Option(min=0, metavar="GIB", callback=finite, help="What a trial may allocate.")
    ] = None,
    shared: Annotated[bool, Option("--shared", help=SHARED_HELP)] = False,
    tag: Annotated[list[str] | None, Option("--tag", metavar="TAG", help="Added to each record.")] = None,
    peak_flops: PeakFlops = None,
    markdown: Annotated[bool, Option("--markdown", help="Print the table as Markdown.")] = False,
    json: Json = False,
) -> int:
    """Predict, measure and train variants; compare them.

    A trial that is refused, runs out of memory or time, crashes or is killed is a row; the others continue.
    Stopped (exit 75) or killed, the same command continues.
    """
    if ray_address is not None and executor != "ray":
        raise typer.BadParameter("--ray-address needs --executor ray")
    if predict_only and (measure or measure_only):
        raise typer.BadParameter("--predict-only measures nothing")
    from trainfit.sweeps.journal import Journal
    from trainfit.sweeps.run import Run

    sweep = _read(
        files, settings, predict_only=predict_only, measure=measure or measure_only, only=measure_only,
        steps=steps, warmup=warmup, seconds=timeout, memory_gib=memory_limit_gib,
    )  # fmt: skip
    deadline_s = math.inf if stop_after is None else time.monotonic() + stop_after
    out = out or Path("runs") / sweep.name
    with resumable(lambda: GO_ON), only_json(json), Journal(out, sweep.name, tuple(tag or ())) as journal:
        view = View(sweep)
        state = Run(
            sweep, journal, device=device, peak_flops=peak_flops, retry=retry, again=again, shared=shared,
            deadline_s=deadline_s, changed=view.changed,
        )  # fmt: skip
        for note in (*sweep.notes, *journal.notes):
            view.say(f"note: {note}")
        with executing(executor, device or sweep.file.device, jobs, ray_address, deadline_s) as trials:
            _run(state, trials, view)
        page, failure = (None, None) if journal.is_file else _reported(state, out)
    _show(state, journal.path, page, json=json, markdown=markdown)
    if failure is not None:
        raise failure
    return EXIT_STOPPED if state.stopped else 0


def _read(files: Sequence[Path], settings: list[str] | None, *, predict_only: bool, **given: Any) -> "Sweep":
    """Return the sweep of files, with what the command line says of it (``SweepFile.with_options``)."""
    from trainfit.sweeps.read import read_sweep

    sweep = read_sweep(*files, settings=settings)
    file = sweep.file.with_options(**given)
    if predict_only:
        file = file.model_copy(update={"predict": True, "measure": None, "train": None})
    return replace(sweep, file=file)


def _show(state: "Run", records: Path, page: Path | None, *, json: bool, markdown: bool) -> None:
    if json:
        print_json(_content(state, records, page))
    elif markdown:
        _print_markdown(state)
    else:
        _print(state, records, page)


def _print_markdown(state: "Run") -> None:
    from trainfit.report.sweep import markdown_table, marked

    best = marked(state.rows())
    say(markdown_table(state.rows()), end=f"\nBold: {best.meaning}.\n" if best.variants else "")


def executing(
    kind: str, device: str, jobs: int | None, address: str | None, deadline_s: float
) -> "AbstractContextManager[Executor]":
    """Return a context manager of the trials' executor."""
    if kind == "ray":
        from trainfit.sweeps.ray_cluster import RayExecutor

        return RayExecutor(device, jobs, address, deadline_s)
    from trainfit.sweeps.local import LocalExecutor

    return nullcontext(LocalExecutor(device, jobs, deadline_s))


def _run(state: "Run", trials: "Executor", view: "View") -> None:
    with view.showing(state), StopSignal() as stop:
        state.go(trials, lambda: stop.name is not None)
    if state.num_kept:
        view.say(f"{state.num_kept} results kept from an earlier run")
    if state.stopped:
        why = f"{stop.name}: stopped" if stop.name else "the time is over"
        view.say(f"{why}; run the same command again for the rest")


class View:
    """Progress on standard error: a live table on a terminal, otherwise one line per result."""

    def __init__(self, sweep: "Sweep"):
        from trainfit.spec.terminal import Terminal

        self._console = Terminal(stderr=True)
        self._since: dict[str, float] = {}
        self._is_live = self._console.is_terminal and len(sweep.variants) <= MAX_LIVE_ROWS

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, soft_wrap=True)

    def changed(self, run: "Run", request: "PartRequest", record: "Record | None") -> None:
        """Handle the start (no record yet) or the end of a part."""
        from trainfit.report.sweep import line

        self._since[request.variant] = time.monotonic()
        if record is None or record.outcome is None or self._is_live:
            return
        self.say(line(run.row(request), request.part, record.outcome))

    @contextmanager
    def showing(self, state: "Run") -> Iterator[None]:
        """Keep the table live."""
        if not self._is_live:
            yield
            return
        from rich.live import Live

        from trainfit.report.sweep import text_table

        def table() -> Any:
            now = time.monotonic()
            seconds = {name: now - since for name, since in tuple(self._since.items())}
            return text_table(state.rows(), self._console.width, seconds=seconds)

        with Live(
            console=self._console, get_renderable=table, refresh_per_second=REFRESH_PER_S, transient=True,
            redirect_stdout=False,
        ):  # fmt: skip
            yield


def _reported(state: "Run", folder: Path) -> tuple[Path | None, OSError | None]:
    """Write the page of a sweep's folder; return it, or why it could not be written."""
    from trainfit.sweeps.journal import REPORT

    page = folder / REPORT
    failure = attempt(lambda: _report(state, page))
    return (page, None) if failure is None else (None, failure)


def _report(state: "Run", page: Path) -> None:
    from trainfit.records import replace_text
    from trainfit.report.html import NO_PLOTS, sweep_page
    from trainfit.report.plot import can_draw

    replace_text(page, sweep_page(state.sweep.name, state.rows(), notes=state.sweep.notes))
    if not can_draw():
        say(f"note: {NO_PLOTS}", err=True)


def _content(state: "Run", records: Path, page: Path | None) -> dict[str, Any]:
    """Return the JSON object: each row's prediction and measurement, and the table's numbers."""
    from trainfit.spec.sweep import front, frontier

    rows = state.rows()
    return {
        "name": state.sweep.name,
        "stopped": state.stopped,
        "rows": [row.model_dump(mode="json") | row.numbers() | {"verdict": row.verdict} for row in rows],
        "front": list(front(rows)),
        "predicted_front": list(best.variants if (best := frontier(rows)).is_predicted else ()),
        "notes": list(state.sweep.notes),
        "records": str(records),
        "report": None if page is None else str(page),
    }


def _print(state: "Run", records: Path, page: Path | None) -> None:
    from trainfit.report.console import console, heading, rows
    from trainfit.report.sweep import first_line, text_table
    from trainfit.report.words import holds_for
    from trainfit.spec.sweep import RUNNING, WAITING

    out, found = console(), state.rows()
    heading(out, f"Sweep {state.sweep.name}: {len(found)} variants")
    out.print(text_table(found, out.width))
    if line := holds_for(*(row.estimate.versions for row in found if row.estimate)):
        out.print(line)
    ended = [row for row in found if row.message and row.status not in (RUNNING, WAITING)]
    if ended:
        rows(
            out, [[row.variant, f"{row.status}: {first_line(row.message)}"] for row in ended], "left", "wrap"
        )
        out.print()
    say(f"records {printable(str(records))}")
    if page is not None:
        say(f"report  {printable(str(page))}")
