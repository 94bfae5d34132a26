"""Predict published multi-GPU runs: tokens a second, and memory, against what their pages print.

``python -m benchmarks.published_runs predict [NAME ...]`` predicts the runs of
``accuracy/published/runs.yaml``, by default all, without a GPU, and writes
``results/published-runs/predicted.jsonl``, a line each. ``show`` prints published and predicted figures, with
errors, and the cause where an error is above 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "accuracy" / "published"
RESULTS = ROOT / "results" / "published-runs" / "predicted.jsonl"
LARGE = 0.1
"""An error above it needs a cause."""
FIGURES = {"tokens_per_s_per_gpu": "tokens/s a GPU", "memory_gib": "memory, GiB"}

Data = dict[str, Any]


class Figure(NamedTuple):
    """A published figure and its prediction."""

    run: Data
    name: str  # A key of FIGURES
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted minus published, over published."""
        return self.predicted / self.published - 1

    @property
    def cause(self) -> str:
        return self.run.get("causes", {}).get(self.name, "")


@cache
def content() -> Data:
    """Return the file of published runs."""
    from trainfit.spec.parsing.plain_data import parse_yaml

    return parse_yaml((FOLDER / "runs.yaml").read_text("utf-8"))


def figures() -> list[Figure]:
    """Return every published figure whose run was predicted, in the file's order."""
    rows = {row["name"]: row for row in _rows()}
    return [
        Figure(run, name, run[name], rows[run["name"]][name])
        for run in content()["runs"]
        for name in FIGURES
        if name in run and run["name"] in rows
    ]


def predicted(run: Data) -> Data:
    """Return the prediction of one run."""
    from trainfit.prediction.estimate import predict
    from trainfit.spec.parsing.recipe_file import recipe_from
    from trainfit.spec.provenance import commit
    from trainfit.spec.units import GIB

    recipe, start = recipe_from(run["recipe"]), time.perf_counter()
    found = predict(recipe)
    assert found.tokens_per_s is not None
    return {
        "name": run["name"],
        "recipe_id": recipe.id,
        "commit": commit(),
        "versions": found.versions,
        "tokens_per_s_per_gpu": round(found.tokens_per_s / found.num_gpus, 1),
        "memory_gib": round(found.peak_reserved_bytes / GIB, 2),
        "allocated_gib": round(found.peak_allocated_bytes / GIB, 2),
        "fits": found.fits,
        "params": found.params,
        "time": None if found.time is None else found.time.model_dump(),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _rows() -> list[Data]:
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []


def _predict(names: list[str]) -> None:
    from trainfit.spec.printable import say

    kept = {row["name"]: row for row in _rows()}
    runs = {run["name"]: run for run in content()["runs"]}
    RESULTS.parent.mkdir(exist_ok=True)
    for name in names or list(runs):
        kept[name] = predicted(runs[name])
        RESULTS.write_text("".join(f"{json.dumps(kept[one])}\n" for one in runs if one in kept), "utf-8")
        say(json.dumps(kept[name]))


def _show() -> None:
    from trainfit.spec.printable import say

    for one in figures():
        say(
            f"{one.run['name']:32} {FIGURES[one.name]:16} {one.published:10,.1f} {one.predicted:10,.1f} "
            f"{one.error:+7.1%}  {one.cause if abs(one.error) > LARGE else ''}"
        )


def main() -> None:
    """Run the command line."""
    os.environ["TRAINFIT_CATALOG"] = str(FOLDER)  # GPUs and links that only these pages describe
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("predict", "show"))
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    _predict(given.names) if given.command == "predict" else _show()


if __name__ == "__main__":
    main()
