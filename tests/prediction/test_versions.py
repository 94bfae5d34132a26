"""Estimates carry the versions they hold for.

Model families whose step differs between supported versions are known.
"""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.cli.main import main
from trainfit.explanation.peak import explain
from trainfit.models.build import build_model
from trainfit.models.hf import sets_loss
from trainfit.prediction import versions
from trainfit.prediction.predict import predict
from trainfit.prediction.trace import LOSS_SET
from trainfit.records import read_jsonl
from trainfit.report.words import holds_for
from trainfit.spec.recipe import Adapter, Optimizer
from virtual_runs import recipe_of

PREDICTED = Path(__file__).parents[2] / "evidence" / "records" / "first-predicted" / "h200.jsonl"


def release(library: str) -> str:
    return version(library).partition("+")[0]


TORCH, TRANSFORMERS = release("torch"), release("transformers")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "ledgers"))


def test_an_estimate_names_the_libraries_of_its_step() -> None:
    both = {"torch": TORCH, "transformers": TRANSFORMERS}
    assert predict(tiny_recipe("hf")).versions == both
    assert predict(tiny_recipe("native")).versions == {"torch": TORCH}
    assert predict(tiny_recipe("native", optimizer=Optimizer(name="adafactor"))).versions == both
    adapted = predict(tiny_recipe("hf", adapter=Adapter(kind="lora", rank=2)))
    assert adapted.versions == {**both, "peft": release("peft")}
    with_triton = predict(tiny_recipe("native", precision="bf16", attention="triton"))
    assert with_triton.versions == {"torch": TORCH, "triton": release("triton")}
    assert explain(tiny_recipe("hf")).versions == both


def test_a_kept_ledger_names_those_it_was_traced_with(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = predict(tiny_recipe("hf"))
    monkeypatch.setattr(versions, "installed_version", lambda library: "9.9+cpu")
    assert predict(tiny_recipe("hf")) == traced
    assert predict(tiny_recipe("hf"), use_cache=False).versions == {"torch": "9.9", "transformers": "9.9"}


def test_estimates_of_older_records_are_read_and_name_none() -> None:
    estimate = read_jsonl(PREDICTED)[0].estimate
    assert estimate is not None
    assert estimate.versions == {}
    assert holds_for(estimate.versions) == ""


def test_the_commands_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps({"model": {"config": TINY_LLAMA}, "batch": {"micro": 1, "seq": 16}}))
    versions_used = {"torch": TORCH, "transformers": TRANSFORMERS}
    for verb in ("predict", "explain"):
        assert main([verb, str(file)]) == 0
        line = f"holds for torch {TORCH}, transformers {TRANSFORMERS}"
        assert capsys.readouterr().out.count(line) == 1
        assert main([verb, str(file), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["versions"] == versions_used


def test_predictions_of_several_versions_name_them_all() -> None:
    rows = ({"torch": "2.11.0", "peft": "0.21.2"}, {"torch": "2.13.0"}, {"torch": "2.11.0"})
    assert holds_for(*rows) == "holds for torch 2.11.0 and 2.13.0, peft 0.21.2"


def test_a_loss_that_is_set_for_the_compiler_is_told() -> None:
    """GPT2LMHeadModel names no loss, so transformers' own cuts a compiled graph in two.

    LlamaForCausalLM names one.
    """
    sizes = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 128}
    gpt2 = recipe_of({**sizes, "n_positions": 64}, compile="model")
    assert LOSS_SET in predict(gpt2).assumptions
    assert LOSS_SET not in predict(gpt2.model_copy(update={"compile": False})).assumptions
    with FakeTensorMode():
        llama = build_model(tiny_recipe().model, dtype=torch.float32, device="cpu", attention="sdpa")
    assert not sets_loss(llama)
