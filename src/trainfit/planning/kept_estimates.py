"""Estimates of plans as plain data, and those that are kept below the folder of ledgers."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainfit.ledger.allocator_settings import allocator_settings
from trainfit.planning.answer import Request, Result
from trainfit.prediction import cache as ledgers
from trainfit.prediction.time.calibrated import OwnCalibration
from trainfit.spec.errors import InputError
from trainfit.spec.files import cache_folder
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from trainfit.spec.value import canonical_json

FOLDER = "estimates"
"""Below the folder of ledgers, of which the oldest are evicted likewise."""


def written(result: Result) -> dict[str, Any]:
    """Return a result as plain data."""
    if result.refused is not None:
        error = result.refused
        value = error.value if isinstance(error.value, str | int | float | bool) else None
        fields = {"problem": error.problem, "remedy": error.remedy, "field": error.field, "value": value}
        return {"refused": fields}
    assert result.estimate is not None
    estimated = result.estimate.model_dump(mode="json")
    return {"recipe": result.recipe.content(), "estimate": estimated, "update_s": result.update_s}


def read(recipe: Recipe, data: dict[str, Any]) -> Result:
    """Return the result of what ``written`` returned; ``recipe``: that of the request."""
    if "refused" in data:
        return Result(recipe, None, refused=InputError(**data["refused"]))
    found = Estimate.model_validate_json(json.dumps(data["estimate"]))
    return Result(recipe_from(data["recipe"]), found, data["update_s"])


def _path(request: Request, calibration: OwnCalibration | None) -> Path:
    parts = [
        ledgers.key(request.recipe),
        request.recipe.content(),
        request.key,
        ledgers.estimate_version(),
        allocator_settings(os.environ).expandable_segments,
        "" if calibration is None else calibration.digest,
    ]
    name = hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]
    return cache_folder() / FOLDER / f"{name}.json"


def load(request: Request, calibration: OwnCalibration | None) -> Result | None:
    """Return the kept result of a request; None: there is none, or it is damaged."""
    try:
        return read(request.recipe, json.loads(_path(request, calibration).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Not kept, or damaged: it is estimated again.


def save(request: Request, calibration: OwnCalibration | None, result: Result) -> None:
    """Keep the result of a request, where the folder can be written."""
    path = _path(request, calibration)
    with suppress(OSError):  # A cache that cannot be written is not an error.
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(written(result)), "utf-8")
        part.replace(path)
