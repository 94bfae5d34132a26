"""Recipes drawn by a seed, not picked: what predictions are held against measurements with.

``python -m evidence.scripts.accuracy.truth_suite OUT.jsonl --count 200 --seed 1 [--gpu h200]`` draws recipes
over model families, precisions, optimizers, recomputation, adapters, attention, compile, sequence lengths and
sizes, and keeps those that the techniques allow and whose predicted peak lies between ``SMALLEST`` and the
card's size. ``--near-card`` draws recipes whose predicted use is within 3 % of the card's size, on both
sides. ``--technique NAME`` (or ``all``) draws recipes that ask for one technique, half of them for it alone
(truth_techniques.py), or for ``attention: triton`` (``attention_triton``, truth_values.py).

Half of them, chosen by a hash of the recipe, may be learned from; the other half is looked at only at the
end.
"""

import argparse
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from evidence.scripts.accuracy import truth_values
from evidence.scripts.accuracy.held_out import is_held_out
from evidence.scripts.accuracy.truth_techniques import LONGEST_STEP_S, draw_for, drawn_techniques
from trainfit.catalog.load import gpu as find_gpu
from trainfit.catalog.load import model as find_model
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import say
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from trainfit.techniques.registry import check
from trainfit.verification.draws import allowed, draw

NEAR = 0.03
DRAWN_AT_ONCE = 64


def generate(
    count: int, seed: int, gpu: str, *, near_card: bool = False, compiled_share: float = 0.15, jobs: int = 1
) -> Iterator[Recipe]:
    """``count`` different recipes, the same for the same arguments, code and library versions (not jobs)."""
    chance = random.Random(seed)
    found: set[str] = set()
    with ProcessPoolExecutor(jobs) as pool:
        while len(found) < count:
            drawn = [draw(chance, gpu, 0.0 if near_card else compiled_share) for _ in range(DRAWN_AT_ONCE)]
            for recipe in pool.map(_near_card if near_card else _fitting, drawn):
                if recipe is not None and recipe.id not in found and len(found) < count:
                    found.add(recipe.id)
                    say(f"{len(found)} of {count} recipes", err=True)
                    yield recipe


def _fitting(data: dict[str, Any]) -> Recipe | None:
    kept = allowed(data)
    return None if kept is None else _with_room(kept)


def _with_room(kept: tuple[Recipe, Estimate]) -> Recipe | None:
    recipe, estimate = kept
    return (
        recipe if estimate.fits and estimate.peak_device_bytes <= (1 - NEAR) * estimate.device_bytes else None
    )


