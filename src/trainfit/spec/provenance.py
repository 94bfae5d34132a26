"""Origin of evidence: the code's commit and version, the time, and a Record that carries them."""

import functools
import os
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import trainfit
from trainfit.spec.bench import BenchResult
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Record

COMMIT_VARIABLE = "TRAINFIT_COMMIT"
"""Names the commit where the code is a copy without its git folder."""


def commit() -> str | None:
    """Return the package's commit, ``-dirty`` with uncommitted changes; None outside a checkout."""
    return os.environ.get(COMMIT_VARIABLE) or _checked_out(Path(trainfit.__file__).parent)


@functools.cache  # Of the code that runs: a later change to the files is not of this process.
def _checked_out(package: Path) -> str | None:
    # A package installed inside some other project's checkout is not that project's code: it must be tracked.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{head}-dirty" if head and changes else head


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (FileNotFoundError, subprocess.TimeoutExpired):  # No git here: the commit is unknown.
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def installed_version(package: str) -> str | None:
    """Return the version of a package, without importing it; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def now() -> str:
    """Return the time as ISO 8601 in UTC, to the microsecond: ``2026-11-20T23:12:00.000000+00:00``."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def new_bench_record(result: BenchResult) -> Record:
    """Return a Record of a benchmark, which is of no recipe, made now by this code."""
    return _made_now(kind="bench", recipe={}, recipe_id="", bench=result)


def new_record(kind: Literal["predict", "measure", "train"], recipe: Recipe, **fields: Any) -> Record:
    """Return a Record made now by this code; ``fields`` are estimate, measurement, train or tags."""
    return _made_now(kind=kind, recipe=recipe.content(), recipe_id=recipe.id, **fields)


def _made_now(**fields: Any) -> Record:
    return Record(created_at=now(), version=trainfit.__version__, commit=commit(), **fields)
