"""Steps measured on machines whose host was calibrated, predicted with the catalog's host and with theirs.

    python -m evidence.scripts.host_steps records MEASURED.jsonl CALIBRATION.json OUT.jsonl [--ledgers FOLDER]
    python -m evidence.scripts.host_steps predict OUT.jsonl CALIBRATION.json [--ledgers FOLDER]

``records`` writes a line for each measured step of records (``python -m evidence.scripts.several_gpus
measure``); ``predict`` writes the lines of evidence/records/step-time/other-host.jsonl anew, which were
measured otherwise. The ledgers are by the versions that were measured (evidence/scripts/step_time.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from evidence.scripts.step_time import ledger_of, measured
from trainfit.prediction.estimate import estimate
from trainfit.prediction.machine import machine_of
from trainfit.prediction.time.calibrated import own_calibration
from trainfit.records import load
from trainfit.spec.parsing.parse import parse
from trainfit.spec.provenance import DIGEST, commit, digest_of
from trainfit.spec.recipe import Recipe


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
    ledger = ledger_of(recipe, ledgers)
    without, found = (
        estimate(recipe, machine_of(recipe.hardware, own), ledger)
        for own in (None, own_calibration(calibration))
    )
    bounds, catalog_bounds = found.bounds["step_s"], without.bounds["step_s"]
    assert without.time is not None
    row = {
        "recipe_id": recipe.id, "commit": commit(), "versions": ledger.versions,
        "step_s": median(samples_s), "samples_s": samples_s, "predicted_s": without.step_s,
        "calibrated_s": found.step_s, "low_s": bounds.low, "high_s": bounds.high,
        "catalog_low_s": catalog_bounds.low, "catalog_high_s": catalog_bounds.high,
        "host_s": without.time.host_s,
    }  # fmt: skip
    return json.dumps(row | {DIGEST: digest_of(row)}) + "\n"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    predicting, of_records = map(modes.add_parser, ("predict", "records"))
    of_records.add_argument("measured", type=Path)
    predicting.add_argument("out", type=Path)
    for mode in (predicting, of_records):
        mode.add_argument("calibration", type=Path)
        mode.add_argument("--ledgers", type=Path, metavar="FOLDER")
    of_records.add_argument("out", type=Path)
    options = parser.parse_args()
    if options.mode == "predict":
        predict(options.out, options.calibration, options.ledgers)
    else:
        predict_records(options.measured, options.calibration, options.out, options.ledgers)


if __name__ == "__main__":
    main()
