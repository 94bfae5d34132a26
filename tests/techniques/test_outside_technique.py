"""A technique of another package: the example of docs/reference/techniques.md."""

import configparser
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tiny_recipe import TINY_LLAMA

ROOT = Path(__file__).parents[2]
CLI = ("-c", "import sys; from trainfit.cli.entry import main; sys.exit(main())")
SECTION = "## Adding one\n"
SWEEP = """
base:
  model: {config: CONFIG}
  batch: {micro: 2, seq: 16}
  hardware: {gpu: cpu}
name: losses
product: {loss: [standard, doubled]}
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the example of the page is installed."""
    page = (ROOT / "docs/reference/techniques.md").read_text("utf-8").partition(SECTION)[2]
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
    path = os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "TRAINFIT_CACHE": str(folder / "cache")}


def run(environment: dict[str, str], *words: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def recipe(tmp_path: Path, loss: str) -> str:
    path = tmp_path / "recipe.yaml"
    fields = {"model": {"config": TINY_LLAMA}, "batch": {"micro": 2, "seq": 16}, "loss": loss}
    path.write_text(json.dumps(fields))
    return str(path)


def test_it_is_predicted(environment: dict[str, str], tmp_path: Path) -> None:
    out = run(environment, *CLI, "predict", recipe(tmp_path, "doubled"), "--json")
    assert json.loads(out[out.index("{") :])["peak_allocated_bytes"] > 0


def test_near_names_and_choices_list_it(environment: dict[str, str], tmp_path: Path) -> None:
    out = run(environment, *CLI, "predict", recipe(tmp_path, "doubledd"), code=65)
    assert "standard, chunked, fused, doubled" in out
    assert "did you mean doubled?" in out


def test_it_is_swept(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP.replace("CONFIG", json.dumps(TINY_LLAMA)))
    out = run(environment, *CLI, "sweep", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out"))
    assert "doubled" in out
    assert "refused" not in out


def test_registry_draws_descriptions_and_tables_have_it(environment: dict[str, str]) -> None:
    code = """
import random
from benchmarks.accuracy.truth_techniques import draw_for, drawn_techniques
from benchmarks.tables.techniques import TITLES, in_a_recipe
from trainfit.spec.recipe_file import recipe_from
from trainfit.techniques import registry

technique = registry.techniques()["doubled_loss"]
assert "doubled_loss" in drawn_techniques()
data = draw_for("doubled_loss", random.Random(1), "h200", combined=False)
assert technique.applies(recipe_from(data))
assert registry.describe(recipe_from(data)).endswith("doubled loss")
names = list(registry.techniques())
assert names[names.index("loss_terms") + 1] == "doubled_loss"
print(TITLES[technique.name], in_a_recipe(technique.name))
"""
    assert "Doubled loss `loss: doubled`" in run(environment, "-c", code)


def test_the_tests_of_every_example_include_it(environment: dict[str, str]) -> None:
    words = (
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "tests/techniques/test_examples.py",
        "-k",
        "doubled_loss",
    )
    assert "2 passed" in run(environment, *words)
