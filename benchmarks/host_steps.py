"""Steps that the host decides, on another machine: measured there, and predicted with its host's calibration.

    python -m benchmarks.host_steps measure OUT.jsonl [--seconds N]
    python -m benchmarks.host_steps predict OUT.jsonl CALIBRATION.json [--ledgers FOLDER]
    python -m benchmarks.host_steps records MEASURED.jsonl CALIBRATION.json OUT.jsonl [--ledgers FOLDER]

``measure`` takes the held-out eager recipes of the accuracy suite in the order of their ids, in one process,
each of seven steps waited for. ``predict`` adds to each line what is expected with the catalog's host and
with that of ``trainfit calibrate --host``, from ledgers by the versions that were measured
(benchmarks/step_time.py). ``records`` writes the same of records of measurements of one GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.step_time import ledger_of, measured
from benchmarks.tables.step_time import steps
from trainfit.catalog.load import gpu
from trainfit.prediction.estimate import estimate
from trainfit.prediction.time.calibrated import using
from trainfit.records import load
from trainfit.spec.printable import say
from trainfit.spec.provenance import DIGEST, commit, digest_of
from trainfit.spec.recipe import Recipe
from trainfit.spec.value import parse

WARMUP, TIMED = 3, 7


def recipe_ids() -> list[str]:
    """Return the ids of held-out eager recipes whose steps the host is expected to decide."""
    some = [one for one in steps() if one.is_held_out and one.host_decides and not one.is_compiled]
    return sorted(one.recipe.id for one in some)


def measure(out: Path, limit_s: float) -> None:
    """Write a line a recipe, until the time is over."""
    import torch

    from trainfit.measurement.feed import measured_batches
    from trainfit.measurement.trial import import_for_steps
    from trainfit.step import assemble
    from trainfit.virtual.trace.process_state import frozen_gc

    begun = time.monotonic()
    import_for_steps()
    recipes = {recipe.id: recipe for recipe, _ in measured()}
    with out.open("w", encoding="utf-8") as file:
        for recipe_id in recipe_ids():
            if time.monotonic() - begun > limit_s:
                break
            step = assemble(recipes[recipe_id], torch.device("cuda", 0))
            taken_s: list[float] = []
            with measured_batches(step, WARMUP + TIMED) as following, frozen_gc():
                for number in range(WARMUP + TIMED):
                    batches = following()
                    torch.cuda.synchronize()
                    before = time.perf_counter()
                    step(batches)
                    torch.cuda.synchronize()
                    if number >= WARMUP:
                        taken_s.append(round(time.perf_counter() - before, 6))
            del step, following, batches
            gc.collect()
            torch.cuda.empty_cache()
            row = {"recipe_id": recipe_id, "step_s": median(taken_s), "samples_s": taken_s}
            file.write(json.dumps(row) + "\n")
            say(f"{recipe_id}: {row['step_s']:.4f} s")


def predict(out: Path, calibration: Path, ledgers: Path | None) -> None:
    """Add the predictions to the lines."""
    recipes = {recipe.id: recipe for recipe, _ in measured()}
    rows = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
    lines = [_line(recipes[row["recipe_id"]], row["samples_s"], calibration, ledgers) for row in rows]
    out.write_text("".join(lines), encoding="utf-8")


def predict_records(source: Path, calibration: Path, out: Path, ledgers: Path | None) -> None:
    """Write a line for each measured step of the records."""
    lines = []
    for record in load(source):
        assert record.measurement is not None
        times = record.measurement.step_times
        if times is not None:
            lines.append(_line(parse(Recipe, record.recipe), times.samples, calibration, ledgers))
    out.write_text("".join(lines), encoding="utf-8")


def _line(recipe: Recipe, samples_s: Sequence[float], calibration: Path, ledgers: Path | None) -> str:
    """Return a step's row: measured, and predicted with the catalog's host and with the calibrated one."""
    ledger, card = ledger_of(recipe, ledgers), gpu(recipe.hardware.gpu)
    without = estimate(recipe, card, ledger)
    with using(calibration):
        found = estimate(recipe, card, ledger)
    bounds = found.bounds["step_s"]
    assert without.time is not None
    row = {
        "recipe_id": recipe.id, "commit": commit(), "versions": ledger.versions,
        "step_s": median(samples_s), "samples_s": samples_s, "predicted_s": without.step_s,
        "calibrated_s": found.step_s, "low_s": bounds.low, "high_s": bounds.high,
        "host_s": without.time.host_s,
    }  # fmt: skip
    return json.dumps(row | {DIGEST: digest_of(row)}) + "\n"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    measuring, predicting, of_records = map(modes.add_parser, ("measure", "predict", "records"))
    of_records.add_argument("measured", type=Path)
    for mode in (measuring, predicting):
        mode.add_argument("out", type=Path)
    measuring.add_argument("--seconds", type=float, default=float("inf"))
    for mode in (predicting, of_records):
        mode.add_argument("calibration", type=Path)
        mode.add_argument("--ledgers", type=Path, metavar="FOLDER")
    of_records.add_argument("out", type=Path)
    options = parser.parse_args()
    if options.mode == "measure":
        measure(options.out, options.seconds)
    elif options.mode == "predict":
        predict(options.out, options.calibration, options.ledgers)
    else:
        predict_records(options.measured, options.calibration, options.out, options.ledgers)


if __name__ == "__main__":
    main()
