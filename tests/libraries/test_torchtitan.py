"""torchtitan's debug model by its own ``torchrun`` line under ``trainfit trace``, on data made here."""

import json
from pathlib import Path

import pytest
import torch

import tiny_models
from trainfit.cli.main import main
from trainfit.spec.result import Estimate


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_debug_model_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tensor: int
) -> None:
    """Seeded initialisation from meta, selective recomputation, FlexAttention, FSDP2, tensor parallel."""
    data = tmp_path / "tests" / "assets" / "c4_test"
    data.mkdir(parents=True)
    document = json.dumps({"text": tiny_models.ANSWER * 40})
    (data / "data.json").write_text(f"{document}\n" * 64)
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = None  # torchtitan's Jinja has no tag "generation".
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # A name of torch after 2.13 that this release of torchtitan calls behind its first step.
    monkeypatch.setattr(torch.distributed, "set_timeout", lambda *_: None, raising=False)
    launcher = "torchrun --nproc_per_node=4 --rdzv_backend c10d --rdzv_endpoint=localhost:0 --tee 3"
    script = (
        "-m torchtitan.train --module llama3 --config llama3_debugmodel --training.seq_len 256 "
        "--parallelism.spmd_backend partial_dtensor --hf_assets_path tokenizer --dump_folder out "
        f"--parallelism.tensor_parallel_degree {tensor}"
    )
    assert main(["trace", "--json", "--steps", "2", *launcher.split(), *script.split()]) == 0
    found = Estimate.model_validate_json(capsys.readouterr().out)
    assert found.code is not None
    assert (found.code.num_steps, found.num_gpus) == (2, 4)
    assert {one.kind for one in found.traffic} >= {"all_gather", "reduce_scatter"}
    assert any("FlexAttention" in note for note in found.assumptions)
