"""``trainfit bench``: listing, printing and keeping results, also where a run ends early."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainfit.bench.experiments import accumulation
from trainfit.bench.harness import runner as bench_run
from trainfit.bench.harness.bench import Bench, value
from trainfit.bench.harness.discovery import GROUP, experiment, experiment_names
from trainfit.bench.harness.experiment import Experiment
from trainfit.cli.main import main
from trainfit.records import read
from trainfit.report.bench_plot import plot_of
from trainfit.spec.bench import BenchResult, BenchRow
from trainfit.spec.errors import InputError
from trainfit.spec.stop import Stopped

Output = pytest.CaptureFixture[str]
ON_CPU = ["bench", "accumulation", "--device", "cpu"]
SIGNALS_ITSELF = """
import os, signal, sys
from trainfit.bench.experiments import accumulation
from trainfit.cli.main import main

accumulation.METHODS["naive"] = lambda floats: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(main())
"""


def test_the_command_prints_json_and_keeps_a_record(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "records.sqlite"
    assert main(["bench", "autocast", "--device", "cpu", "--json", "--record", str(file)]) == 0
    printed = BenchResult.model_validate_json(capsys.readouterr().out)
    (record,) = read(file, "bench")
    assert record.bench == printed
    assert main(["records", "list", str(file)]) == 0
    assert "autocast, tiny" in capsys.readouterr().out
    assert main(["bench", "nonsense"]) == 65
    assert "NAME" in capsys.readouterr().err


def test_what_was_measured_before_a_signal_is_printed_and_kept(tmp_path: Path) -> None:
    """The first way to add sends the signal to its own process."""
    file = tmp_path / "records.sqlite"
    words = [*ON_CPU, "--form", "full", "--record", str(file)]
    process = [sys.executable, "-c", SIGNALS_ITSELF, *words]
    done = subprocess.run(process, capture_output=True, text=True, timeout=120)
    assert all(line.strip().startswith("done  sum") for line in done.stderr.splitlines()[:4])
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr
    assert "SIGTERM: stopped" in done.stderr
    (record,) = read(file, "bench")
    assert record.bench is not None
    rows = record.bench.rows
    assert [row.status for row in rows[:4]] == ["done"] * 4
    assert [row.point["method"] for row in rows[4:]] == list(accumulation.METHODS)
    assert (rows[-1].status, rows[-1].message) == ("not-run", "SIGTERM ended the run")
    assert "10.0021" in done.stdout
    assert "not-run" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_once_and_keeps_its_rows(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    kept: list[BenchResult] = []

    def keep(result: BenchResult) -> None:
        signal.raise_signal(number)  # While a result is kept, a signal does nothing.
        kept.append(result)

    with pytest.raises(Stopped, match=number.name):
        bench_run.run("autocast", device="cpu", on_row=lambda row: signal.raise_signal(number), keep=keep)
    (result,) = kept
    first, *others = result.rows
    assert first.status == "done"
    assert {(row.status, row.message) for row in others} == {("not-run", f"{number.name} ended the run")}
    assert len(result.rows) == len(bench_run.run("autocast", device="cpu", limit_s=0).rows)
    assert signal.getsignal(number) == before


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every experiment by one of three points whose second ends it."""

    def run(bench: Bench) -> Iterator[BenchRow]:
        for n in (1, 2, 3):
            if n == 2 and not bench.late():
                raise ZeroDivisionError("our mistake")
            yield from bench.attempt([{"n": n}], lambda n=n: n, lambda n: [value({"n": n}, number=n)])

    monkeypatch.setattr(bench_run, "experiment", lambda name: Experiment("title", "question", run, limit_s=1))


