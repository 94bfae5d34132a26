"""Predict anew the step time of every recipe that was measured on one H200.

    python -m evidence.scripts.step_time evidence/records/step-time/predicted.jsonl [--jobs N]
        [--eager | --compiled] [--ledgers FOLDER]

writes a line a recipe: the expected step, its bounds and its parts, in seconds, with the commit, the library
versions and a digest. No GPU and no network are needed. What a recipe's operations are is kept in the ledger
cache (TRAINFIT_CACHE), so a second run takes seconds of the processor, not minutes. With ``--ledgers``
nothing is traced: FOLDER has each recipe's ledger, ID.json.gz, as the measured versions trace it. Recipes
that cannot be predicted here are named, and the command then exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from evidence.scripts.accuracy.held_out import is_held_out
from evidence.scripts.tables.joined import SUITE, join, records
from trainfit.ledger.file import load
from trainfit.ledger.ledger import Ledger
from trainfit.spec.parsing.parse import parse
from trainfit.spec.printable import say
from trainfit.spec.provenance import DIGEST, commit, digest_of
from trainfit.spec.recipe import Recipe

Data = dict[str, Any]


def measured() -> Iterator[tuple[Recipe, float]]:
    """Yield the accuracy suite's recipes with their measured steps: eager ones first, learned from first.

    Gemma 2 counts with eager attention alone: the transformers that was measured ran others with SDPA, newer
    ones do not.
    """
    found = [
        (one.recipe, one.measured.step_s)
        for one in join(record for record in records(SUITE) if record.measurement is not None)
        if one.measured and one.measured.step_s and one.on_its_device and one.recipe.hardware.count == 1
        if "gemma-2-" not in str(one.recipe.model.config) or one.recipe.attention == "eager"
    ]
    yield from sorted(found, key=_order)


def _order(row: tuple[Recipe, float]) -> tuple[bool, bool, str]:
    recipe = row[0]
    return recipe.compile is not False, is_held_out(recipe.id), recipe.id


def ledger_of(recipe: Recipe, folder: Path | None) -> Ledger:
    """Return a recipe's ledger: that of a folder, or from the cache or a trace."""
    if folder is not None:
        return load(folder / f"{recipe.id}.json.gz")
    from trainfit.prediction import predict

    return predict.ledger_of(recipe)


def predicted(content: Data, folder: Path | None = None) -> Data | str:
    """Return a recipe's row, or why it has none: the step's time as ``predict`` has it, memory left out."""
    from trainfit.prediction.bounds import bounds
    from trainfit.prediction.machine import machine_of
    from trainfit.prediction.time.roofline import roofline

    recipe = parse(Recipe, content)
    try:
        ledger = ledger_of(recipe, folder)
    except Exception as error:  # One recipe's failure is to be seen, and the others predicted.
        return f"{recipe.id}: {type(error).__name__}: {error}"
    machine = machine_of(recipe.hardware)
    found = roofline(ledger, machine)
    assert found is not None
    printed = bounds(found, machine, recipe)["step_s"]
    row: Data = {
        "recipe_id": recipe.id,
        "commit": commit(),
        "versions": ledger.versions,
        "step_s": found.expected.total,
        "low_s": printed.low,
        "high_s": printed.high,
        "parts": found.expected.model_dump(),
    }
    return row | {DIGEST: digest_of(row)}


def predict_all(into: Path, recipes: list[Recipe], jobs: int, folder: Path | None = None) -> bool:
    """Write the rows of the recipes; return whether each has one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    into.parent.mkdir(parents=True, exist_ok=True)
    whole = True
    with (
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
        into.open("w", encoding="utf-8") as out,
    ):
        rows = pool.map(predicted, [recipe.content() for recipe in recipes], repeat(folder))
        for number, (recipe, row) in enumerate(zip(recipes, rows, strict=True), 1):
            if isinstance(row, str):
                whole = False
                say(row, err=True)
                continue
            out.write(json.dumps(row) + "\n")
            out.flush()
            say(f"[{number}/{len(recipes)}] {recipe.id}: {row['step_s']:.4f} s")
    return whole


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--ledgers", type=Path, metavar="FOLDER", help="their ledgers, which are not traced then"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--eager", action="store_true", help="only recipes that are not compiled")
    which.add_argument("--compiled", action="store_true", help="only recipes that are compiled")
    chosen = parser.parse_args()
    recipes = [
        recipe
        for recipe, _ in measured()
        if not (chosen.compiled if recipe.compile is False else chosen.eager)
    ]
    sys.exit(0 if predict_all(chosen.out, recipes, chosen.jobs, chosen.ledgers) else 1)


if __name__ == "__main__":
    main()
