"""A technique of another package: the example of docs/reference/techniques.md."""

import json
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from evidence.scripts.accuracy.truth_techniques import draw_for, drawn_techniques
from evidence.scripts.tables.techniques import in_a_recipe, titles
from outside_package import blocks, installed
from tiny_recipe import TINY_LLAMA
from tiny_sweep import sweep_of
from trainfit.api.plans import plan_recipe
from trainfit.cli.main import main
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.techniques import registry

RECIPE = {"model": {"config": TINY_LLAMA}, "batch": {"micro": 2, "seq": 16}}


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the page's example, as a package on this process's path."""
    points = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]
    with installed(tmp_path_factory.mktemp("site"), "doubled_loss", blocks("python")[0], points):
        yield


def test_it_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**RECIPE, "loss": "doubled"}))
    assert main(["predict", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_allocated_bytes"] > 0


def test_near_names_and_choices_list_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**RECIPE, "loss": "doubledd"}))
    assert main(["predict", str(path)]) == 65
    err = capsys.readouterr().err
    assert "standard, chunked, fused, doubled" in err
    assert "did you mean doubled?" in err


def test_a_sweep_may_vary_it(tmp_path: Path) -> None:
    text = f"base: {json.dumps(RECIPE)}\nname: losses\nproduct: {{loss: [standard, doubled]}}\n"
    assert [variant.recipe.loss for variant in sweep_of(tmp_path, text).variants] == ["standard", "doubled"]


def test_the_planner_offers_it() -> None:
    tiny = recipe_from(RECIPE)
    found = plan_recipe(tiny, (), vary=("loss",), processes=0, use_cache=False)
    assert any(one.choice == "loss: doubled" for one in found.rejected)
    assert found.num_traced == 4  # The fused loss, none of its own, and each of the two others.
    kept = plan_recipe(tiny, (), vary=("loss",), processes=0, keep_quality=True)
    reasons = {one.choice: one.reason for one in kept.rejected}
    assert reasons["loss: doubled"] == "changes the numerics (twice the loss)"


def test_registry_draws_descriptions_and_tables_have_it() -> None:
    technique = registry.techniques()["doubled_loss"]
    assert "doubled_loss" in drawn_techniques()
    drawn = recipe_from(draw_for("doubled_loss", random.Random(1), "h200", combined=False))
    assert technique.applies(drawn)
    assert registry.describe(drawn).endswith("doubled loss")
    names = list(registry.techniques())
    assert names[names.index("loss_terms") + 1] == "doubled_loss"
    assert technique.fields == ("loss",)
    assert (titles()[technique.name], in_a_recipe(technique.name)) == ("Doubled loss", "`loss: doubled`")