@pytest.mark.usefixtures("broken")
def test_an_error_of_an_experiment_loses_no_row(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "records.sqlite"
    assert main([*ON_CPU, "--json", "--record", str(file)]) == 70
    (record,) = read(file, "bench")
    printed = capsys.readouterr()
    assert record.bench == BenchResult.model_validate_json(printed.out)
    statuses = [(row.point["n"], row.status) for row in record.bench.rows]
    assert statuses == [(1, "done"), (2, "not-run"), (3, "not-run")]
    assert record.bench.rows[2].message == "the run ended: ZeroDivisionError: our mistake"
    assert "ZeroDivisionError" in printed.err


@pytest.mark.usefixtures("broken")
def test_a_run_that_ends_before_its_first_row_keeps_nothing(tmp_path: Path) -> None:
    file = tmp_path / "records.sqlite"
    assert main([*ON_CPU, "--only", "n=2", "--record", str(file)]) == 70
    assert not file.exists()


def test_a_record_that_cannot_be_written_loses_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainfit.records.append", full)
    assert main([*ON_CPU, "--only", "sum=fp16", "--record", str(tmp_path / "r")]) == 74
    printed = capsys.readouterr()
    assert "9.953" in printed.out
    assert "No space left" in printed.err


@pytest.mark.parametrize("option", ["--plot", "--record"])
def test_a_path_that_cannot_be_written_is_refused_before_the_run(
    option: str, tmp_path: Path, capsys: Output
) -> None:
    paths = {str(tmp_path / "missing" / "x.svg"): "no such folder", str(tmp_path): "is a folder"}
    for path, why in paths.items():
        assert main([*ON_CPU, option, path]) == 65
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
        assert why in printed.err
        assert option[2:] in printed.err


# -- experiments of other packages --

EXPERIMENT = """
from trainfit.bench.harness.bench import Part
from trainfit.bench.harness.experiment import Column, Experiment, Plot


def run(bench):
    for size in (1, 2):
        rates = lambda seconds: {"things": 7 * size}
        yield from bench.time([Part({"size": size}, rates=rates)], lambda: lambda lap: sum(range(1000)))


EXPERIMENT = Experiment(
    title="A subject from outside", question="What does another package time?", run=run, limit_s=5,
    columns=(Column("things", "number of things", note="seven for each size"),),
    plots=(Plot(x=("size",), y="things", title="Things"),),
)
"""
OUTSIDE = "from-outside"


@pytest.fixture
def entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with one experiment into a folder on the path; return its file of entry points."""
    (tmp_path / "outside_experiments.py").write_text(EXPERIMENT)
    info = tmp_path / "outside_experiments-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{OUTSIDE} = outside_experiments\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return info / "entry_points.txt"


@pytest.mark.usefixtures("entry_points")
def test_an_experiment_from_outside_is_listed_run_and_drawn(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert OUTSIDE in experiment_names()  # What parametrized tests iterate over.
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out
    assert f"{OUTSIDE} A subject from outside" in " ".join(listed.split())
    assert "What does another package time?" in listed
    assert main(["bench", "--help"]) == 0
    assert OUTSIDE in capsys.readouterr().out
    assert main(["bench", OUTSIDE, "--device", "cpu"]) == 0
    assert "number of things: seven for each size" in " ".join(capsys.readouterr().out.split())
    result = bench_run.run(OUTSIDE, device="cpu", form="tiny")
    assert [row.numbers["things"] for row in result.rows] == [7, 14]
    assert "Things" in str(plot_of(result, experiment(OUTSIDE).plots))


def test_without_a_name_the_experiments_are_listed(capsys: Output) -> None:
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    for name in experiment_names():
        assert f"{name} " in listed
        assert experiment(name).title in listed
    assert main(["bench", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["experiments"] == experiment_names()
    assert printed["titles"]["attention"] == experiment("attention").title


def test_a_name_that_two_packages_claim_is_refused(entry_points: Path) -> None:
    entry_points.write_text(f"[{GROUP}]\naccumulation = outside_experiments\n")
    with pytest.raises(InputError, match="claims this name"):
        experiment("accumulation")
    with pytest.raises(InputError, match="no such experiment"):
        experiment(OUTSIDE)
