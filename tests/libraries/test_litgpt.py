"""LitGPT's own scripts under ``trainfit trace``, on a random checkpoint and data made here."""

import json
from pathlib import Path

import pytest
import torch
from litgpt import GPT, Config
from litgpt.utils import save_config

import tiny_models
from trainfit.cli.main import main
from trainfit.spec.result import Estimate


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    tiny_models.tokenizer().save_pretrained(folder)
    config = Config.from_name("pythia-14m", n_layer=2)
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
    save_config(config, folder)
    asked = {"instruction": tiny_models.QUESTION, "input": "", "output": tiny_models.ANSWER}
    (tmp_path / "data.json").write_text(json.dumps([asked] * 64))
    return folder


@pytest.mark.parametrize("verb", ["finetune_full", "finetune_lora"])
def test_a_checkpoint_is_finetuned(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    options = {
        "--data": "JSON", "--data.json_path": tmp_path / "data.json", "--data.val_split_fraction": 0.1,
        "--train.global_batch_size": 4, "--train.micro_batch_size": 2, "--train.max_seq_length": 64,
        "--out_dir": tmp_path / "out", "--precision": "bf16-true",
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    assert main(["trace", "--json", "--steps", "2", "-m", "litgpt", verb, str(checkpoint), *words]) == 0
    found = Estimate.model_validate_json(capsys.readouterr().out)
    assert found.code is not None
    assert found.code.num_steps == 2
    assert (found.trainable_params < found.params) == (verb == "finetune_lora")
