"""Answers of the page: plain data of a prediction, its course of memory, a plan and advice; and those kept.

An answer is kept on disk by its question, the sources of this package and the libraries' versions, so that it
is given again in a few milliseconds, by any later server too.
"""

import gzip
import json
import os
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from trainfit.api.calls import predict_recipe
from trainfit.api.planned import planned
from trainfit.api.plans import given_fields, plan_recipe
from trainfit.api.results import Prediction
from trainfit.explanation.course import course_of_explained
from trainfit.explanation.peak import explained
from trainfit.prediction import cache as ledgers
from trainfit.prediction.versions import LIBRARIES
from trainfit.report import prediction_text, words
from trainfit.report.precision import meaning
from trainfit.spec.files import cache_folder, write_bytes
from trainfit.spec.parsing.recipe_file import flat, written
from trainfit.spec.plan import Advice, Found
from trainfit.spec.plan import written as as_written
from trainfit.spec.provenance import installed_version
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CATEGORIES
from trainfit.spec.value import short_hash

Say = Callable[[str], None]
NUM_MOMENTS = 160
"""Moments of a course of memory: more than a plot of 800 pixels shows apart."""
NUM_LARGEST = 4
ENDING, MAX_KEPT = ".answer.gz", 1000
NOT_SET = ("model.config", "model.name")
"""Fields that a command names as its argument."""


def key(question: str, content: Any) -> str:
    """Return the name under which the answer to a question is kept."""
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return f"{question}-{short_hash([content, _version(), ledgers.outside_version(), allocator])}"


@cache
def _version() -> list[Any]:
    sources = sorted(ledgers.sources(()).items())
    return [
        short_hash([[name, path.read_text(encoding="utf-8", errors="replace")] for name, path in sources]),
        {name: installed_version(name) for name in LIBRARIES},
    ]


def _path(name: str) -> Path:
    return cache_folder() / f"{name}{ENDING}"


def kept(name: str) -> dict[str, Any] | None:
    """Return a kept answer; None: there is none, or it is damaged."""
    try:
        return json.loads(gzip.decompress(_path(name).read_bytes()))
    except (OSError, ValueError, EOFError):
        return None


def keep(name: str, answer: dict[str, Any]) -> None:
    """Keep an answer, evicting the oldest. A cache that cannot be written is not an error."""
    try:
        write_bytes(_path(name), gzip.compress(json.dumps(answer).encode(), 5, mtime=0))
        ledgers.evict(f"*{ENDING}", MAX_KEPT)
    except OSError:
        return


def prediction(recipe: Recipe) -> dict[str, Any]:
    """Return the answer to whether a recipe fits: its estimate, and the words of ``trainfit predict``."""
    found = predict_recipe(recipe)
    return {**_of_prediction(found), **described(recipe)}


def _of_prediction(found: Prediction) -> dict[str, Any]:
    recipe = found.recipe
    shown = {*found.notes, *found.warnings}
    return {
        "estimate": found.model_dump(mode="json"),
        "highest": found.highest.model_dump(mode="json"),
        "headroom_bytes": found.headroom_bytes,
        "verdict": prediction_text.verdict(recipe, found),
        "speed": prediction_text.speed(recipe, found),
        "cost": prediction_text.cost(recipe, found),
        "compiling": prediction_text.compiling(found),
        "two_peaks": prediction_text.two_peaks(found),
        "precision": meaning(recipe),
        "parameters": words.parameters(found),
        "versions": words.holds_for(found.versions),
        "notes": list(found.notes),
        "assumptions": [line for line in found.assumptions if line not in shown],
    }


def described(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe in words, as a file and as a command."""
    return {
        "subject": words.describe(recipe),
        "recipe_id": recipe.id,
        "yaml": written(recipe),
        "command": command(recipe),
    }


def command(recipe: Recipe) -> str:
    """Return the command line that predicts a recipe; of a model without a name, of the saved recipe."""
    if not isinstance(recipe.model.config, str):
        return "trainfit predict recipe.yaml"
    changed = flat(recipe.model_dump(mode="json", exclude_defaults=True))
    short = {"hardware.gpu": "--gpu", "hardware.count": "--count", "batch.micro": "--batch",
             "batch.seq": "--seq", "precision": "--precision"}  # fmt: skip
    parts = ["trainfit", "predict", recipe.model.config]
    for name, value in changed.items():
        if name in short:
            parts += [short[name], str(value)]
        elif name not in NOT_SET:
            parts += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(parts)


def course(recipe: Recipe) -> dict[str, Any]:
    """Return the course of memory through the step that has the peak.

    Holders are numbered, since few names recur in many moments.
    """
    built, _ = planned(recipe)
    found = course_of_explained(explained(built), NUM_MOMENTS)
    used = [name for name in CATEGORIES if any(getattr(one.alive, name) for one in found.moments)]
    names: dict[str, int] = {}
    largest = [
        [[names.setdefault(name, len(names)), size] for name, size in one.largest[:NUM_LARGEST]]
        for one in found.moments
    ]
    return {
        "at": [one.at for one in found.moments],
        "phase": [one.phase for one in found.moments],
        "alive": {name: [getattr(one.alive, name) for one in found.moments] for name in used},
        "largest": largest,
        "names": list(names),
        "phases": [one.model_dump() for one in found.phases],
        "is_timed": found.is_timed,
        "unsplit_bytes": found.unsplit_bytes,
        "capacity_bytes": found.capacity_bytes,
        "peak": found.moments.index(found.peak),
    }


def advice(recipe: Recipe, say: Say) -> dict[str, Any]:
    """Return the changes and the GPUs with which a recipe fits."""
    found: Advice = predict_recipe(recipe).advice(say)
    hardware = [one for one in (found.gpu, found.gpus) if one is not None]
    return {
        "changes": [_found(one) for one in found.changes],
        "hardware": [_found(one) for one in hardware],
        "is_complete": found.is_complete,
    }


def plan(recipe: Recipe, options: dict[str, Any], fixed: list[str], say: Say) -> dict[str, Any]:
    """Return the fastest recipes that fit, the frontier, and why other choices lost.

    Args:
        options: ``tune``, ``keep_quality`` and ``memory_gib`` as ``trainfit plan`` takes them.
        fixed: fields that stay as they are.
    """
    found = plan_recipe(recipe, given_fields({}, []) + fixed, processes=0, say=say, **options)
    best = found.found[0] if found.found else None
    base = None if best is None else best.recipe
    return {
        "found": [_found(one, base) for one in found.found],
        "frontier": [_found(one, base) for one in found.frontier],
        "least": None if found.least is None else _found(found.least),
        "rejected": [one.model_dump() for one in found.rejected],
        "limit_bytes": found.limit_bytes,
        "usable_bytes": found.usable_bytes,
        "num_ranked": found.num_ranked,
        "num_traced": found.num_traced,
        "assumed": found.assumed,
    }


def _found(one: Found, base: dict[str, Any] | None = None) -> dict[str, Any]:
    estimate = one.estimate
    content = flat(one.recipe)
    before = {} if base is None else flat(base)
    return {
        "recipe": one.as_recipe().model_dump(mode="json", exclude_defaults=True),
        "changes": list(one.changes),
        "differs": [as_written(name, value) for name, value in content.items() if before.get(name) != value]
        if base is not None
        else list(one.changes),
        "numerics": list(one.numerics),
        "device_bytes": estimate.highest.device,
        "host_bytes": estimate.host_bytes,
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "dollars_per_million": estimate.cost and estimate.cost.per_million_tokens,
        "fits": estimate.fits,
    }
