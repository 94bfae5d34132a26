"""A plain install, without any extra: one line that names the extra, exit 65, no traceback."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainfit.spec.errors import InputError
from trainfit.spec.optional import is_installed, optional, require

ROOT = Path(__file__).parents[2]
PLAIN = """
import sys
from importlib.machinery import PathFinder

EXTRAS = {"peft", "accelerate", "torchao", "matplotlib", "tensorboard", "ray", "datasets"}
plain = PathFinder.find_spec.__func__

def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in EXTRAS else plain(cls, name, path, target)

PathFinder.find_spec = classmethod(find_spec)
from trainfit.cli.entry import main
sys.exit(main())
"""


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PLAIN, *words], cwd=cwd, capture_output=True, text=True, timeout=250,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (["predict", "tiny-cpu", "--set", "adapter.kind=lora"], "peft", "peft"),
        (["train", "tiny-cpu", "--set", "adapter.kind=prompt", "--out", "run"], "peft", "peft"),
        (["measure", "tiny-cpu", "--set", "adapter.kind=lora", "--steps", "1"], "peft", "peft"),
        (
            ["train", "tiny-cpu", "--out", "run", "--steps", "1", "--tensorboard"],
            "tensorboard",
            "tensorboard",
        ),
        (["train", "tiny-cpu", "--out", "run", "--steps", "1", "--data", "hub:a/b"], "datasets", "datasets"),
        (["predict", "tiny-cpu", "--set", "precision=fp8", "--gpu", "h100-sxm"], "torchao", "torchao"),
        (["report", "none.jsonl", "--html", "page.html"], "matplotlib", "plots"),
        (["bench", "accumulation", "--plot", "x.svg"], "matplotlib", "plots"),
    ],
)
def test_a_missing_package_is_one_line_with_its_extra(
    words: list[str], package: str, extra: str, tmp_path: Path
) -> None:
    (tmp_path / "none.jsonl").write_text("")
    ended = run(*words, cwd=tmp_path)
    assert ended.returncode == 65, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if "error" in line]
    assert len(errors) == 1, ended.stderr
    assert (
        f"needs the package {package}, which is not installed; pip install 'trainfit[{extra}]'" in errors[0]
    )
    assert "Traceback" not in ended.stderr


def test_a_plain_install_trains_without_event_files(tmp_path: Path) -> None:
    words = ["train", "tiny-cpu", "--out", "run", "--steps", "2", "--data", "stories:60", "--device", "cpu"]
    ended = run(*words, "--set", "batch.seq=16", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "no event files: TensorBoard is not installed; pip install 'trainfit[tensorboard]'" in ended.stderr
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_plain_install_sweeps_and_writes_a_page_without_plots(tmp_path: Path) -> None:
    from tiny_sweep import BASE

    (tmp_path / "sweep.yaml").write_text(BASE + "list: [{name: one}]\n")
    ended = run("sweep", "sweep.yaml", "--out", "out", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "pip install 'trainfit[plots]'" in ended.stderr
    page = (tmp_path / "out" / "report.html").read_text()
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
    named = set(re.findall(r"(?:optional|require)\(\s*\"[\w.]+\", \"(\w+)\"", source))
    named |= set(re.findall(r"pip install 'trainfit\[([\w,]+)\]'", source))
    assert {"peft", "plots", "tensorboard", "torchao", "ray", "datasets"} <= named
    assert named <= set(extras)
    assert "web" not in extras
