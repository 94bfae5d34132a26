"""Predict published runs: tokens a second, and memory, against what their pages print.

``python -m evidence.scripts.published_runs predict [NAME ...]`` predicts the runs of ``accuracy/published``,
by default all, without a GPU, and writes them below ``evidence/records/published-runs``, a line each.
``show`` prints published and predicted figures, with errors, and the cause where an error is above 10 %.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "accuracy" / "published"
SEVERAL_HOSTS, ONE_HOST = "runs.yaml", "one_host.yaml"
RESULTS = {
    SEVERAL_HOSTS: ROOT / "evidence" / "records" / "published-runs" / "predicted.jsonl",
    ONE_HOST: ROOT / "evidence" / "records" / "published-runs" / "one-host.jsonl",
}
"""Predictions by the file of their runs."""
MPT = {
    "mpt-125m": (768, 12, 12), "mpt-350m": (1024, 16, 24), "mpt-760m": (1536, 12, 24),
    "mpt-1b": (2048, 16, 24), "mpt-3b": (2560, 20, 32), "mpt-7b": (4096, 32, 32), "mpt-13b": (5120, 40, 40),
}  # fmt: skip
"""Width, heads and layers."""
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
def content(file: str = SEVERAL_HOSTS) -> Data:
    """Return a file of published runs, its tables' rows and likenesses written out."""
    from trainfit.spec.parsing.plain_data import parse_yaml

    found = parse_yaml((FOLDER / file).read_text("utf-8"))
    runs = [_of_row(table, row) for table in found.get("tables", []) for row in table["rows"]]
    by_name: dict[str, Data] = {}
    for run in (*runs, *found["runs"]):
        like = by_name[run["like"]]["recipe"] if "like" in run else {}
        by_name[run["name"]] = {**run, "recipe": {**like, **run["recipe"]}}
    return {**found, "runs": list(by_name.values())}


def is_learned(name: str) -> bool:
    """Return whether rates may be learned from a run; the other half judges them."""
    return hashlib.sha256(name.encode()).digest()[-1] % 2 == 0


def _of_row(table: Data, row: list[Any]) -> Data:
    """Return the run of a table's row: MPT, which has GPT-2's shape, on the eight GPUs of a host."""
    model, seq, micro, accumulate, recompute, tokens_per_s, params = row
    width, heads, layers = MPT[model]
    config = {
        "model_type": "gpt2", "n_embd": width, "n_head": heads, "n_layer": layers, "n_positions": seq,
        "vocab_size": 50368, "activation_function": "gelu",
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    }  # fmt: skip
    recipe = {
        "model": {"config": config},
        "batch": {"micro": micro, "seq": seq, "accumulate": accumulate},
        "precision": "mixed-bf16",
        "attention": "flash",
        "recompute": recompute,
        "hardware": {"gpu": table["gpu"], "count": 8},
    }
    return {
        "name": f"{model}-{seq}-{table['gpu']}-8",
        "source": table["source"],
        "settings": f"{model}, FSDP over 8, {micro} x {seq} x {accumulate} accumulated",
        "recipe": recipe,
        "tokens_per_s_per_gpu": tokens_per_s,
        "params": params,
    }


def figures(file: str = SEVERAL_HOSTS) -> list[Figure]:
    """Return every published figure of a file whose run was predicted, in the file's order."""
    rows = predictions(file)
    return [
        Figure(run, name, run[name], rows[run["name"]][name])
        for run in content(file)["runs"]
        for name in FIGURES
        if name in run and run["name"] in rows
    ]


def predicted(run: Data) -> Data:
    """Return the prediction of one run."""
    from trainfit.prediction.predict import predict
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


def predictions(file: str) -> dict[str, Data]:
    """Return the kept predictions of a file's runs, by name."""
    path = RESULTS[file]
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def _predict(file: str, names: list[str]) -> None:
    from trainfit.spec.printable import say

    kept = predictions(file)
    runs = {run["name"]: run for run in content(file)["runs"]}
    for name in [one for one in runs if one in names or not names]:
        kept[name] = predicted(runs[name])
        lines = [f"{json.dumps(kept[one])}\n" for one in runs if one in kept]
        RESULTS[file].write_text("".join(lines), "utf-8")
        say(json.dumps(kept[name]))


def _show(file: str) -> None:
    from trainfit.spec.printable import say

    for one in figures(file):
        half = "learned from" if is_learned(one.run["name"]) else "held out"
        say(
            f"{one.run['name']:38} {'' if file == SEVERAL_HOSTS else half:13} {FIGURES[one.name]:16} "
            f"{one.published:10,.1f} {one.predicted:10,.1f} {one.error:+7.1%}  "
            f"{one.cause if abs(one.error) > LARGE else ''}"
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
    for file in RESULTS:
        if given.command == "predict":
            _predict(file, given.names)
        else:
            _show(file)


if __name__ == "__main__":
    main()
