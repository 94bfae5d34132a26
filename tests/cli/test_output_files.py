"""Files that commands write after long work: refused before it, or the answer is printed all the same."""

import json
from pathlib import Path

import pytest

from trainfit.cli.main import main

Captured = pytest.CaptureFixture[str]
PLAN = ["plan", "tiny-cpu", "--gpu", "h200", "--vary", "loss"]
BENCH = ["bench", "accumulation", "--device", "cpu", "--only", "sum=fp16"]
STARTS = {"svg": b"<svg ", "png": b"\x89PNG\r\n", "pdf": b"%PDF-"}
UNWRITABLE = Path("/proc/self")  # Its files cannot be made, also by root.


@pytest.mark.parametrize("form", STARTS)
def test_a_plot_has_the_format_of_its_name(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"x.{form}" if form != "png" else "X.PNG"
    assert main([*PLAN, "--plot", name]) == 0
    assert (tmp_path / name).read_bytes().startswith(STARTS[form])
    assert f"plot: {name}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [PLAN, BENCH], ids=["plan", "bench"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x.jpg", "--plot = 'x.jpg': no format of a plot; write one of x.svg, x.png, x.pdf"),
        ("x", "--plot = 'x': names no format; write one of x.svg, x.png, x.pdf"),
        ("no/x.svg", "--plot = 'no': no such folder"),
        (".", "--plot = '.': is a folder"),
    ],
)
def test_other_formats_and_places_are_refused_before_the_work(
    command: list[str],
    name: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--plot", name]) == 65
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err


def test_a_named_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for option, name in (("--out", "y.yaml"), ("--plot", "y.svg")):
        assert main([*PLAN, option, name]) == 74
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.splitlines()[-1].endswith(
            f"make it writable, or name another place with {option}"
        )


def full(*_: object) -> None:
    raise OSError(28, "No space left on device", "x")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("name", ["--out=x.yaml", "--plot=x.svg"])
def test_a_plan_that_cannot_be_written_is_printed(
    name: str, as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainfit.spec.files.write_bytes", full)
    assert main([*PLAN, name, *["--json"] * as_json]) == 74
    captured = capsys.readouterr()
    assert json.loads(captured.out)["best"] if as_json else "tokens/s" in captured.out
    assert "written to" not in captured.out
    assert captured.err.splitlines()[-1].startswith("trainfit: error: x: No space left on device")


def test_a_plan_in_a_folder_that_is_read_only_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(UNWRITABLE)
    assert main(PLAN) == 74
    captured = capsys.readouterr()
    assert "tokens/s" in captured.out
    assert "written to" not in captured.out
    assert "plan.yaml: " in captured.err.splitlines()[-1]


@pytest.mark.parametrize("verb", ["predict", "measure"])
def test_a_record_that_cannot_be_written_loses_no_answer(
    verb: str, forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("trainfit.records.append", full)
    steps = ["--steps", "1", "--warmup", "0", "--device", "cpu"] if verb == "measure" else []
    assert main([verb, "tiny-cpu", "--batch", "1", *steps, "--record", str(tmp_path / "r"), "--json"]) == 74
    captured = capsys.readouterr()
    assert json.loads(captured.out)["peak_allocated_bytes"] > 0
    assert "No space left" in captured.err
