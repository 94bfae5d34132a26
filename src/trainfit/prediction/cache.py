"""Cache of ledgers on disk, by recipe, code and library versions. Imports torch only to trace one."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from trainfit.catalog.names import own_files
from trainfit.ledger import file as ledger_file
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.versions import LIBRARIES
from trainfit.spec.files import cache_folder
from trainfit.spec.hardware import Gpu
from trainfit.spec.outside import outside_techniques
from trainfit.spec.pipeline import Stage
from trainfit.spec.provenance import installed_version
from trainfit.spec.recipe import Recipe
from trainfit.spec.value import canonical_json
from trainfit.virtual import torch_internals

PACKAGE = Path(__file__).parents[1]
SOURCES = {".py", ".json", ".toml"}
NOT_OF_AN_ESTIMATE = (
    "__init__.py", "__main__.py", "api/", "bench/", "calibration/", "cli/", "explanation/", "integrations/",
    "measurement/", "records.py", "report/", "rl/answers.py", "rl/environments/", "rl/evaluation.py",
    "rl/estimate/recorded.py", "rl/loop.py", "rl/measure.py", "rl/objectives/", "rl/queue.py",
    "rl/stop_tokens.py", "sweeps/", "training/", "verification/", "web/",
)  # fmt: skip
"""Sources that no estimate depends on, predicted or planned. New ones count as those that decide it."""
NOT_OF_A_LEDGER = (
    *NOT_OF_AN_ESTIMATE, "catalog/calibrations/", "catalog/rates.", "flops/", "planning/", "user/",
    "prediction/bounds.py", "prediction/communication.py", "prediction/compilation.py",
    "prediction/device_overhead.py", "prediction/kept_peaks.py",
    "prediction/estimate.py", "prediction/evaluation.py", "prediction/evaluation_code.py",
    "prediction/pipeline/", "prediction/machine.py", "prediction/predict.py", "prediction/time/",
    "prediction/user_step.py", "rl/estimate/estimate.py", "rl/estimate/lengths.py",
    "rl/estimate/levers.py", "rl/estimate/times.py", "rl/shares.py",
)  # fmt: skip
"""Sources that no ledger depends on."""
MAX_LEDGERS = 500
_may_trace: ContextVar[bool] = ContextVar("may_trace", default=True)


class NotKeptError(Exception):
    """A ledger is not kept, and must not be traced here (``only_kept``)."""


@contextmanager
def only_kept() -> Iterator[None]:
    """Within it a ledger that is not kept raises NotKeptError, so that nothing imports torch."""
    token = _may_trace.set(False)
    try:
        yield
    finally:
        _may_trace.reset(token)


def _require_tracing() -> None:
    if not _may_trace.get():
        raise NotKeptError


def key(recipe: Recipe, *, deterministic: bool = False, stage: Stage | None = None, kind: str = "") -> str:
    """Thirty-two hex digits: equal for recipes whose steps are equal, whatever name, weights or seed.

    ``deterministic``, ``stage``: as ``trace`` takes them. ``kind``: of what is traced; empty: the step.
    """
    content = recipe.content()
    del content["seed"], content["hardware"]["price_per_hour"]
    del content["model"]["name"], content["model"]["weights"]
    content["data"] = content["data"]["pack"]
    libraries = {name: installed_version(name) for name in LIBRARIES}
    parts = [content, deterministic, code_version(), libraries, outside_version(), *(stage or ())]
    parts += [kind] if kind else []
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]


def path_of(
    recipe: Recipe, *, deterministic: bool = False, stage: Stage | None = None, kind: str = ""
) -> Path:
    """Return the file that a recipe's ledger is kept in."""
    return cache_folder() / f"{key(recipe, deterministic=deterministic, stage=stage, kind=kind)}.json.gz"


def load(
    recipe: Recipe, *, deterministic: bool = False, stage: Stage | None = None, kind: str = ""
) -> Ledger | None:
    """The ledger of an equal recipe, if one is kept and whole."""
    path = path_of(recipe, deterministic=deterministic, stage=stage, kind=kind)
    try:
        ledger = ledger_file.load(path)
        ledger.kept_in = path.name
        return ledger
    except ValueError:
        with suppress(
            OSError
        ):  # Damaged: trace again. Where it cannot be removed (a read-only folder) it is not read.
            path.unlink(missing_ok=True)
        return None


