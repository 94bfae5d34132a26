"""The run's folder: one process at a time, one run for good, and what a resumed run must have in common with it.

``OUT/``: ``run.json`` (recipe, options, environment), ``data/`` (corpus.py), ``checkpoints/`` (checkpoint.py),
``log.jsonl``, ``tensorboard/``.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.train import checkpoint, durable
from trainfit.train.layout import CHECKPOINTS, DATA, LOCK, RUN, existing
from trainfit.train.options import MAY_CHANGE, TrainOptions

RECIPE_MAY_CHANGE = ("hardware.gpu", "hardware.price_per_hour", "model.name")
"""Fields of the recipe that change no loss."""
CHECKED_ELSEWHERE = ("data.path", "tokenizer")
"""Paths may move; what the files hold is compared in corpus.py."""


@dataclass(frozen=True)
class Saved:
    """What a folder holds of an earlier start. ``checkpoint``: None if it was killed before it saved one."""

    checkpoint: Path | None
    run: dict[str, Any]


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """The folder, made if missing, for this process alone.

    Raises:
        InputError: another process trains there, or it is a file.
    """
    if out.exists() and not out.is_dir():
        raise InputError("is a file", "name a folder", field="out", value=str(out))
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                "another process trains in this folder",
                "wait for it, or use another folder",
                field="out",
                value=str(out),
            ) from None
        yield


def open_run(recipe: Recipe, options: TrainOptions) -> Saved | None:
    """What to resume, checked byte by byte; None for a new run. The caller holds the lock.

    Raises:
        InputError: a new run where one already is; nothing to resume; a damaged checkpoint; another recipe.
    """
    out = options.folder
    for parent in (out, out / CHECKPOINTS):
        durable.remove_unfinished(parent)
    if not options.resume:
        _refuse_used(out)
        return None
    if not (out / RUN).is_file():
        raise InputError(
            "no run to resume in this folder", "leave --resume out to start one", field="out", value=str(out)
        )
    saved = existing(out / CHECKPOINTS)
    newest = saved[-1] if saved else None
    run = checked_run(checkpoint.check(newest), newest / RUN) if newest else read_run(out)
    refuse_difference(run, describe(recipe, options))
    return Saved(newest, run)


def describe(recipe: Recipe, options: TrainOptions) -> dict[str, Any]:
    """What ``run.json`` says of recipe and options."""
    return {"recipe": recipe.content(), "options": options.model_dump(mode="json")}


def write_run(out: Path, run: dict[str, Any]) -> None:
    """Put ``run.json`` there, whole."""
    draft = out / f"{durable.UNFINISHED}{RUN}"
    durable.write_json(draft, run)
    durable.sync(draft)
    os.replace(draft, out / RUN)
    durable.sync(out)


def read_run(out: Path) -> dict[str, Any]:
    """``run.json`` of a folder.

    Raises:
        InputError: it is damaged.
        FileNotFoundError: there is none.
    """
    return checked_run(durable.read_json(out / RUN), out / RUN)


def checked_run(run: Any, path: Path) -> dict[str, Any]:
    """What a ``run.json`` says, if it has the parts of one.

    Raises:
        InputError: it has not.
    """
    parts = ("recipe", "options", "environment")
    if not isinstance(run, dict) or not all(isinstance(run.get(part), dict) for part in parts):
        raise InputError("not what trainfit wrote", "restore it from a copy", file=str(path))
    return {part: run[part] for part in parts}


def refuse_difference(saved: dict[str, Any], asked: dict[str, Any]) -> None:
    """Resuming must give the losses of an uninterrupted run, so what makes losses must be the same.

    Raises:
        InputError: naming the first field that differs.
    """
    for part, may_change in (("recipe", RECIPE_MAY_CHANGE), ("options", (*MAY_CHANGE, *CHECKED_ELSEWHERE))):
        before, now = _flat(saved[part]), _flat(asked[part])
        for field in sorted(set(before) | set(now)):
            if field not in may_change and before.get(field) != now.get(field):
                raise InputError(
                    f"the run was started with {before.get(field)!r}",
                    "resume with the same, or start a new run in another folder",
                    field=field,
                    value=now.get(field, "(missing)"),
                )


def _flat(data: Any, field: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {field: data}
    return {
        key: value
        for name, item in data.items()
        for key, value in _flat(item, f"{field}.{name}".lstrip(".")).items()
    }


def _refuse_used(out: Path) -> None:
    """A new run starts in an empty folder, or one where a start failed before its first step."""
    if (out / RUN).exists():
        raise InputError(
            "the folder already holds a run",
            "add --resume to go on, or use another folder",
            field="out",
            value=str(out),
        )
    if (out / DATA / durable.MANIFEST).is_file():
        durable.remove_folder(out / DATA)
    foreign = sorted(path.name for path in out.iterdir() if path.name != LOCK)
    if foreign:
        raise InputError(
            f"the folder already holds {foreign[0]!r}", "use an empty folder", field="out", value=str(out)
        )
