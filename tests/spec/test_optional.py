"""A plain install, without any extra: one line that names the extra, exit 65, no traceback."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tiny_sweep import BASE
from trainfit.cli.main import main
from trainfit.spec.errors import InputError
from trainfit.spec.optional import is_installed, optional, require

ROOT = Path(__file__).parents[2]
EXTRAS = ("peft", "accelerate", "torchao", "matplotlib", "tensorboard", "ray", "datasets")
Captured = pytest.CaptureFixture[str]
TRAIN = ["train", "tiny-cpu", "--out", "run", "--steps", "2", "--device", "cpu", "--set", "batch.seq=16"]


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder without the packages of the extras; None in sys.modules halts an import."""
    if "transformers" in sys.modules:  # It imports accelerate with a model, if it found it before.
        importlib.import_module("transformers.models.llama.modeling_llama")
    monkeypatch.chdir(tmp_path)
    for name in {*EXTRAS, *(name for name in sys.modules if name.partition(".")[0] in EXTRAS)}:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (["predict", "tiny-cpu", "--set", "adapter.kind=lora"], "peft", "peft"),
        ([*TRAIN, "--set", "adapter.kind=prompt"], "peft", "peft"),
        ([*TRAIN, "--tensorboard"], "tensorboard", "tensorboard"),
        ([*TRAIN, "--data", "hub:a/b"], "datasets", "datasets"),
        (["predict", "tiny-cpu", "--set", "precision=fp8", "--gpu", "h100-sxm"], "torchao", "torchao"),
        (["report", "none.jsonl", "--html", "page.html"], "matplotlib", "plots"),
        (["bench", "accumulation", "--plot", "x.svg"], "matplotlib", "plots"),
    ],
)
def test_a_missing_package_is_one_line_with_its_extra(
    words: list[str], package: str, extra: str, capsys: Captured
) -> None:
    Path("none.jsonl").write_text("")
    assert main(words) == 65
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert f"needs the package {package}, which is not installed; pip install 'trainfit[{extra}]'" in line
    assert "Traceback" not in err


@pytest.mark.usefixtures("plain")
def test_a_plain_install_trains_without_event_files(capsys: Captured) -> None:
    assert main([*TRAIN, "--data", "stories:60"]) == 0
    err = capsys.readouterr().err
    assert "no event files: TensorBoard is not installed; pip install 'trainfit[tensorboard]'" in err
    assert not Path("run/tensorboard").exists()


@pytest.mark.usefixtures("plain")
def test_a_plain_install_writes_the_page_of_a_sweep_without_plots(capsys: Captured) -> None:
    Path("sweep.yaml").write_text(BASE + "list: [{name: one}]\n")
    assert main(["sweep", "sweep.yaml", "--out", "out", "--stop-after", "0"]) == 75
    assert "pip install 'trainfit[plots]'" in capsys.readouterr().err
    page = Path("out/report.html").read_text()
    assert "<svg" not in page
    assert "matplotlib is not installed" in page


def test_a_package_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"cannot be imported \(No module named 'no_such_module_at_all'\)"):
        optional("broken_package", "extra")
    with pytest.raises(InputError, match="a = 1: needs the package no_such_package, which is not installed"):
        require("no_such_package", "extra", field="a", value=1)
    assert is_installed("pytest")


def test_every_extra_that_is_asked_for_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"(?<![.\w])(?:optional|require)\(\s*\"[\w.]+\", \"(\w+)\"", source))
    named |= set(re.findall(r"pip install 'trainfit\[([\w,]+)\]'", source))
    assert {"peft", "plots", "tensorboard", "torchao", "ray", "datasets", "web"} <= named
    assert named <= set(extras)
