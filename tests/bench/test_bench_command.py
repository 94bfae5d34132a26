"""``trainfit bench``: what it prints and keeps, also where it is ended before its time."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainfit.bench.experiments import accumulation
from trainfit.bench.harness import runner as bench_run
from trainfit.bench.harness.bench import Bench, failures, value
from trainfit.bench.harness.experiment import Experiment
from trainfit.bench.harness.signals import Signalled, Signals
from trainfit.cli.main import main
from trainfit.records import read
from trainfit.spec.bench import BenchResult, BenchRow
from trainfit.spec.errors import InputError

SIGNALS_ITSELF = """
import os, signal, sys
from trainfit.bench.experiments import accumulation
from trainfit.cli.main import main

accumulation.METHODS["naive"] = lambda floats: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(main())
"""


def test_the_command_prints_json_and_keeps_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    words = ["bench", "accumulation", "--device", "cpu", "--form", "full", "--record", str(file)]
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNALS_ITSELF, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert all(line.strip().startswith("done  sum") for line in err.splitlines()[:4])
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert "SIGTERM: stopped" in err
    (record,) = read(file, "bench")
    assert record.bench is not None
    rows = record.bench.rows
    assert [row.status for row in rows[:4]] == ["done"] * 4
    assert [row.point["method"] for row in rows[4:]] == list(accumulation.METHODS)
    assert (rows[-1].status, rows[-1].message) == ("not-run", "SIGTERM ended the run")
    assert "10.0021" in out
    assert "not-run" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_once_and_what_it_did_before_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    kept: list[BenchResult] = []

    def keep(result: BenchResult) -> None:
        signal.raise_signal(number)  # While a result is kept, a signal does nothing.
        kept.append(result)

    with pytest.raises(Signalled, match=number.name):
        bench_run.run("autocast", device="cpu", on_row=lambda row: signal.raise_signal(number), keep=keep)
    (result,) = kept
    first, *others = result.rows
    assert first.status == "done"
    assert {(row.status, row.message) for row in others} == {("not-run", f"{number.name} ended the run")}
    assert len(result.rows) == len(bench_run.run("autocast", device="cpu", limit_s=0).rows)
    assert signal.getsignal(number) == before


def test_a_second_signal_does_not_cut_what_the_first_began() -> None:
    signals = Signals()
    with pytest.raises(Signalled, match="SIGTERM"):
        signals.came(signal.SIGTERM, None)
    signals.came(signal.SIGINT, None)


class Broken:
    """An experiment of three points whose second ends it."""

    def run(self, bench: Bench) -> Iterator[BenchRow]:
        for n in (1, 2, 3):
            if (late := bench.late()) is not None:
                yield from failures([{"n": n}], *late)
                continue
            if n == 2:
                raise ZeroDivisionError("our mistake")
            yield value({"n": n}, number=n)


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Experiment("title", "question", Broken().run, limit_s=1)
    monkeypatch.setattr(bench_run, "experiment", lambda name: one)


def test_an_error_of_an_experiment_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch)
    file = tmp_path / "records.sqlite"
    assert main(["bench", "accumulation", "--device", "cpu", "--json", "--record", str(file)]) == 70
    (record,) = read(file, "bench")
    printed = capsys.readouterr()
    assert record.bench == BenchResult.model_validate_json(printed.out)
    assert [(row.point["n"], row.status) for row in record.bench.rows] == [
        (1, "done"),
        (2, "not-run"),
        (3, "not-run"),
    ]
    assert record.bench.rows[2].message == "the run ended: ZeroDivisionError: our mistake"
    assert "ZeroDivisionError" in printed.err


def test_a_run_that_ends_before_its_first_row_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    file = tmp_path / "records.sqlite"
    words = ["bench", "accumulation", "--device", "cpu", "--only", "n=2", "--record", str(file)]
    monkeypatch.setattr(bench_run, "_only", lambda *_: {"n": frozenset({"2"})})
    assert main(words) == 70
    assert not file.exists()


def test_a_record_that_cannot_be_written_loses_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainfit.records.append", full)
    words = [
        "bench",
        "accumulation",
        "--device",
        "cpu",
        "--only",
        "sum=fp16",
        "--record",
        str(tmp_path / "r"),
    ]
    assert main(words) == 74
    printed = capsys.readouterr()
    assert "9.953" in printed.out
    assert "No space left" in printed.err


@pytest.mark.parametrize("option", ["--plot", "--record"])
def test_a_path_that_cannot_be_written_is_refused_before_the_run(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {str(tmp_path / "missing" / "x.svg"): "no such folder", str(tmp_path): "is a folder"}
    for path, why in paths.items():
        assert main(["bench", "accumulation", "--device", "cpu", option, path]) == 65
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
        assert why in printed.err
        assert option[2:] in printed.err


def test_a_device_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda.set_device`` takes none without."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [bench_run._device(name).index for name in ("cuda", "cuda:1", "cpu")] == [0, 1, None]
    with pytest.raises(InputError, match="2 CUDA devices"):
        bench_run._device("cuda:2")
