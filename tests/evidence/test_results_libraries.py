"""What evidence/pages/libraries.md says of its records."""

import json
from statistics import median

from evidence.scripts.tables.joined import join, records
from evidence.scripts.tables.libraries import SCRIPTS

BY_SCRIPT = {
    name: {
        one["script"]: one for one in map(json.loads, (SCRIPTS / f"{name}.jsonl").read_text().splitlines())
    }
    for name in ("predicted", "runs")
}


def test_peaks_of_scripts() -> None:
    errors = {
        name: BY_SCRIPT["predicted"][name]["estimate"]["peak_allocated_bytes"] / found["peak_allocated_bytes"]
        - 1
        for name, found in BY_SCRIPT["runs"].items()
    }
    worst = max(errors, key=lambda name: abs(errors[name]))
    assert (worst, round(abs(errors[worst]), 5)) == ("trl_dpo", 0.00052)
    assert (len(errors), sum(abs(error) < 1e-5 for error in errors.values())) == (8, 6)


def test_steps_of_scripts_that_the_gpu_limits() -> None:
    errors = {}
    for name, found in BY_SCRIPT["runs"].items():
        estimate = BY_SCRIPT["predicted"][name]["estimate"]
        if estimate["time"]["host_s"] <= 0.1 * estimate["step_s"]:
            errors[name] = estimate["step_s"] / median(found["step_s"][3:]) - 1
    assert set(errors) == {"trainer_full", "trl_sft", "liger_loop"}
    assert all(abs(error) <= 0.1 for error in errors.values())


def test_peaks_of_recipes() -> None:
    compared = join(records("adapters-and-optimizers/*.jsonl"))
    assert len(compared) == 33
    for name, limit in (("allocated", 1e-5), ("reserved", 5e-4)):
        found = [one.error(f"peak_{name}_bytes") for one in compared]
        assert all(error is not None and abs(error) <= limit for error in found), name
