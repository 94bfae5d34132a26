"""What is shipped: every data file, and pins for every dependency."""

import re
import tomllib
from pathlib import Path

import pytest

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
    wanted |= names(extras["plots"]) | names(extras["tensorboard"]) | names(extras["docs"])
    assert wanted - names(pins) == {"trainfit"}


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_the_bounds_are_the_oldest_and_the_newest_tested_versions(name: str) -> None:
    """A newer version may change what a prediction emulates, so it is refused until it was taken in."""
    bounds = next(one for one in PROJECT["project"]["dependencies"] if one.startswith(f"{name}>"))
    lower, upper = re.fullmatch(rf"{name}>=([\d.]+),<([\d.]+)", bounds).groups()  # pyright: ignore

    def pinned(file: str) -> list[str]:
        pins = (ROOT / "requirements" / file).read_text()
        return re.search(rf"^{name}==([\d.]+)", pins, re.MULTILINE)[1].split(".")  # pyright: ignore

    assert pinned("oldest.txt")[:2] == lower.split(".")
    major, minor = map(int, pinned("constraints.txt")[:2])
    assert upper == f"{major}.{minor + 1}"
    for page in ("docs/internals/versions.md", "docs/reference/models.md"):
        assert f"{name} {lower} to {major}.{minor}" in (ROOT / page).read_text().replace(" | ", " "), page
    assert bounds in (ROOT / "docs/internals/versions.md").read_text()
