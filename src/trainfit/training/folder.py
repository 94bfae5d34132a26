"""The run's folder: its layout, its lock, and the compatibility of a resumed run with what was saved.

It holds ``run.json`` (recipe, options, environment), ``data/`` (corpus.py), ``checkpoints/`` (checkpoint.py),
``log.jsonl`` and ``tensorboard/``; with ``keep_best`` ``best.json`` names the best checkpoint. Free of torch,
as interrupted commands need it.
"""

import contextlib
import fcntl
import re
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.recipe import Recipe
from trainfit.spec.stop import NOTHING_SAVED
from trainfit.training import durable
from trainfit.training.options import MAY_CHANGE, TrainOptions

RUN, LOCK, DATA, CHECKPOINTS, BEST = "run.json", ".lock", "data", "checkpoints", "best.json"
RECIPE_MAY_CHANGE = (
    "hardware.gpu", "hardware.price_per_hour", "model.name", "data.train", "data.eval", "data.eval_share",
    "data.format", "data.column", "data.tokenizer", "data.chat_template", "data.separator", "data.split",
    "data.eval_split", "data.subset", "data.max_documents",
)  # fmt: skip
"""Recipe fields without influence on the loss; those of the data are compared as options and by content."""
RANKS_MAY_CHANGE = ("hardware.count", "hardware.nodes", "batch.micro", "batch.accumulate")
"""Recipe fields that, with those of ``parallel``, decide how a step's sequences are divided among ranks."""
CHECKED_ELSEWHERE = ("data.path", "eval_data.path", "tokenizer", "chat_template")
"""Paths may change; corpus.py compares the content."""


Saved = tuple[Path | None, dict[str, Any]]
"""The newest checkpoint of an earlier start, if one was saved, and the content of its ``run.json``."""


def existing(folder: Path) -> list[Path]:
    """Return the finished checkpoints of ``folder``, oldest first."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def name_of(step: int | None) -> str:
    """Return the name of a step's checkpoint; empty for None."""
    return "" if step is None else f"step-{step:08d}"


def write_best(out: Path, best: dict[str, Any] | None) -> None:
    """Write the step, loss and name of the checkpoint with the lowest evaluation loss."""
    if best is not None and (out / CHECKPOINTS / name_of(best["step"])).is_dir():
        named = {"checkpoint": f"{CHECKPOINTS}/{name_of(best['step'])}"}
        durable.replace(out / BEST, durable.as_json({"step": best["step"], "loss": best["loss"]} | named))


def best_checkpoint(out: Path) -> Path | None:
    """Return the checkpoint with the lowest evaluation loss; None: none was kept as the best."""
    if not (out / BEST).is_file():
        return None
    found = durable.read_json(out / BEST)
    named = found.get("checkpoint") if isinstance(found, dict) else None
    path = out / str(named)
    if not isinstance(named, str) or path.parent != out / CHECKPOINTS or path not in existing(path.parent):
        raise InputError("names no checkpoint", "remove the file, or restore it", file=str(out / BEST))
    return path


