"""A run's folder as an export reads it: one checkpoint with its recipe, options and log."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.recipe import Recipe
from trainfit.training import durable
from trainfit.training.checkpoint import STATE
from trainfit.training.folder import CHECKPOINTS, RUN, best_checkpoint, existing, read_run
from trainfit.training.log import LOG
from trainfit.training.options import TrainOptions
from trainfit.training.saved_state import SavedState


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint whose bytes have been verified, with its run's recipe, options and log."""

    folder: Path  # The run's
    checkpoint: Path
    recipe: Recipe
    options: TrainOptions
    environment: dict[str, Any]
    state: SavedState

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def newer(self) -> int | None:
        """Return the step of the newest checkpoint, if that is another one."""
        found = existing(self.checkpoint.parent)
        newest = int(found[-1].name.removeprefix("step-")) if found else self.step
        return newest if newest != self.step else None

    def log(self) -> list[dict[str, Any]]:
        """Return the lines of ``log.jsonl`` up to the checkpoint's step; none if there is no log."""
        path = self.folder / LOG
        if not path.is_file():
            return []
        entries = []
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # The unfinished line of a run that is being trained.
                continue
            if isinstance(entry, dict) and isinstance(entry.get("step"), int) and entry["step"] <= self.step:
                entries.append(entry)
        return entries


def open_saved(folder: Path, step: int | None) -> SavedRun:
    """Return a run's checkpoint, verified byte by byte.

    Args:
        folder: of the run, or of one of its checkpoints.
        step: of the checkpoint; None: the one with the best evaluation if the run kept it, else the newest.

    Raises:
        InputError: no run, no such checkpoint, or a damaged one.
    """
    checkpoint = _checkpoint(folder, step)
    durable.check_folder(checkpoint)
    run = read_run(checkpoint)
    is_of_run = checkpoint.parent.name == CHECKPOINTS
    return SavedRun(
        folder=checkpoint.parent.parent if is_of_run else checkpoint,
        checkpoint=checkpoint,
        recipe=parse(Recipe, run["recipe"], file=str(checkpoint / RUN)),
        options=parse(TrainOptions, run["options"], file=str(checkpoint / RUN)),
        environment=run["environment"],
        state=parse(SavedState, durable.read_json(checkpoint / STATE), file=str(checkpoint / STATE)),
    )


def _checkpoint(folder: Path, step: int | None) -> Path:
    if not folder.is_dir():
        problem = "no such folder" if not folder.exists() else "is a file"
        raise _refused(problem, "name the folder that trainfit train --out wrote", folder)
    if (folder / STATE).is_file():
        if step is not None:
            remedy = "leave --step out, or name the run's folder"
            raise InputError(f"{folder} is one checkpoint", remedy, field="step", value=step)
        return folder
    if not (folder / RUN).is_file():
        raise _refused("no run in this folder", "name the folder that trainfit train --out wrote", folder)
    found = existing(folder / CHECKPOINTS)
    if not found:
        remedy = "train --resume saves one when it ends or is stopped"
        raise _refused("the run has no checkpoint yet", remedy, folder)
    if step is None:
        return best_checkpoint(folder) or found[-1]
    at = {int(path.name.removeprefix("step-")): path for path in found}
    if step not in at:
        steps = ", ".join(map(str, at))
        raise InputError(
            f"no checkpoint of this step in {folder}", f"use one of {steps}", field="step", value=step
        )
    return at[step]


def _refused(problem: str, remedy: str, folder: Path) -> InputError:
    return InputError(problem, remedy, field="RUN", value=str(folder))
