"""What is shipped: every data file, pins for every dependency, the version and the description."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

import trainfit

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


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


README = (ROOT / "README.md").read_text()
describe = runpy.run_path(str(ROOT / "setup.py"))["description"]


def test_the_newest_section_of_the_changelog_is_the_version() -> None:
    versions = re.findall(r"^## \[?(\d+\.\d+\.\d+)\]? \((\d{4}-\d{2}-\d{2})\)$", CHANGELOG, re.MULTILINE)
    assert versions[0][0] == trainfit.__version__
    assert [date for _, date in versions] == sorted((date for _, date in versions), reverse=True)


def test_a_description_of_a_published_repository_links_to_the_versions_files() -> None:
    readme = (
        "[a](docs/a.md#b) ![plot](p/x.svg) [web](https://a.b/c) [here](#limits)\n"
        "`[not](a.link)`\n```python\nx[a](b)\n```\n[LICENSE](LICENSE)"
    )
    assert describe(readme, "https://example.org/us/trainfit/", "1.2.3") == (
        "[a](https://example.org/us/trainfit/blob/v1.2.3/docs/a.md#b)"
        " ![plot](https://example.org/us/trainfit/raw/v1.2.3/p/x.svg) [web](https://a.b/c) [here](#limits)\n"
        "`[not](a.link)`\n```python\nx[a](b)\n```\n"
        "[LICENSE](https://example.org/us/trainfit/blob/v1.2.3/LICENSE)"
    )
    assert describe(readme, None, "1.2.3") == (
        "a  [web](https://a.b/c) [here](#limits)\n`[not](a.link)`\n```python\nx[a](b)\n```\nLICENSE"
    )


def test_no_relative_link_is_left_in_the_description() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    relative = [link for link in links if not link.startswith(("https:", "#"))]
    assert len(relative) > 5
    for link in relative:
        assert (ROOT / link.partition("#")[0]).exists(), link
    published = describe(README, "https://example.org/us/trainfit", "1.0.0")
    assert len(re.findall(r"\]\(https://example\.org/us/trainfit/(?:blob|raw)/v1\.0\.0/", published)) == len(
        relative
    )
    for text in (published, describe(README, None, "1.0.0")):
        assert [
            link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("https:", "#"))
        ] == []


def test_python_versions_are_those_of_the_supported_table() -> None:
    classifiers = PROJECT["project"]["classifiers"]
    named = [one.rpartition(" ")[2] for one in classifiers if re.fullmatch(r".* Python :: 3\.\d+", one)]
    assert named == ["3.11", "3.12", "3.13"]
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"
    assert f"| Python | {named[0]} to {named[-1]} |" in (ROOT / "docs/internals/versions.md").read_text()


def test_the_image_has_the_pinned_torch_and_what_the_package_is_built_of() -> None:
    """It cannot be built where tests run."""
    pins = (ROOT / "requirements" / "constraints.txt").read_text()
    torch = re.search(r"^torch==([\d.]+)$", pins, re.MULTILINE)[1]  # pyright: ignore
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"\nFROM pytorch/pytorch:{torch}-cuda" in dockerfile
    kept = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert {"src", "setup.py", "pyproject.toml", "README.md", "LICENSE", "requirements"} <= kept
    assert all((ROOT / name).exists() for name in kept)
    extras = re.search(r"/opt/trainfit\[([\w,]+)\]", dockerfile)[1].split(",")  # pyright: ignore
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
