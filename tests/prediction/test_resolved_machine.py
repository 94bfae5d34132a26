"""A prediction takes its machine as a value: GPU and calibration are looked up once."""

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tiny_recipe import tiny_recipe
from trainfit.api.calls import predict as api_predict
from trainfit.catalog import names
from trainfit.catalog.load import FOLDER, gpu
from trainfit.planning import advice
from trainfit.prediction.machine import machine_of, machine_with
from trainfit.prediction.predict import predict
from trainfit.prediction.time import calibrated as calibrations
from trainfit.prediction.time.calibrated import own_calibration
from trainfit.spec.recipe import Hardware

ROOT = Path(__file__).parents[2] / "src" / "trainfit"


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the names that are looked up in the catalog's GPUs, and the calibrations that are chosen."""
    count: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any) -> Any:
            count[name] += 1
            return original(*args)

        monkeypatch.setattr(module, name, call)

    counted(names, "gpu_name")
    counted(calibrations, "_shipped")
    return count


@pytest.mark.parametrize(
    "hardware",
    [
        Hardware(gpu="h200"),
        Hardware(gpu="a100-sxm4-80gb"),  # Takes another GPU's operations.
        Hardware(gpu="h100-sxm", count=2, nodes=2),  # Techniques check the GPU and its host.
    ],
    ids=lambda one: f"{one.count} {one.gpu}",
)
def test_a_prediction_looks_its_gpu_and_its_calibration_up_once(
    hardware: Hardware, lookups: Counter[str]
) -> None:
    recipe = tiny_recipe("native", hardware=hardware)
    lookups.clear()  # A recipe's own name is checked as it is made.
    assert predict(recipe, use_cache=False).step_s is not None
    assert lookups == {"gpu_name": 1, "_shipped": 1}


def test_one_module_chooses_calibrations() -> None:
    """Else a calibration of the user would not reach all of a prediction."""
    importers = {
        file.relative_to(ROOT).as_posix()
        for file in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "trainfit.prediction.time.calibrated"
        if "calibrated" in [alias.name for alias in node.names]
    }
    assert importers == {"prediction/machine.py"}


def test_the_hosts_of_a_recipe_are_of_its_machine_alone() -> None:
    machine = machine_of(Hardware(gpu="h200", count=8, nodes=4))
    assert (machine.gpu.gpus_per_host, machine.row.gpus_per_host) == (2, 8)
    assert machine.row is machine_of(Hardware(gpu="h200")).gpu is gpu("h200")
    assert machine.known is machine_with(gpu("h200")).known


def slower_host(path: Path, ratio: float) -> Path:
    data = json.loads((FOLDER / "calibrations" / "h200.json").read_text("utf-8"))
    for step in data["host_steps"]:
        step["step_s"] = ratio * step.pop("expected_s", step["step_s"])
    path.write_text(json.dumps(data | {"ops": []}), "utf-8")
    return path


def test_a_calibration_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    for ratio in (2.0, 3.0):
        own = own_calibration(slower_host(file, ratio))
        origin = machine_of(Hardware(gpu="h200"), own).known.origin
        assert f"a host that takes {ratio:.2f} times as long" in origin
        assert own_calibration(file) is own  # And its operations are not prepared again.


def test_advice_is_computed_with_the_predictions_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "advise", lambda recipe, found, estimates, say: estimates.calibration)
    found = api_predict(tiny_recipe(), calibration=slower_host(tmp_path / "host.json", 2.0))
    calibration: Any = found.advice()
    assert calibration.file == str(tmp_path / "host.json")
    assert api_predict(tiny_recipe()).advice() is None
