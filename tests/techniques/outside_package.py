"""Packages of techniques, installed on this process's path: the examples of docs/reference/techniques.md."""

import configparser
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trainfit.prediction import cache
from trainfit.spec.outside import GROUP, outside_techniques
from trainfit.techniques import registry

PAGE = Path(__file__).parents[2] / "docs/reference/techniques.md"
CACHES = (outside_techniques, registry.in_order, cache.outside_version)


def blocks(kind: str) -> list[str]:
    """Return the page's examples of a technique that are of a kind of code."""
    page = PAGE.read_text("utf-8").partition("## Adding one\n")[2]
    return re.findall(rf"```{kind}\n(.*?)```", page, re.S)


@contextmanager
def installed(folder: Path, name: str, code: str, points: Any = None) -> Iterator[None]:
    """Install a package of one module in ``folder``; ``points``: its entry points, by group."""
    (folder / f"{name}.py").write_text(code)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    parser = configparser.ConfigParser()
    parser.read_dict(points or {GROUP: {name: f"{name}:TECHNIQUE"}})
    with (metadata / "entry_points.txt").open("w") as file:
        parser.write(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for cached in CACHES:
            cached.cache_clear()
        yield
    sys.modules.pop(name, None)
    for cached in CACHES:
        cached.cache_clear()
