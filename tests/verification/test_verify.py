"""``trainfit verify``: recipes drawn by a seed, predicted and measured on this machine, and the verdict."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trainfit.catalog.families import FAMILIES
from trainfit.catalog.load import gpu, gpu_of_device, gpus
from trainfit.cli.main import main
from trainfit.measurement.environment import host_environment
from trainfit.measurement.run import measure
from trainfit.records import read
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Measurement
from trainfit.verification import this_machine, verify
from trainfit.verification.verify import Check, conclude, suite
from trial_start import forked, processes

Captured = pytest.CaptureFixture[str]


def check(status: str = "done", **errors: float) -> Check:
    return Check(recipe_id="r", recipe={}, status=status, predicted={}, measured={}, errors=errors)


def test_the_verdict_is_that_of_the_median_and_of_memory() -> None:
    good = [check(allocated=e, reserved=10 * e, device=e) for e in (0.001, -0.019, 0.5)]
    passed = conclude("h200", "NVIDIA H200", 0, tuple(good))
    assert passed.passed
    assert passed.medians == {"allocated": 0.019, "reserved": 0.19, "device": 0.019}
    assert passed.worst == {"allocated": 0.5, "reserved": 5.0, "device": 0.5}
    over = conclude("h200", "NVIDIA H200", 0, tuple(check(allocated=e) for e in (0.001, -0.021, -0.5)))
    assert (over.passed, over.worst) == (False, {"allocated": -0.5})
    assert not conclude("h200", "NVIDIA H200", 0, (*good, check("out-of-memory"))).passed
    assert conclude("h200", "NVIDIA H200", 0, (*good, check("timeout"))).passed
    assert not conclude("h200", "NVIDIA H200", 0, (check("crashed"),)).passed


def test_every_device_name_is_one_gpus() -> None:
    names = [name for row in gpus().values() for name in row.device_names]
    assert len(names) == len(set(names)) > 20
    assert [gpu_of_device(name).name for name in ("NVIDIA H200", "NVIDIA H200 NVL")] == ["h200", "h200-nvl"]
    for name in ("NVIDIA H200 XL", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", ""):
        with pytest.raises(InputError, match="--gpu"):
            gpu_of_device(name)


def test_a_card_that_the_catalog_does_not_know(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(this_machine, "device_name", lambda: "NVIDIA RTX 4090 D")
    assert main(["verify"]) == 65
    error = capsys.readouterr().err
    assert "NVIDIA RTX 4090 D" in error
    assert "rtx-4090 (NVIDIA GeForce RTX 4090)" in error
    assert this_machine.gpu_here("rtx-4090")[0] == gpu("rtx-4090")
    monkeypatch.setattr(this_machine, "device_name", lambda: None)
    assert main(["verify", "--gpu", "h100-sxm"]) == 65
    assert "no CUDA GPU" in capsys.readouterr().err
    monkeypatch.setattr(this_machine, "device_name", lambda: "AMD Instinct MI300X")
    assert main(["verify", "--gpu", "tpu-v5p"]) == 65
    assert "measured or modelled" in capsys.readouterr().err


def test_a_suite_follows_from_its_seed_and_fits_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions are invented: up to twice the card, and 3 s a step."""
    card, scale = gpu("rtx-4090"), 2

    def invented(data: dict[str, Any]) -> Any:
        chance = random.Random(json.dumps(data))
        size, step_s = round(chance.uniform(0, scale * card.usable_bytes)), chance.uniform(0, 3)
        estimate = Estimate.model_construct(
            peak_allocated_bytes=size, peak_reserved_bytes=size, peak_device_bytes=size,
            device_bytes=card.usable_bytes, step_s=step_s,
        )  # fmt: skip
        return recipe_from(data), estimate

    monkeypatch.setattr(verify, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr(verify, "allowed", invented)
    drawn: list[str] = []
    plain = verify._draw

    def drawing(chance: random.Random, name: str) -> tuple[str, dict[str, Any]]:
        family, data = plain(chance, name)
        assert data["model"]["config"] in FAMILIES[family]
        assert (family == "native") == (data["model"]["implementation"] == "native")
        drawn.append(family)
        return family, data

    monkeypatch.setattr(verify, "_draw", drawing)
    families: list[str] = []
    pairs: list[Any] = list(suite(card, len(FAMILIES) - 1, seed=3, say=lambda _: families.append(drawn[-1])))
    assert list(suite(card, 5, seed=3)) == pairs[:5] != list(suite(card, 5, seed=4))
    assert all(one.peak_device_bytes <= 0.9 * card.usable_bytes and one.step_s <= 1.5 for _, one in pairs)
    assert len(set(families)) == len(pairs), "each family once before one comes again"
    scale = 10**6
    with pytest.raises(InputError, match="only 0 of 2 recipes"):
        list(suite(card, 2, seed=3))


def test_errors_are_signed_and_a_refusal_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [Recipe.model_validate({"model": {"config": "gpt2"}, "seed": seed}) for seed in (0, 1)]
    pairs = [(recipe, Estimate.model_construct(peak_allocated_bytes=1250)) for recipe in recipes]

    def measured(recipe: Recipe, **_: object) -> Measurement:
        if recipe.id == recipes[1].id:
            raise InputError("no such kernel here", "use another", field="attention")
        environment = host_environment("cpu")
        done = {"recipe_id": recipe.id, "status": "done", "peak_allocated_bytes": 1000}
        return Measurement(**done, environment=environment)

    monkeypatch.setattr(verify, "measure", measured)
    monkeypatch.setattr(verify, "suite", lambda *_: iter(pairs))
    kept: list[str] = []
    keep = lambda recipe, *_: kept.append(recipe.id)  # noqa: E731
    result = verify.verify(gpu("cpu"), "a CPU", count=2, seed=0, keep=keep)
    assert result.checks[0].errors == {"allocated": 0.25}
    assert result.checks[1].status == "refused"
    assert "no such kernel here" in result.checks[1].message
    assert kept == [recipes[0].id]
    assert not result.passed


@pytest.mark.slow
def test_a_cpu_is_verified_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(this_machine, "device_name", lambda: None)
    monkeypatch.setattr(verify, "measure", partial(measure, start=forked))
    monkeypatch.setattr(verify, "get_context", lambda _: processes())
    records = tmp_path / "verify.sqlite"
    assert main(["verify", "--count", "1", "--json", "--record", str(records)]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    # On a CPU both sides count the same live tensors: they agree to the byte.
    assert (result["passed"], result["gpu"], result["medians"]) == (True, "cpu", {"allocated": 0.0})
    assert "CPU path" in captured.err
    assert sorted(record.kind for record in read(records)) == ["measure", "predict"]


def test_a_failed_check_ends_with_one(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    recipe = Recipe.model_validate({"model": {"config": "gpt2"}})
    sizes = {"predicted": {"allocated": 105}, "measured": {"allocated": 100}, "errors": {"allocated": 0.05}}
    over = Check(recipe_id=recipe.id, recipe=recipe.content(), status="done", **sizes)
    monkeypatch.setattr(this_machine, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(verify, "verify", lambda *_, **__: conclude("h200", "NVIDIA H200", 7, (over,)))
    assert main(["verify", "--seed", "7"]) == 1
    text = capsys.readouterr().out
    assert "+5.00%" in text
    assert "NOT PASSED: the median error of the allocated peak is over 2%" in text
    assert main(["verify", "--count", "0"]) == 2
