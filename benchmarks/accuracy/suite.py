"""Many recipes predicted, side by side in processes: what ``measure.suite`` measures, for the same report.

``python -m benchmarks.accuracy.suite recipes.jsonl records.jsonl [--jobs 8] [--tag NAME]``

Enters: one recipe a line. Leaves: one Record a line, in the order of the recipes. Needs torch, transformers and
peft (for adapters), no GPU.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from trainfit.prediction.estimate import predict
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.printable import say
from trainfit.spec.provenance import new_record
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import read_recipes
from trainfit.spec.record_line import append_line, check_whole
from trainfit.spec.result import Estimate


def main(arguments: list[str] | None = None) -> int:
    """Predict them all; exit code 0, 65 for bad input, 70 if a prediction failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.suite", description="Predict many recipes."
    )
    parser.add_argument("recipes", type=Path, help="JSON Lines, one recipe each")
    parser.add_argument("records", type=Path, help="JSON Lines, records are appended")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--tag", action="append", default=[], help="put into each record")
    options = parser.parse_args(arguments)
    try:
        recipes = read_recipes(options.recipes)
        if options.records.is_file():
            check_whole(options.records, options.records.read_bytes())
    except InputError as error:
        say(f"trainfit: {error}", err=True)
        return EXIT_BAD_INPUT
    began, failed = time.monotonic(), 0
    with ProcessPoolExecutor(options.jobs, initializer=_without_device) as pool:
        for recipe, outcome in zip(recipes, pool.map(_predict, recipes), strict=True):
            if isinstance(outcome, str):
                failed += 1
                say(f"{recipe.id} {recipe.model.display_name}: {outcome}")
                continue
            append_line(
                options.records, new_record("predict", recipe, estimate=outcome, tags=tuple(options.tag))
            )
    say(f"{len(recipes) - failed} of {len(recipes)} predicted in {time.monotonic() - began:.0f} s")
    return 70 if failed else 0


def _without_device() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # Before torch is imported: fakes compute nothing.
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # Autograd would make a CUDA context, half a GB, in every process.
    )


def _predict(recipe: Recipe) -> Estimate | str:
    try:
        return predict(recipe)
    except InputError as error:
        return f"refused: {error}"
    except Exception as error:  # One recipe's failure is a line; the others go on, the exit code tells.
        return f"failed: {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
