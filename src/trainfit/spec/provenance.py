"""Origin of evidence: the code's commit and version, and a Record that carries them, as a line with a digest.

The digest is the SHA-256 of the canonical JSON (sorted keys, no spaces) of all fields but itself, so a line
keeps it when a tool writes the same content in another order. Lines of older versions have none.
"""

import contextlib
import functools
import hashlib
import json
import os
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import trainfit
from trainfit.spec.bench import BenchResult
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import HELD_BUCKETS, Record
from trainfit.spec.value import canonical_json, short_hash

DIGEST = "digest"
REPAIR = "restore the file from a copy, or keep its whole rows: trainfit records recover FILE NEW.jsonl"
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


def release(version: str) -> str:
    """Return a version without its build: 2.13.0 of 2.13.0+cu130, 2.13.0+cpu and 2.13.0.

    Versions are compared by it: a CPU build predicts for a CUDA build. The metadata of PyPI's packages leaves
    out the build, which ``torch.__version__`` has.
    """
    return version.partition("+")[0]


def now() -> str:
    """Return the time as ISO 8601 in UTC, to the microsecond: ``2026-11-20T23:12:00.000000+00:00``."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def new_bench_record(result: BenchResult) -> Record:
    """Return a Record of a benchmark, which is of no recipe, made now by this code."""
    return _made_now(kind="bench", recipe={}, recipe_id="", bench=result)


def new_code_record(kind: Literal["train"], **fields: Any) -> Record:
    """Return a Record of the user's own code, which is of no recipe, made now."""
    return _made_now(kind=kind, recipe={}, recipe_id="", **fields)


def new_record(kind: Literal["predict", "measure", "train"], recipe: Recipe, **fields: Any) -> Record:
    """Return a Record made now by this code; ``fields`` are estimate, measurement, train or tags."""
    return _made_now(kind=kind, recipe=recipe.content(), recipe_id=recipe.id, **fields)


def _made_now(**fields: Any) -> Record:
    return Record(created_at=now(), version=trainfit.__version__, commit=commit(), **fields)


def digest_of(data: dict[str, Any]) -> str:
    """Return the digest of a record's plain data, in hex; a digest among it is left out."""
    content = {name: value for name, value in data.items() if name != DIGEST}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def to_line(record: Record) -> str:
    """Return the record as JSON on one line, its digest last; without the line's end."""
    text = record.model_dump_json()
    return f'{text[:-1]},"{DIGEST}":"{digest_of(json.loads(text))}"}}'


def from_line(line: str, where: str) -> Record:
    """Return the record of a line that ``to_line`` wrote, or of one without a digest.

    Raises:
        InputError: not a record, or changed content; ``where`` is its file and line.
    """
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg}", REPAIR, file=where) from None
    except (ValueError, RecursionError):  # An integer of thousands of digits, or thousands of nested lists.
        raise InputError("a number or a nesting that no record has", REPAIR, file=where) from None
    if isinstance(data, dict) and DIGEST in data:
        try:
            found = digest_of(data)
        except ValueError:  # NaN or infinity, which no record holds.
            found = ""
        if data.pop(DIGEST) != found:
            problem = "the content is not what was written (its SHA-256 differs)"
            raise InputError(problem, REPAIR, file=where)
    return parse(Record, with_id_of_today(_with_two_peaks(data)), file=where)


def with_id_of_today(data: Any) -> Any:
    """Return a record's content with the id that its recipe has today; the written one is ``previous_id``.

    Until 2026-11-26 an id was the hash of the recipe as the record holds it, with its defaults, and so it is
    known. A record whose recipe cannot be read (of another version, or of a technique that is not installed)
    stays as it is.
    """
    if not isinstance(data, dict) or not (written := _previous_id(data.get("recipe"))):
        return data
    if data.get("recipe_id") != written:
        return data
    ids = ids_of_today(data["recipe"], data.get("planned"))
    if written not in ids:
        return data
    now = data | {"recipe_id": ids[written], "previous_id": written}
    for part in ("estimate", "measurement"):
        if isinstance(found := data.get(part), dict) and found.get("recipe_id") in ids:
            now[part] = found | {"recipe_id": ids[found["recipe_id"]]}
    return now


def ids_of_today(*recipes: Any) -> dict[str, str]:
    """Return previous id -> id of today of recipes as older records hold them; of those that can be read."""
    found: dict[str, str] = {}
    for recipe in recipes:
        if previous := _previous_id(recipe):
            with contextlib.suppress(InputError):
                found[previous] = parse(Recipe, recipe).id
    return found


def _previous_id(recipe: Any) -> str | None:
    """Return the hash of a written recipe with its defaults; None: there is no recipe, or no JSON one."""
    if not isinstance(recipe, dict) or not recipe:
        return None
    try:
        return short_hash(recipe)
    except ValueError:  # NaN or infinity, which is refused where the record is parsed.
        return None


def _with_two_peaks(data: Any) -> Any:
    """Return a record's content whose estimate, if an older one, has the lower of its two peaks as its own.

    Its peaks were the higher ones, with the lower ones in ``other_peak``; its phases stay the higher ones'.
    """
    estimate = data.get("estimate") if isinstance(data, dict) else None
    if not isinstance(estimate, dict) or "other_peak" not in estimate:
        return data
    lower = estimate["other_peak"]
    now = {name: value for name, value in estimate.items() if name != "other_peak"}
    if isinstance(lower, dict):
        higher = {name: estimate.get(f"peak_{name}_bytes") for name in lower}
        both = {"expected": lower, "possible": higher, "possible_phases": estimate.get("phases")}
        now |= {f"peak_{name}_bytes": size for name, size in lower.items()}
        now["two_peaks"] = both | {"reason": HELD_BUCKETS}
    return data | {"estimate": now}


def lines_of(path: str | Path, content: bytes) -> list[tuple[str, str]]:
    """Return the non-empty lines of a JSON Lines file of records, each with its place ``file:number``."""
    lines: list[tuple[str, str]] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                lines.append((line.decode("utf-8"), where))
            except UnicodeDecodeError:
                remedy = "give a JSON Lines file of records"
                raise InputError("not UTF-8 text", remedy, file=where) from None
    return lines
