"""``trainfit import``: what it prints and writes, predictions of imported recipes, other verbs' remedy."""

import json
from pathlib import Path

import pytest

from trainfit.cli.main import main
from trainfit.integrations.importers.run import imported, on_one_gpu
from trainfit.report.imported_text import caveat
from trainfit.spec.errors import EXIT_BAD_INPUT
from trainfit.spec.imported import Imported
from trainfit.spec.parsing.recipe_file import load_recipe
from trainfit.spec.result import Estimate

FOLDER = Path(__file__).parents[1] / "data" / "imports"
AXOLOTL = str(FOLDER / "axolotl/lora-1b.yaml")
Captured = pytest.CaptureFixture[str]


def test_it_writes_a_recipe_and_never_overwrites(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "recipe.yaml"
    assert main(["import", AXOLOTL, "--out", str(out)]) == 0
    text = out.read_text()
    assert load_recipe(out).batch.seq == 2048
    printed = "".join(capsys.readouterr().out.split())  # A long path is broken over lines.
    assert f"trainfitpredict{out}" in printed
    assert main(["import", AXOLOTL, "--gpu", "l4", "--out", str(out)]) == EXIT_BAD_INPUT
    assert "exists already" in capsys.readouterr().err
    assert out.read_text() == text


def test_json_is_one_object(capsys: Captured) -> None:
    assert main(["import", AXOLOTL, "--json"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1
    content = json.loads(printed.out)
    content.pop("text")
    assert Imported.model_validate_json(json.dumps(content)).recipe.batch.seq == 2048


@pytest.mark.parametrize(
    ("arguments", "peak_mib"),
    [
        (["torchtitan/debug_model.toml", "--gpu", "l4", "--seq", "512"], (100, 1000)),
        (["trl/sft_script.py", "--gpu", "rtx-4090"], (10, 500)),
        (["trl/training_args.json", "accelerate/multi_gpu.yaml", "--count", "2"], (10, 500)),
        (["llama-factory/v1-quantization.yaml", "--gpu", "l4"], (10, 500)),
    ],
)
def test_an_imported_recipe_is_predicted(
    arguments: list[str], peak_mib: tuple[int, int], capsys: Captured
) -> None:
    words = [str(FOLDER / one) if "/" in one else one for one in arguments]
    words += (
        [] if "torchtitan/debug_model.toml" in arguments else ["--model", "tiny-llama-demo", "--seq", "64"]
    )
    assert main(["import", *words, "--predict", "--check", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    estimate = Estimate.model_validate_json(json.dumps(content["estimate"]))
    assert peak_mib[0] < estimate.phases.peak / 2**20 < peak_mib[1]


def test_the_verdict_names_what_memory_is_predicted_without(capsys: Captured) -> None:
    words = ["import", str(FOLDER / "axolotl/qlora-fsdp-70b.yaml"), "--count", "2", "--predict"]
    assert main([*words, "--model", "tiny-llama-demo", "--seq", "64"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "to spare; not predicted: fsdp_config.fsdp_offload_params (FSDP's host offload)" in printed


def test_the_verdict_names_what_fits() -> None:
    files = [str(FOLDER / "axolotl/qlora-fsdp-70b.yaml")]
    found = imported(files, ["hardware.count=2"])
    alone = on_one_gpu(found, files, ["hardware.count=2"], None, None)
    assert alone is not None
    assert (alone.recipe.hardware.count, alone.recipe.offload.weights) == (1, True)
    assert on_one_gpu(alone, files, [], None, None) is None
    missing = "not predicted: fsdp_config.fsdp_offload_params (FSDP's host offload)"
    assert (
        caveat(found, [("hardware.count: 4", 2**34)]) == f"{missing}; fits with hardware.count: 4 (16.00 GiB)"
    )
    assert caveat(alone, []) == ""


@pytest.mark.parametrize("verb", ["predict", "plan", "explain"])
@pytest.mark.parametrize("file", ["axolotl/lora-1b.yaml", "deepspeed/ds_z3_config.json", "trl/sft_script.py"])
def test_other_verbs_name_the_command(verb: str, file: str, capsys: Captured) -> None:
    if verb == "explain" and file.endswith(".py"):
        pytest.skip("explain runs a script")
    path = str(FOLDER / file)
    assert main([verb, path]) == EXIT_BAD_INPUT
    assert f"trainfit import {path}" in capsys.readouterr().err


def test_check_stands_with_predict(capsys: Captured) -> None:
    assert main(["import", AXOLOTL, "--check"]) == EXIT_BAD_INPUT
    assert "--predict" in capsys.readouterr().err


def test_an_unknown_tool_is_refused(capsys: Captured) -> None:
    assert main(["import", AXOLOTL, "--tool", "nemo"]) == EXIT_BAD_INPUT
    assert "axolotl" in capsys.readouterr().err
