"""Sweeps whose records have ids of the form of before 2026-11-26 are continued."""

from pathlib import Path
from typing import Any

import pytest

from older_records import older_line, older_recipe
from tiny_sweep import BASE, sweep_of
from trainfit.measurement.environment import host_environment
from trainfit.spec.provenance import to_line
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Measurement
from trainfit.spec.sweep import MeasurePart
from trainfit.spec.value import short_hash
from trainfit.sweeps.journal import Journal
from trainfit.sweeps.parts import PartRequest, ended


def older_id(recipe: Recipe) -> str:
    return short_hash(older_recipe(recipe.content()))


@pytest.mark.parametrize("plans", [False, True])
def test_an_older_sweeps_results_are_found(plans: bool, tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, BASE + "list: [{name: one, seed: 1}, {name: two, seed: 2}]\n")
    given, other = (variant.recipe for variant in sweep.variants)
    planned = given.model_copy(update={"recompute": "full"}) if plans else None
    common: dict[str, Any] = {"variant": "one", "recipe": given, "device": "cpu", "timeout_s": 9.0}
    predict = PartRequest(part="predict", **common)
    measure = PartRequest(part="measure", measure=MeasurePart(steps=2), planned=planned, **common)
    measured = Measurement(
        recipe_id=(planned or given).id, status="done", environment=host_environment("cpu")
    )
    ids = {one.id: older_id(one) for one in (given, planned) if one is not None}
    with Journal(tmp_path / "out", sweep.name) as journal:
        first = journal.append(predict, ended(predict, "done", planned=planned))
        second = journal.append(measure, ended(measure, "done", measurement=measured))
        path = journal.path
    lines = [
        older_line(record, request.id_with(ids)) for record, request in ((first, predict), (second, measure))
    ]
    assert measure.id_with(ids) != measure.id
    path.write_text("".join(f"{line}\n" for line in lines))
    with Journal(tmp_path / "out", sweep.name) as journal:
        for request in (predict, measure):
            found = journal.found(request)
            assert found is not None
            assert (found.kind, found.recipe_id) == (request.part, given.id)
            assert journal.found(request.model_copy(update={"recipe": other})) is None
        again = journal.append(predict, ended(predict, "done", "anew"))
        assert journal.found(predict) == again, "the newest"
    assert path.read_text() == "".join(f"{line}\n" for line in (*lines, to_line(again)))
