"""What is shipped: every data file, and pins for every dependency."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_data_file_is_package_data() -> None:
    package = ROOT / "src" / "trainfit"
    shipped = {
        path
        for pattern in PROJECT["tool"]["setuptools"]["package-data"]["trainfit"]
        for path in package.glob(pattern)
    }
    data = {path for path in package.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}}
    assert data - shipped == set()
    assert len(data) > 100


def test_every_direct_dependency_is_pinned() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=!~ ]", requirement)[0].lower() for requirement in requirements}

    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line.strip() and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", pin) for pin in pins)
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = names(PROJECT["project"]["dependencies"]) | names(extras["peft"]) | names(extras["dev"])
    wanted |= names(extras["plots"]) | names(extras["tensorboard"])
    assert wanted - names(pins) == {"trainfit"}
