"""A plain install, without any extra: one line that names the extra, exit 65, no traceback."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_worker import Worker
from tiny_sweep import BASE
from trainfit.spec.errors import InputError
from trainfit.spec.optional import is_installed, optional, require

ROOT = Path(__file__).parents[2]
EXTRAS = ("peft", "accelerate", "torchao", "matplotlib", "tensorboard", "ray", "datasets")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(tmp_path_factory.mktemp("plain"), hidden=EXTRAS) as running:
        yield running


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("predict tiny-cpu --set adapter.kind=lora", "peft", "peft"),
        ("train tiny-cpu --set adapter.kind=prompt --out run", "peft", "peft"),
        ("measure tiny-cpu --set adapter.kind=lora --steps 1", "peft", "peft"),
        ("train tiny-cpu --out run --steps 1 --tensorboard", "tensorboard", "tensorboard"),
        ("train tiny-cpu --out run --steps 1 --data hub:a/b", "datasets", "datasets"),
        ("predict tiny-cpu --set precision=fp8 --gpu h100-sxm", "torchao", "torchao"),
        ("report none.jsonl --html page.html", "matplotlib", "plots"),
        ("bench accumulation --plot x.svg", "matplotlib", "plots"),
        ("sweep gpt2.yaml --executor ray --out out", "ray", "ray"),
    ],
)
def test_a_missing_package_is_one_line_with_its_extra(
    words: str, package: str, extra: str, plain: Worker, tmp_path: Path
) -> None:
    (tmp_path / "none.jsonl").touch()
    (tmp_path / "gpt2.yaml").write_text("base: gpt2")
    ended = plain.run(*words.split(), folder=tmp_path, memory_bytes=None)
    assert ended.code == 65, ended.err
    (error,) = [line for line in ended.err.splitlines() if "error" in line]
    assert f"needs the package {package}, which is not installed; pip install 'trainfit[{extra}]'" in error
    assert "Traceback" not in ended.err


def test_a_plain_install_trains_without_event_files(plain: Worker, tmp_path: Path) -> None:
    words = "train tiny-cpu --out run --steps 2 --data stories:60 --device cpu --set batch.seq=16"
    ended = plain.run(*words.split(), folder=tmp_path, memory_bytes=None)
    assert ended.code == 0, ended.err
    assert "no event files: TensorBoard is not installed; pip install 'trainfit[tensorboard]'" in ended.err
    assert (tmp_path / "run" / "log.jsonl").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_plain_install_writes_the_page_of_a_sweep_without_plots(plain: Worker, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(BASE + "list: [{name: one}]\n")
    ended = plain.run("sweep", "sweep.yaml", "--out", "out", "--stop-after", "0", folder=tmp_path)
    assert ended.code == 75, ended.err
    assert "pip install 'trainfit[plots]'" in ended.err
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


def test_every_extra_in_the_source_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"(?:optional|require)\(\s*\"[\w.]+\", \"(\w+)\"", source))
    named |= set(re.findall(r"pip install 'trainfit\[([\w,]+)\]'", source))
    assert {"peft", "plots", "tensorboard", "torchao", "ray", "datasets"} <= named
    assert named <= set(extras)
    assert "web" not in extras
