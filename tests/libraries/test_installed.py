"""The environment holds each required library in the required version."""

from importlib.metadata import version
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
PINS = [
    line.split("==")
    for name in ("libraries.txt", "libraries-no-deps.txt")
    for line in (REQUIREMENTS / name).read_text().splitlines()
    if "==" in line
]


@pytest.mark.parametrize(("library", "required"), PINS, ids=[name for name, _ in PINS])
def test_library_has_the_required_version(library: str, required: str) -> None:
    assert version(library.partition("[")[0]) == required
