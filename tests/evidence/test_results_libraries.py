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
    assert (len(errors), sum(abs(error) < 1e-5 for error in errors.values())) == (12, 9)


def test_steps_of_scripts_that_the_gpu_limits() -> None:
    errors = {}
    for name, found in BY_SCRIPT["runs"].items():
        estimate = BY_SCRIPT["predicted"][name]["estimate"]
        if "H100" not in found["device"]:
            continue  # Predicted for an H100
        if estimate["time"]["host_s"] <= 0.1 * estimate["step_s"]:
            errors[name] = estimate["step_s"] / median(found["step_s"][3:]) - 1
    assert set(errors) == {"trainer_full", "trl_sft", "liger_loop"}
    assert all(abs(error) <= 0.1 for error in errors.values())


def test_steps_of_scripts_on_the_faster_card() -> None:
    ratios = {
        name: BY_SCRIPT["predicted"][name]["estimate"]["step_s"] / median(found["step_s"][3:])
        for name, found in BY_SCRIPT["runs"].items()
        if "H200" in found["device"]
    }
    assert set(ratios) == {"accelerate_loop", "lightning_fit", "nanogpt_loop", "lora_peft_loop"}
    faster = sorted(ratio - 1 for ratio in ratios.values() if ratio > 1)
    assert [round(one, 2) for one in faster] == [0.13, 0.16, 0.25]


def test_peaks_of_recipes() -> None:
    compared = join(records("adapters-and-optimizers/*.jsonl"))
    assert len(compared) == 43
    for name, limit in (("allocated", 1e-5), ("reserved", 5e-4)):
        found = [one.error(f"peak_{name}_bytes") for one in compared]
        assert all(error is not None and abs(error) <= limit for error in found), name
    newest = [one for one in compared if "H200" in one.device]
    assert len(newest) == 10
    assert all(one.error(f"peak_{name}_bytes") == 0 for one in newest for name in ("allocated", "reserved"))


def test_steps_of_recipes_on_the_faster_card() -> None:
    compared = [one for one in join(records("adapters-and-optimizers/*.jsonl")) if "H200" in one.device]
    packed = [one.error("step_s") or 0.0 for one in compared if one.recipe.data.pack == "documents"]
    assert [round(one, 2) for one in sorted(packed)] == [0.06, 0.06, 0.08]
    small = [one for one in compared if "qwen" in one.model and one.recipe.data.pack != "documents"]
    longer = [1 / (1 + error) - 1 for one in small if (error := one.error("step_s")) and error < 0]
    assert [round(one, 2) for one in sorted(longer)] == [0.15, 0.3, 0.51, 0.53]