def generate_for(technique: str, count: int, seed: int, gpu: str, *, jobs: int = 1) -> Iterator[Recipe]:
    """Draw ``count`` different recipes for one technique, the first half for it alone, from its own seed."""
    found: set[str] = set()
    most_bytes = truth_values.MOST_BYTES if technique in truth_values.DRAWS else None
    with ProcessPoolExecutor(jobs) as pool:
        for combined, upto in ((False, -(-count // 2)), (True, count)):
            chance = random.Random(f"{technique} {'combined' if combined else 'alone'} {seed}")
            while len(found) < upto:
                drawn = [_one_for(technique, chance, gpu, combined=combined) for _ in range(4 * jobs)]
                for recipe in pool.map(partial(_quick, most_bytes=most_bytes), drawn):
                    if recipe is not None and recipe.id not in found and len(found) < upto:
                        found.add(recipe.id)
                        say(f"{technique}: {len(found)} of {count} recipes", err=True)
                        yield recipe


def _one_for(technique: str, chance: random.Random, gpu: str, *, combined: bool) -> dict[str, Any]:
    own = truth_values.DRAWS.get(technique)
    if own is not None:
        return own(chance, gpu, combined=combined)
    return draw_for(technique, chance, gpu, combined=combined)


def _quick(data: dict[str, Any], most_bytes: int | None = None) -> Recipe | None:
    """As ``_fitting``, with steps short enough for a suite of every technique.

    A compiled recipe is judged by its eager twin, which is traced in seconds and not in minutes.
    """
    try:
        recipe = recipe_from(data)
        check(recipe)
    except InputError:
        return None
    if shortest_step_s(recipe) > LONGEST_STEP_S:
        return None
    twin = dict(data)
    if twin.pop("compile", False) and "budget" in str(data.get("recompute")):
        twin["recompute"] = "none"
    kept = allowed(twin)
    if kept is None or (kept[1].step_s or 0) > LONGEST_STEP_S or _with_room(kept) is None:
        return None
    if most_bytes is not None and kept[1].peak_allocated_bytes > most_bytes:
        return None
    return recipe


def shortest_step_s(recipe: Recipe) -> float:
    """Return a lower bound of the step time, without a trace, from the published count of weights.

    It is the time of 4 FLOPs a token and weight at the dense bf16 peak.
    """
    row = find_model(recipe.model.config) if isinstance(recipe.model.config, str) else None
    if row is None or any("expert" in key for key in row.config):
        return 0.0  # Not every token meets every weight.
    tokens = recipe.batch.micro * recipe.batch.seq * recipe.batch.accumulate
    peak = find_gpu(recipe.hardware.gpu).peak_flops_per_s["bf16"]
    return 4 * (row.published_params or 0) * tokens / peak


def _near_card(data: dict[str, Any]) -> Recipe | None:
    """Return the recipe with the sequence length that fills the card within NEAR.

    Peaks are near affine in the sequence length.
    """
    for _ in range(4):
        kept = allowed(data)
        if kept is None:
            return None
        recipe, estimate = kept
        if abs(estimate.peak_device_bytes / estimate.device_bytes - 1) <= NEAR:
            return recipe
        fixed = estimate.phases.after_init
        more = (estimate.device_bytes - fixed) / max(1, estimate.peak_device_bytes - fixed)
        seq = int(data["batch"]["seq"] * more) // 8 * 8
        if not 128 <= seq <= 32768:
            return None
        data = {**data, "batch": {**data["batch"], "seq": seq}}
    return None


def _asked(options: argparse.Namespace) -> Iterator[Recipe]:
    """The recipes that the command line asks for.

    Raises:
        InputError: no technique of that name.
    """
    if options.technique is None:
        return generate(
            options.count, options.seed, options.gpu, near_card=options.near_card,
            compiled_share=options.compiled_share, jobs=options.jobs,
        )  # fmt: skip
    every = (*drawn_techniques(), *truth_values.DRAWS)
    if options.technique not in ("all", *every):
        raise InputError(
            "no technique of that name",
            f"write all, or one of {', '.join(every)}",
            field="--technique",
            value=options.technique,
        )
    names = every if options.technique == "all" else (options.technique,)
    return itertools.chain.from_iterable(
        generate_for(name, options.count, options.seed, options.gpu, jobs=options.jobs) for name in names
    )


def main(arguments: list[str] | None = None) -> int:
    """Write the drawn recipes, one a line."""
    parser = argparse.ArgumentParser(
        prog="python -m evidence.scripts.accuracy.truth_suite", description="Draw recipes by a seed."
    )
    parser.add_argument("out", type=Path, help="JSON Lines to write, one recipe each")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--compiled-share", type=float, default=0.15)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--near-card", action="store_true", help="within 3 %% of the card's size, both sides")
    parser.add_argument("--technique", metavar="NAME", help="a technique, or all; --count is of each")
    options = parser.parse_args(arguments)
    try:
        recipes = _asked(options)
    except InputError as error:
        say(f"trainfit: {error}", err=True)
        return EXIT_BAD_INPUT
    num_recipes = held_out = 0
    with options.out.open("w") as out:
        for recipe in recipes:
            out.write(json.dumps(recipe.content()) + "\n")
            out.flush()  # What was found is kept if time ends.
            num_recipes, held_out = num_recipes + 1, held_out + is_held_out(recipe.id)
    say(f"{num_recipes} recipes, {held_out} of them held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