def save(
    recipe: Recipe, ledger: Ledger, *, deterministic: bool = False, stage: Stage | None = None, kind: str = ""
) -> None:
    """Store a ledger, evicting the oldest. A cache that cannot be written is not an error."""
    path = path_of(recipe, deterministic=deterministic, stage=stage, kind=kind)
    try:
        ledger_file.save(ledger, path)
        ledger.kept_in = path.name
        evict("*.json.gz", MAX_LEDGERS)
    except OSError:
        return


def evict(pattern: str, most: int) -> None:
    """Remove the oldest files of the cache's folder that match a pattern, so that ``most`` are kept.

    Raises:
        OSError: another process removes files, or the folder is read-only.
    """
    kept = sorted(cache_folder().glob(pattern), key=lambda path: path.stat().st_mtime)
    for path in kept[:-most]:
        path.unlink(missing_ok=True)


def loaded_or_traced(
    recipe: Recipe,
    gpu: Gpu,
    *,
    use_cache: bool = True,
    deterministic: bool = False,
    shorten: bool = False,
    stage: Stage | None = None,
) -> Ledger:
    """Return the kept ledger of a recipe, or of one stage of its pipeline; where none is kept, trace it.

    Args:
        gpu: the catalog's row of the recipe's GPU.
        shorten: as ``trace`` takes it.
    """
    kept = load(recipe, deterministic=deterministic, stage=stage) if use_cache else None
    if kept is not None:
        return kept
    _require_tracing()
    torch_internals.require(*_parts_of(recipe))  # Before an import of one that is gone fails.
    from trainfit.prediction.trace import trace, trace_whole

    shorten = shorten and trace_whole(recipe)
    ledger = trace(recipe, gpu, deterministic=deterministic, shorten=shorten, stage=stage)
    if not (shorten and ledger.repeats):  # A shortened one is no prediction.
        save(recipe, ledger, deterministic=deterministic, stage=stage)
    return ledger


def kept_or(
    recipe: Recipe,
    trace: Callable[[], Ledger],
    *,
    kind: str,
    use_cache: bool = True,
    deterministic: bool = False,
) -> Ledger:
    """Return the kept ledger of a kind; where none is kept, call ``trace`` and keep it."""
    kept = load(recipe, deterministic=deterministic, kind=kind) if use_cache else None
    if kept is not None:
        return kept
    _require_tracing()
    torch_internals.require(*_parts_of(recipe))
    ledger = trace()
    save(recipe, ledger, deterministic=deterministic, kind=kind)
    return ledger


def _parts_of(recipe: Recipe) -> list[str]:
    """Return the parts whose private names a recipe's trace relies on."""
    needed = {
        "tracing": True,
        "operators": True,
        "models": recipe.model.implementation == "hf",
        "ranks": recipe.hardware.count > 1,
        "compiler": bool(recipe.compile),
    }
    return [part for part, is_needed in needed.items() if is_needed]


@cache
def outside_version() -> str:
    """Return a hash of the techniques and catalog rows that are not this package's."""
    modules = sorted({one.apply.__module__ for one in outside_techniques()})
    sources = [Path(file) for name in modules if (file := sys.modules[name].__file__)]
    digest = hashlib.sha256()
    for path in [*sources, *own_files()]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def code_version() -> str:
    """Return a hash of the source that decides a ledger."""
    return _hash_without(NOT_OF_A_LEDGER)


@cache
def estimate_version() -> str:
    """Return a hash of the source that decides an estimate, also a planned one."""
    return _hash_without(NOT_OF_AN_ESTIMATE)


def sources(excluded: tuple[str, ...]) -> dict[str, Path]:
    """Return our source files by their path in the package, without those whose path begins so."""
    files = (path for path in sorted(PACKAGE.rglob("*.*")) if path.suffix in SOURCES)
    found = {path.relative_to(PACKAGE).as_posix(): path for path in files}
    return {name: path for name, path in found.items() if not name.startswith(excluded)}


def _hash_without(excluded: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name, path in sources(excluded).items():
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()
