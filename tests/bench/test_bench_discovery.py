"""Experiments are found: those of the package, and those that another package adds by an entry point."""

import json
from pathlib import Path

import pytest

from trainfit.bench.harness.discovery import GROUP, experiment, experiment_names
from trainfit.bench.harness.runner import run
from trainfit.cli.main import main
from trainfit.report.bench_plot import plot_of
from trainfit.spec.errors import InputError

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


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a package with one experiment into a folder on the path."""
    name = "from-outside"
    (tmp_path / "outside_package.py").write_text(EXPERIMENT)
    info = tmp_path / "outside_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = outside_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_an_experiment_from_outside_is_listed_helped_run_and_drawn(
    outside: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert outside in experiment_names()  # What parametrized tests iterate over.
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out
    assert f"{outside}  A subject from outside" in listed
    assert "What does another package time?" in listed
    assert main(["bench", "--help"]) == 0
    assert outside in capsys.readouterr().out
    assert main(["bench", outside, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "number of things" in printed
    assert "number of things: seven for each size" in " ".join(printed.split())
    result = run(outside, device="cpu", form="tiny")
    assert [row.numbers["things"] for row in result.rows] == [7, 14]
    assert "Things" in str(plot_of(result, experiment(outside).plots))


def test_without_a_name_the_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    for name in experiment_names():
        assert f"{name} " in listed
        assert experiment(name).title in listed
    assert main(["bench", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["experiments"] == experiment_names()
    assert printed["titles"]["attention"] == experiment("attention").title


def test_a_name_that_two_packages_claim_is_refused(outside: str, tmp_path: Path) -> None:
    (tmp_path / "outside_package-1.0.dist-info/entry_points.txt").write_text(
        f"[{GROUP}]\naccumulation = outside_package\n"
    )
    with pytest.raises(InputError, match="claims this name"):
        experiment("accumulation")
    with pytest.raises(InputError, match="no such experiment"):
        experiment(outside)
