"""``trainfit sweep`` of a list of recipes: JSON Lines and recipe files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import counted_calls
from tiny_sweep import MODEL
from trainfit.cli.main import main
from trainfit.measurement.environment import host_environment
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import parse_yaml
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.provenance import from_line, new_record, to_line
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Measurement, Record
from trainfit.spec.sweep import MeasurePart
from trainfit.sweeps import parts
from trainfit.sweeps.journal import Journal
from trainfit.sweeps.parts import PartRequest
from trainfit.sweeps.read import read_sweep
from trainfit.sweeps.run import Run

BASE = {
    "model": {"config": parse_yaml(MODEL)}, "batch": {"micro": 4, "seq": 32}, "precision": "fp32",
    "hardware": {"gpu": "cpu"},
}  # fmt: skip


def recipe(**fields: Any) -> Recipe:
    return recipe_from(BASE | fields)


def lines_of(path: Path, recipes: list[Recipe]) -> Path:
    path.write_text("".join(json.dumps(one.content()) + "\n" for one in recipes))
    return path


def records_of(path: Path) -> list[Record]:
    return [from_line(line, "records") for line in path.read_text().splitlines()]


def test_a_list_is_measured_and_continued(
    forks: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two good recipes, one refused, one too large; a second run has nothing to do."""
    large = recipe(batch={"micro": 16384, "seq": 32})
    wanted = [recipe(), recipe(precision="bf16"), recipe(precision="fp8"), large]
    recipes, records = lines_of(tmp_path / "recipes.jsonl", wanted), tmp_path / "records.jsonl"
    options = "--measure-only --device cpu --steps 1 --warmup 0 --memory-limit-gib 0.25 --tag truth".split()
    for shown in ("measure recipes.jsonl:4: out-of-memory", "4 results kept from an earlier run"):
        assert main(["sweep", str(recipes), "--out", str(records), *options]) == 0
        assert shown in capfd.readouterr().err
    written = {record.recipe_id: record for record in records_of(records)}
    assert len(written) == len(records_of(records)) == 4
    found = [written[one.id] for one in wanted]
    statuses = [one.outcome and one.outcome.status for one in found]
    assert statuses == ["done", "done", "refused", "out-of-memory"]
    assert {record.kind for record in found} == {"measure"}
    assert "fp8" in found[2].model_dump()["outcome"]["message"]
    full, half = (one.model_dump()["measurement"]["phases"]["after_init"] for one in found[:2])
    assert half < 0.52 * full  # bf16 weights are half as large
    assert found[0].tags == ("truth", "sweep:recipes", "variant:recipes.jsonl:1")
    assert not (tmp_path / "report.html").exists()


def test_the_line_that_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = tmp_path / "recipes.jsonl"
    recipes.write_text(json.dumps(recipe().content()) + '\n\n{"modle": 1}\n')
    assert main(["sweep", str(recipes), "--out", str(tmp_path / "out.jsonl")]) == 65
    shown = capsys.readouterr().err
    assert "recipes.jsonl:3" in shown
    assert "did you mean 'model'?" in shown


def test_recipe_files_and_lines_together(tmp_path: Path) -> None:
    """Equal recipes run once; a sweep's file is run alone."""
    lines = lines_of(tmp_path / "lines.jsonl", [recipe(), recipe(seed=1)])
    file, vary = tmp_path / "one.yaml", tmp_path / "vary.yaml"
    file.write_text(json.dumps(recipe(seed=1).content()))
    sweep = read_sweep(lines, file, settings=["batch.micro=2"])
    assert [variant.name for variant in sweep.variants] == ["lines.jsonl:1", "lines.jsonl:2"]
    assert {variant.recipe.batch.micro for variant in sweep.variants} == {2}
    assert sweep.notes == ("one is the same recipe as lines.jsonl:2: it is run once",)
    assert read_sweep(file).name == "one"
    vary.write_text("recipes: [lines.jsonl, one.yaml]\nproduct: {batch.micro: [1, 2]}\n")
    assert len(read_sweep(vary).variants) == 4
    with pytest.raises(InputError, match="run it alone"):
        read_sweep(lines, vary)


def test_a_long_list_is_read_and_kept_quickly(tmp_path: Path) -> None:
    """No step of it takes time that grows with the square of the list's length."""

    def read_and_keep(length: int) -> None:
        path = lines_of(tmp_path / f"{length}.jsonl", [recipe(seed=seed) for seed in range(length)])
        sweep = read_sweep(path)
        assert len(sweep.variants) == length
        with Journal(tmp_path / f"records-{length}.jsonl", sweep.name) as journal:
            run = Run(sweep, journal)
            for variant in sweep.variants:
                request = run._request(variant, "predict")
                run._note(request, parts.ended(request, "crashed"))
                assert run.row(request).status == "crashed"

    read_and_keep(1)  # Imports and caches are not the list's.
    calls = [counted_calls.of(read_and_keep, length)[1] for length in (30, 120)]
    assert calls[1] < 4.4 * calls[0]


def test_measurements_of_other_commands_are_kept(tmp_path: Path) -> None:
    """A record without an outcome: its recipe is not measured again, unless the trial crashed."""
    path, recipes, here = tmp_path / "records.jsonl", [recipe(), recipe(seed=1)], host_environment("cpu")
    with path.open("w") as file:
        for one, status in zip(recipes, ("done", "crashed"), strict=True):
            measured = Measurement(recipe_id=one.id, status=status, environment=here)
            file.write(to_line(new_record("measure", one, measurement=measured)) + "\n")
    sweep = read_sweep(lines_of(tmp_path / "recipes.jsonl", recipes))
    sweep = replace(sweep, file=sweep.file.with_options(measure=True, only=True))
    with Journal(path, sweep.name) as journal:
        run = Run(sweep, journal)
        assert [run._kept(run._request(one, "measure")) for one in sweep.variants] == [True, False]
        assert run.rows()[0].status == "done"


def test_of_a_shared_device_no_times_and_no_device_memory_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def trial(folder: Path, request: Any, *_: Any) -> tuple[Measurement, Any]:
        steps.append(request.steps)
        known = {"recipe_id": request.recipe.id, "environment": request.environment}
        return Measurement(status="done", peak_device_bytes=7, **known), None

    monkeypatch.setattr(parts, "run_in", trial)
    request = PartRequest(
        part="measure", variant="one", recipe=recipe(), device="cpu", timeout_s=60,
        measure=MeasurePart(steps=4),
    )  # fmt: skip
    shared = request.model_copy(update={"shared": True})
    assert shared.id != request.id
    found = [parts.run_part(one, lambda *_: 0).measurement for one in (request, shared)]
    assert steps == [4, 0]
    assert [one and one.peak_device_bytes for one in found] == [7, None]


def test_nothing_starts_after_the_deadline(tmp_path: Path) -> None:
    lines = lines_of(tmp_path / "recipes.jsonl", [recipe()])
    assert main(["sweep", str(lines), "--out", str(tmp_path / "r.jsonl"), "--stop-after", "0"]) == 75
    assert records_of(tmp_path / "r.jsonl") == []
