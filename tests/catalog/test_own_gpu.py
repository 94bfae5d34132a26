"""A GPU of one's own: the block of docs/reference/gpus.md in a folder that TRAINFIT_CATALOG names."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_recipe import TINY_LLAMA

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/gpus.md"
MAIN = "import sys; from trainfit.cli.entry import main; sys.exit(main())"
COLUMNS = ("num_sms", "l2_cache_bytes", "shared_memory_per_block_bytes", "usable_bytes", "host_link")


@pytest.fixture
def row() -> str:
    return re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.S)[0]


def trainfit(folder: Path, row: str, *words: str) -> tuple[int, str]:
    """Run a command with a catalog of one row; return its exit code and output."""
    (folder / "gpus.toml").write_text(row)
    environment = {**os.environ, "TRAINFIT_CATALOG": str(folder), "TRAINFIT_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", MAIN, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_it_is_listed_and_predicted(tmp_path: Path, row: str) -> None:
    assert "h300" in trainfit(tmp_path, row, "gpus")[1]
    recipe = {
        "model": {"config": TINY_LLAMA},
        "batch": {"micro": 2, "seq": 16},
        "hardware": {"gpu": "NVIDIA H300"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    code, out = trainfit(tmp_path, row, "predict", "recipe.yaml", "--json")
    assert code == 0, out
    assert json.loads(out[out.index("{") :])["device_bytes"] == 204_010_946_560


def test_near_names_list_it(tmp_path: Path, row: str) -> None:
    code, out = trainfit(tmp_path, row, "gpus", "h3000")
    assert code == 65
    assert "h300" in out


@pytest.mark.parametrize("column", COLUMNS)
def test_a_missing_column_is_named_with_file_and_row(tmp_path: Path, row: str, column: str) -> None:
    code, out = trainfit(tmp_path, re.sub(rf"^{column} = .*\n", "", row, flags=re.M), "gpus")
    assert code == 65
    assert f"{tmp_path / 'gpus.toml'} [h300]: {column}: missing" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [(("[h300]", "[h200]"), "h200"), (("= 144", "= many"), "cannot be read")],
    ids=["a row that the catalog has", "no TOML"],
)
def test_a_bad_file_is_refused_in_one_line(
    tmp_path: Path, row: str, change: tuple[str, str], message: str
) -> None:
    code, out = trainfit(tmp_path, row.replace(*change), "gpus")
    assert code == 65
    assert message in out
    assert "Traceback" not in out