def how_to_resume(out: Path) -> str:
    """Return the newest checkpoint of a run's folder and how to continue, as the end of a sentence."""
    checkpoints = existing(out / CHECKPOINTS)
    if checkpoints:
        return f"--resume goes on from {checkpoints[-1]}"
    if (out / RUN).is_file():
        return "no checkpoint had been saved: --resume begins with the first step"
    return NOTHING_SAVED


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the folder, made if missing, for this process alone; InputError if another one holds it."""
    if out.exists() and not out.is_dir():
        raise _refused("is a file", "name a folder", out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait for it, or use another folder"
            raise _refused("another process trains in this folder", remedy, out) from None
        yield


def refuse_unusable(options: TrainOptions) -> None:
    """Require a folder of an earlier start to resume, else an empty one; nothing in it is changed.

    A start that failed before its first step leaves only tokenized data.
    """
    out = options.folder
    if out.exists() and not out.is_dir():
        raise _refused("is a file", "name a folder", out)
    holds_run = (out / RUN).is_file()
    if options.resume:
        if not holds_run:
            raise _refused("no run to resume in this folder", "leave --resume out to start one", out)
        return
    if holds_run:
        remedy = "add --resume to go on, or use another folder"
        raise _refused("the folder already holds a run", remedy, out)
    made = {LOCK, DATA} if (out / DATA / durable.MANIFEST).is_file() else {LOCK}
    names = sorted(path.name for path in out.iterdir()) if out.exists() else []
    foreign = [name for name in names if name not in made and not name.startswith(durable.UNFINISHED)]
    if foreign:
        raise _refused(f"the folder already holds {foreign[0]!r}", "use an empty folder", out)


def open_run(recipe: Recipe, options: TrainOptions) -> Saved | None:
    """Return the state to resume from, verified byte by byte; None for a new run. Requires the lock.

    Raises:
        InputError: a new run in a used folder, nothing to resume, a damaged checkpoint, or a different run.
    """
    out = options.folder
    for parent in (out, out / CHECKPOINTS):
        durable.remove_unfinished(parent)
    refuse_unusable(options)
    if not options.resume:
        if (out / DATA).exists():
            durable.remove_folder(out / DATA)
        return None
    newest = next(reversed(existing(out / CHECKPOINTS)), None)
    if newest is not None:
        durable.check_folder(newest)
    run = read_run(newest or out)
    _refuse_difference(run, describe(recipe, options))
    return newest, run


def describe(recipe: Recipe, options: TrainOptions) -> dict[str, Any]:
    """Return recipe and options as ``run.json`` holds them."""
    return {"recipe": recipe.content(), "options": options.model_dump(mode="json")}


def write_run(out: Path, run: dict[str, Any]) -> None:
    """Write ``run.json`` atomically."""
    durable.replace(out / RUN, durable.as_json(run))


def read_run(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's ``run.json``; InputError if it is not what ``train`` wrote."""
    run = durable.read_json(folder / RUN)
    parts = ("recipe", "options", "environment")
    if not isinstance(run, dict) or not all(isinstance(run.get(part), dict) for part in parts):
        raise InputError("not what trainfit wrote", "restore it from a copy", file=str(folder / RUN))
    return {part: run[part] for part in parts}


def _refuse_difference(saved: dict[str, Any], requested: dict[str, Any]) -> None:
    """Refuse a resumed run whose losses could differ from those of an uninterrupted run."""
    # With the defaults of fields that are newer than the run.
    saved = saved | {"recipe": parse(Recipe, saved["recipe"], file=RUN).content()}
    saved |= {"options": _with_defaults(saved["options"])}
    recipe = RECIPE_MAY_CHANGE + (RANKS_MAY_CHANGE if _other_ranks(saved, requested) else ())
    for part, may_change in (("recipe", recipe), ("options", (*MAY_CHANGE, *CHECKED_ELSEWHERE))):
        before, now = (
            {name: value for name, value in _flat(run[part]).items() if value is not None}
            for run in (saved, requested)
        )
        for field in sorted(set(before) | set(now)):
            may = field in may_change or (field.startswith("parallel.") and field != "parallel.tensor")
            if not may and before.get(field) != now.get(field):
                problem = f"the run was started with {before.get(field)!r}"
                remedy = "resume with the same, or start a new run in another folder"
                raise InputError(problem, remedy, field=field, value=now.get(field, "(missing)"))


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Return a run's options with the defaults of fields that are newer than the run."""
    if options.get("schedule") == "cosine" and "min_lr_share" not in options:
        # The older cosine reached a tenth of the rate in the last step.
        options = options | {"schedule": "cosine of an older version"}
    defaults = {
        name: field.default for name, field in TrainOptions.model_fields.items() if not field.is_required()
    }
    plain = {name: value for name, value in defaults.items() if not isinstance(value, BaseModel)}
    data = options.get("data")
    if isinstance(data, dict):  # Fields of a source that are not set are None.
        unset = {"column": "text"} if data.get("kind") == "hub" else {}  # An older version's default.
        options = options | {
            "data": {key: one for key, one in data.items() if one not in (None, unset.get(key))}
        }
    return plain | options


def _other_ranks(saved: dict[str, Any], requested: dict[str, Any]) -> bool:
    """Return whether a resumed run has another number of ranks; refuse other sequences per step."""
    before, now = (parse(Recipe, run["recipe"], file=RUN) for run in (saved, requested))
    if before.mesh.data_ranks == now.mesh.data_ranks:
        return False
    had, have = (one.batch.micro * one.batch.accumulate * one.mesh.data_ranks for one in (before, now))
    if had != have:
        problem = f"a step of the run has {had} sequences on {before.hardware.count} GPUs, and now {have}"
        remedy = "change batch.accumulate so that they stay the same"
        raise InputError(problem, remedy, field="hardware.count", value=now.hardware.count)
    return True


def _flat(data: Any, field: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name."""
    if not isinstance(data, dict):
        return {field: data}
    parts = (_flat(item, f"{field}.{name}".lstrip(".")) for name, item in data.items())
    return dict(ChainMap(*parts))


def _refused(problem: str, remedy: str, out: Path) -> InputError:
    return InputError(problem, remedy, field="out", value=str(out))
