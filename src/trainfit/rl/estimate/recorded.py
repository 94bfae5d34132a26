"""The lengths that a training run recorded, and the times that it measured with them. No torch here.

``train`` writes them to the run's folder: ``rollouts.jsonl`` has lengths and times of each rollout, and
``log.jsonl`` the times of the updates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from trainfit.rl.estimate.lengths import Lengths, Recorded
from trainfit.rl.estimate.names import SCORING, UPDATE
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import LoopPart, LoopTime
from trainfit.training.log import LOG, ROLLOUTS

ROLLOUT = "rollout"
MOST = 100
"""Rollouts that are read at most, the last ones."""
AGAIN = "train with this version, or give --mean-new"


def read(path: Path, recipe: Recipe) -> Recorded:
    """Return what a run recorded; its first rollout, in which kernels are loaded, is left out if it has more.

    Args:
        path: the run's folder, or its ``rollouts.jsonl``.

    Raises:
        InputError: there are no lengths, or they are not those of the recipe's rollouts.
    """
    file = path / ROLLOUTS if path.is_dir() else path
    lines = [one for one in _lines(file) if one.get("kind") == ROLLOUT]
    if not lines:
        raise InputError("no line of a rollout", "give the folder of a policy's run", file=str(file))
    taken = (lines[1:] or lines)[-MOST:]
    rollouts = tuple(_lengths(one, recipe, file) for one in taken)
    mean = fmean(length for one in rollouts for length in one.completions)
    count = f"{len(rollouts):,} rollout{'s' * (len(rollouts) > 1)}"
    words = f"lengths recorded in {path}: {mean:,.4g} tokens on average over {count}"
    log = file.with_name(LOG)
    steps = {one["step"]: one for one in _lines(log) if one.get("kind") == "step"} if log.is_file() else {}
    return Recorded(words, rollouts, _measured(taken, rollouts, steps, recipe, words))


def _lines(file: Path) -> Iterable[dict[str, Any]]:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", "give the folder of a run", file=str(file)) from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            where = f"{file}:{number}"
            raise InputError("the line is not what train wrote", "give the folder of a run", file=where)
        yield entry


def _lengths(line: Mapping[str, Any], recipe: Recipe, file: Path) -> Lengths:
    policy = recipe.objective
    assert isinstance(policy, Policy)
    found = list[list[int]]()
    for name, most, of in (
        ("prompt_lengths", policy.max_prompt, "max_prompt"),
        ("lengths", policy.max_new, "max_new"),
    ):
        values = line.get(name)
        if not values:
            raise InputError("the run recorded no lengths", AGAIN, field=name, file=str(file))
        if not isinstance(values, list) or not all(type(one) is int and one > 0 for one in values):
            raise InputError("not lengths in tokens", AGAIN, field=name, file=str(file))
        if len(values) != policy.completions:
            problem = f"{len(values)} completions a rollout, the recipe has {policy.completions}"
            raise InputError(problem, "give the run's own recipe", field=name, file=str(file))
        if max(values) > most:
            problem = f"{max(values)} tokens, objective.{of} is {most}"
            raise InputError(problem, "give the run's own recipe", field=name, file=str(file))
        found.append(values)
    return Lengths(*found)


def _measured(
    taken: list[dict[str, Any]],
    rollouts: tuple[Lengths, ...],
    steps: Mapping[int, Mapping[str, Any]],
    recipe: Recipe,
    words: str,
) -> LoopTime | None:
    """Return the mean loop of the rollouts; None: some update is not in the log, or was throttled."""
    policy = recipe.objective
    assert isinstance(policy, Policy)
    updates = [
        [steps.get(first + one, {}) for one in range(policy.updates_per_rollout)]
        for first in (line["step"] for line in taken)
    ]
    if any("step_s" not in one or one.get("held_back") for each in updates for one in each):
        return None
    num_loops = len(rollouts)
    new_tokens = sum(sum(one.completions) for one in rollouts) / num_loops
    tokens = new_tokens + sum(sum(one.prompts) for one in rollouts) / num_loops
    rollout_s, scoring_s = (fmean(one[name] for one in taken) for name in ("rollout_s", "scoring_s"))
    update_s = fmean(sum(one["step_s"] for one in each) for each in updates)
    num_updates = policy.updates_per_rollout
    parts = (
        LoopPart(name=ROLLOUT, calls=1, seconds=rollout_s, tokens=round(new_tokens)),
        LoopPart(name=SCORING, calls=1, seconds=scoring_s, tokens=round(tokens)),
        LoopPart(name=UPDATE, calls=num_updates, seconds=update_s, tokens=round(tokens)),
    )
    seconds = sum(one.seconds for one in parts)
    return LoopTime(
        lengths=words,
        mean_new=new_tokens / policy.completions,
        seconds=seconds,
        new_tokens_per_s=new_tokens / seconds if seconds else None,
        parts=parts,
    )
