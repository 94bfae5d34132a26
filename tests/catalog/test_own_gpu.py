"""A GPU of one's own: the block of docs/reference/gpus.md in a folder that TRAINFIT_CATALOG names."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiny_recipe import TINY_LLAMA
from trainfit.catalog import load, names
from trainfit.catalog.load import device_memory
from trainfit.cli.main import main

PAGE = Path(__file__).parents[2] / "docs/reference/gpus.md"
ROW = re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.S)[0]
CACHED = (names.rows, names._read, names._gpu_spellings, names._gpu_aliases, load.gpus)
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def trainfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Run a command with a catalog of one row; return its exit code and output."""

    def run(row: str, *words: str) -> tuple[int, str]:
        (tmp_path / "gpus.toml").write_text(row)
        for cached in CACHED:
            cached.cache_clear()
        code = main([*words])
        return code, "".join(capsys.readouterr())

    monkeypatch.setenv("TRAINFIT_CATALOG", str(tmp_path))
    yield run
    for cached in CACHED:
        cached.cache_clear()


def test_it_is_listed_and_predicted(trainfit: Run, tmp_path: Path) -> None:
    assert "h300" in trainfit(ROW, "gpus")[1]
    recipe = {"model": {"config": TINY_LLAMA}, "batch": {"seq": 16}, "hardware": {"gpu": "NVIDIA H300"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    code, out = trainfit(ROW, "predict", str(tmp_path / "recipe.yaml"), "--json")
    assert code == 0, out
    assert json.loads(out[out.index("{") :])["device_bytes"] == 204_010_946_560
    code, out = trainfit(ROW, "gpus", "h3000")
    assert code == 65
    assert "h300" in out


def test_operations_of_a_gpu_without_a_calibration_are_refused(trainfit: Run, tmp_path: Path) -> None:
    recipe = {"model": {"config": TINY_LLAMA}, "batch": {"seq": 16}, "hardware": {"gpu": "h300"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    code, out = trainfit(f'{ROW}operations_of = "a10"\n', "predict", str(tmp_path / "recipe.yaml"))
    assert code == 65
    assert f"{tmp_path / 'gpus.toml'} [h300]: operations_of" in out
    assert "name one of h100-sxm, h200, or leave it out" in " ".join(out.split())


@pytest.mark.parametrize("column", ["num_sms", "usable_bytes"])  # Required of NVIDIA GPUs, and of all.
def test_a_missing_column_is_named_with_file_and_row(trainfit: Run, tmp_path: Path, column: str) -> None:
    code, out = trainfit(re.sub(rf"^{column} = .*\n", "", ROW, flags=re.M), "gpus")
    assert code == 65
    assert f"{tmp_path / 'gpus.toml'} [h300]: {column}: missing" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [(("[h300]", "[h200]"), "has a row of this name"), (("= 144", "= many"), "cannot be read")],
)
def test_a_bad_file_is_refused_in_one_line(trainfit: Run, change: tuple[str, str], message: str) -> None:
    code, out = trainfit(ROW.replace(*change), "gpus")
    assert code == 65
    assert message in out
    assert "Traceback" not in out


MEASURED = (
    "[h300.device_memory]\ncontext_bytes = 1_000_000_000\ncudnn_bytes = 16_777_216\ncopy_bytes = 0\n"
    "page_table_ratio = 512\nnccl_bytes = 0\ncommunicator_bytes = 0\nexchange_bytes = 0\n"
    'source = { url = "https://example.org/h300", accessed = "2026-11-20" }\n'
)


def test_its_own_device_memory_is_counted_else_that_of_its_reference(trainfit: Run, tmp_path: Path) -> None:
    recipe = {"model": {"config": TINY_LLAMA}, "batch": {"seq": 16}, "hardware": {"gpu": "h300"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    outside = []
    for row in (ROW, ROW + MEASURED):
        code, out = trainfit(row, "predict", str(tmp_path / "recipe.yaml"), "--json")
        assert code == 0, out
        found = json.loads(out[out.index("{") :])
        outside.append(found["peak_device_bytes"] - found["peak_reserved_bytes"])
    assert outside[1] - outside[0] == 1_000_000_000 - device_memory(load.gpu("h200")).context_bytes


@pytest.mark.parametrize("reference", ["a10", "h100-sxm", "h301"])
def test_a_reference_that_was_not_measured_is_refused(trainfit: Run, tmp_path: Path, reference: str) -> None:
    recipe = {"model": {"config": TINY_LLAMA}, "batch": {"seq": 16}, "hardware": {"gpu": "h300"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    code, out = trainfit(f'{ROW}reference = "{reference}"\n', "predict", str(tmp_path / "recipe.yaml"))
    assert code == 65
    assert f"{tmp_path / 'gpus.toml'} [h300]: reference = '{reference}'" in " ".join(out.split())
    assert "h200" in out


@pytest.mark.parametrize("column", ["highest_step_ratio", "least_headroom"])
def test_an_amd_gpu_of_ones_own_states_its_margins(trainfit: Run, tmp_path: Path, column: str) -> None:
    """The defaults are of GPUs whose kernels were measured."""
    row = names.rows(names.GPUS)["mi300x"] | {"title": "own"}
    text = "[mi999]\n" + "".join(
        f"{name} = {_toml(value)}\n" for name, value in row.items() if name not in (column, "aliases")
    )
    code, out = trainfit(text, "gpus")
    assert code == 65
    assert f"[mi999]: {column}: missing" in out


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)
