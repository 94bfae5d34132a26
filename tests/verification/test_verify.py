"""``trainfit verify``: recipes drawn by a seed, predicted and measured on this machine, and the verdict."""

import json
from pathlib import Path

import pytest

from trainfit.catalog.families import FAMILIES
from trainfit.catalog.load import gpu, gpu_of_device, gpus
from trainfit.cli.main import main
from trainfit.measurement.environment import host_environment
from trainfit.records import read
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Measurement
from trainfit.verification import this_device, verify
from trainfit.verification.verify import Check, conclude, suite

Captured = pytest.CaptureFixture[str]


def check(status: str = "done", **errors: float) -> Check:
    return Check(recipe_id="r", recipe={}, status=status, predicted={}, measured={}, errors=errors)


def test_the_verdict() -> None:
    good = [check(allocated=e, reserved=10 * e, device=e) for e in (0.001, -0.019, 0.5)]
    passed = conclude("h200", "NVIDIA H200", 0, tuple(good))
    assert passed.passed
    assert passed.medians == {"allocated": 0.019, "reserved": 0.19, "device": 0.019}
    assert passed.worst == {"allocated": 0.5, "reserved": 5.0, "device": 0.5}
    over = [check(allocated=e) for e in (0.001, -0.021, -0.5)]
    failed = conclude("h200", "NVIDIA H200", 0, tuple(over))
    assert not failed.passed
    assert failed.worst == {"allocated": -0.5}
    assert not conclude("h200", "NVIDIA H200", 0, (*good, check("out-of-memory"))).passed
    assert conclude("h200", "NVIDIA H200", 0, (*good, check("timeout"))).passed
    assert not conclude("h200", "NVIDIA H200", 0, (check("crashed"),)).passed


def test_every_device_name_is_one_gpus() -> None:
    names = [name for row in gpus().values() for name in row.device_names]
    assert len(names) == len(set(names)) > 20
    assert gpu_of_device("NVIDIA H200").name == "h200"
    assert gpu_of_device("NVIDIA H200 NVL").name == "h200-nvl"
    assert gpu_of_device("NVIDIA A100-SXM4-80GB").name == "a100-sxm4-80gb"
    assert gpu_of_device("Tesla T4").name == "t4"
    for name in ("NVIDIA H200 XL", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", ""):
        with pytest.raises(InputError, match="--gpu"):
            gpu_of_device(name)


def test_a_card_that_the_catalog_does_not_know(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(this_device, "device_name", lambda: "NVIDIA RTX 4090 D")
    assert main(["verify"]) == 65
    error = capsys.readouterr().err
    assert "NVIDIA RTX 4090 D" in error
    assert "rtx-4090 (NVIDIA GeForce RTX 4090)" in error
    assert this_device.gpu_here("rtx-4090")[0] == gpu("rtx-4090")
    monkeypatch.setattr(this_device, "device_name", lambda: None)
    assert main(["verify", "--gpu", "h100-sxm"]) == 65
    assert "no CUDA GPU" in capsys.readouterr().err
    monkeypatch.setattr(this_device, "device_name", lambda: "AMD Instinct MI300X")
    assert main(["verify", "--gpu", "mi300x"]) == 65
    assert "choose an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_the_suite_is_the_seeds_and_fits_the_card() -> None:
    """Drawn twice the same, of different families, for a card with little memory; nothing is measured."""
    card = gpu("rtx-4090")
    first = [(recipe.id, estimate.peak_device_bytes) for recipe, estimate in suite(card, 2, seed=3)]
    again = [(recipe.id, estimate.peak_device_bytes) for recipe, estimate in suite(card, 1, seed=3)]
    assert first[:1] == again
    assert all(size <= 0.9 * card.usable_bytes for _, size in first)


def test_every_draw_names_its_family() -> None:
    import random

    chance = random.Random(1)
    drawn = [verify._draw(chance, "h200") for _ in range(300)]
    assert {family for family, _ in drawn} == set(FAMILIES)
    for family, data in drawn:
        assert data["model"]["config"] in FAMILIES[family]
        assert (family == "native") == (data["model"]["implementation"] == "native")


def test_errors_are_signed_and_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = list(suite(gpu("cpu"), 2, seed=0))

    def measured(recipe: Recipe, **_: object) -> Measurement:
        if recipe.id == pairs[1][0].id:
            raise InputError("no such kernel here", "use another", field="attention")
        size = round(pairs[0][1].peak_allocated_bytes / 1.25)
        return Measurement(
            recipe_id=recipe.id, status="done", peak_allocated_bytes=size, environment=host_environment("cpu")
        )

    monkeypatch.setattr(verify, "measure", measured)
    monkeypatch.setattr(verify, "suite", lambda *_: iter(pairs))
    kept: list[str] = []
    result = verify.verify(
        gpu("cpu"), "a CPU", count=2, seed=0, keep=lambda recipe, *_: kept.append(recipe.id)
    )
    assert result.checks[0].errors == {"allocated": pytest.approx(0.25, abs=1e-6)}
    assert result.checks[1].status == "refused"
    assert "no such kernel here" in result.checks[1].message
    assert kept == [pairs[0][0].id]
    assert not result.passed


@pytest.mark.slow
def test_on_this_machines_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(this_device, "device_name", lambda: None)
    records = tmp_path / "verify.sqlite"
    assert main(["verify", "--count", "1", "--json", "--record", str(records)]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["passed"]
    assert result["gpu"] == "cpu"
    # On a CPU both sides count the same live tensors: they agree to the byte.
    assert result["medians"] == {"allocated": 0.0}
    assert "CPU path" in captured.err
    assert sorted(record.kind for record in read(records)) == ["measure", "predict"]


def test_a_failed_check_ends_with_one(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    recipe = Recipe.model_validate({"model": {"config": "gpt2"}})
    over = Check(
        recipe_id=recipe.id, recipe=recipe.content(), status="done", predicted={"allocated": 105},
        measured={"allocated": 100}, errors={"allocated": 0.05},
    )  # fmt: skip
    monkeypatch.setattr(this_device, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(verify, "verify", lambda *_, **__: conclude("h200", "NVIDIA H200", 7, (over,)))
    assert main(["verify", "--seed", "7"]) == 1
    text = capsys.readouterr().out
    assert "+5.00%" in text
    assert "NOT PASSED: the median error of the allocated peak is over 2%" in text
    assert main(["verify", "--count", "0"]) == 2
