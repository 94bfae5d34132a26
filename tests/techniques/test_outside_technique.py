"""A technique of another package: the example of docs/reference/techniques.md."""

import configparser
import json
import random
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.accuracy.truth_techniques import draw_for, drawn_techniques
from benchmarks.tables.techniques import in_a_recipe, titles
from tiny_recipe import TINY_LLAMA
from tiny_sweep import sweep_of
from trainfit.api.plans import plan_recipe
from trainfit.cli.main import main
from trainfit.prediction import cache
from trainfit.spec.outside import outside_techniques
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.techniques import registry

PAGE = Path(__file__).parents[2] / "docs/reference/techniques.md"
CACHES = (outside_techniques, registry.in_order, cache.outside_version)
RECIPE = {"model": {"config": TINY_LLAMA}, "batch": {"micro": 2, "seq": 16}}


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the page's example, as a package on this process's path."""
    page = PAGE.read_text("utf-8").partition("## Adding one\n")[2]
    code, project = (re.findall(rf"```{kind}\n(.*?)```", page, re.S)[0] for kind in ("python", "toml"))
    folder = tmp_path_factory.mktemp("site")
    (folder / "doubled_loss.py").write_text(code)
    metadata = folder / "doubled_loss-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: doubled-loss\nVersion: 1.0\n")
    points = configparser.ConfigParser()
    points.read_dict(tomllib.loads(project)["project"]["entry-points"])
    with (metadata / "entry_points.txt").open("w") as file:
        points.write(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for cached in CACHES:
            cached.cache_clear()
        yield
    sys.modules.pop("doubled_loss", None)
    for cached in CACHES:
        cached.cache_clear()


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
