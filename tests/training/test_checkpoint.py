"""Checkpoints: bit-identical state, sealed with SHA-256, whole or not there at all."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from tiny_training import tiny
from trainfit.spec.errors import InputError
from trainfit.step import Step, assemble
from trainfit.training import checkpoint, durable, state
from trainfit.training.checkpoint import Progress

TIED = "model.config.tie_word_embeddings=true"
FORLOOP = "optimizer.implementation=forloop"
ADAFACTOR = ("optimizer.name=adafactor", FORLOOP, "precision=bf16")
CASES = {
    "adamw-fused": (),
    "adamw-foreach-bf16": ("optimizer.implementation=foreach", "precision=bf16"),
    "adamw-forloop": (FORLOOP,),
    "sgd-momentum": ("optimizer.name=sgd", "optimizer.momentum=0.9"),
    "sgd": ("optimizer.name=sgd",),
    "adafactor": ADAFACTOR,
    "adafactor-momentum": (*ADAFACTOR, "optimizer.momentum=0.9"),
    "in-backward": ("optimizer.in_backward=true",),
    "lora": ("adapter={kind: lora, rank: 4}", "precision=bf16"),
    "amp-fp16": ("precision=amp-fp16",),
}


def assembled(*settings: str) -> Step:
    return assemble(tiny("batch.micro=2", "batch.seq=16", TIED, *settings), torch.device("cpu"))


def run(step: Step, seeds: range) -> list[float]:
    return [step(step.random_batches(seed)).item() for seed in seeds]


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_loaded_step_goes_on_with_the_same_bits(tmp_path, settings):
    straight = assembled(*settings)
    run(straight, range(3))
    saved = checkpoint.save(tmp_path, straight, Progress(3, 1.5), {"recipe": 1}, keep=2)
    resumed = assembled(*settings)
    durable.check_folder(saved)
    assert durable.read_json(saved / "run.json") == {"recipe": 1}
    assert checkpoint.load(saved, resumed) == Progress(3, 1.5)
    assert run(straight, range(3, 6)) == run(resumed, range(3, 6))
    pairs = zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True)
    for (name, one), other in pairs:
        assert torch.equal(one, other), name


def test_what_is_in_the_files(tmp_path):
    step = assembled()
    run(step, range(1))
    path = checkpoint.save(tmp_path, step, Progress(1, 4.25), {}, keep=2)
    model = load_file(path / "model-00000.safetensors")
    assert "lm_head.weight" not in model, "a tied weight is written once"
    assert torch.equal(model["model.embed_tokens.weight"], step.model.state_dict()["lm_head.weight"])
    moments = load_file(path / "optimizer-00000.safetensors")
    name, weight = next(iter(step.model.named_parameters()))
    assert torch.equal(moments[f"{name}/exp_avg"], step.optimizers[0].state[weight]["exp_avg"])
    plain = json.loads((path / "state.json").read_text())
    assert (plain["step"], plain["loss"]) == (1, 4.25)
    assert plain["optimizer"]["groups"][0][0]["betas"] == [0.9, 0.999]


def test_shards_hold_all_tensors_and_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 10_000)
    step = assembled()
    run(step, range(1))
    path = checkpoint.save(tmp_path, step, Progress(1, None), {}, keep=2)
    files = sorted(path.glob("model-*.safetensors"))
    assert len(files) > 3
    assert sum(len(load_file(file)) for file in files) == len(state.model_tensors(step)[0])
    resumed = assembled()
    checkpoint.load(path, resumed)
    assert run(step, range(1, 3)) == run(resumed, range(1, 3))


def test_views_are_saved_as_they_read(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    parts = {"row": whole[1], "transposed": whole.T, "whole": whole}
    checkpoint._write(tmp_path, "x", parts)
    read = load_file(tmp_path / "x-00000.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in parts.items())


def test_changed_missing_added_and_cut_files_are_named(tmp_path):
    step = assembled()
    run(step, range(1))
    path = checkpoint.save(tmp_path, step, Progress(1, None), {"recipe": {}}, keep=2)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for index in (0, len(content) // 3, len(content) - 2):
            changed = bytearray(content)
            changed[index] ^= 0x10
            file.write_bytes(changed)
            with pytest.raises(InputError) as refused:
                durable.check_folder(path)
            assert refused.value.file == str(file)
        file.write_bytes(content)
    durable.check_folder(path)
    extra, weights = path / "notes.txt", path / "model-00000.safetensors"
    for change, problem in (
        (lambda: extra.write_text("hello"), r"notes\.txt: not part"),
        (lambda: (extra.unlink(), os.truncate(weights, 100)), "has 100 bytes"),
        (weights.unlink, r"model-00000\.safetensors: missing"),
        ((path / durable.MANIFEST).unlink, r"manifest\.json: missing"),
    ):
        change()
        with pytest.raises(InputError, match=problem):
            durable.check_folder(path)


def test_the_newest_are_kept_and_none_is_overwritten_or_half_written(tmp_path, monkeypatch):
    step = assembled()
    for number in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, Progress(number, None), {}, keep=2)
    kept = ["step-00000003", "step-00000010"]
    assert [path.name for path in checkpoint.existing(tmp_path)] == kept
    before = durable.sha256(tmp_path / "step-00000010" / durable.MANIFEST)
    with pytest.raises(FileExistsError):
        checkpoint.save(tmp_path, step, Progress(10, None), {"other": 1}, keep=2)
    assert durable.sha256(tmp_path / "step-00000010" / durable.MANIFEST) == before

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, step, Progress(11, None), {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_leavings_of_a_killed_process_are_no_checkpoints(tmp_path):
    (tmp_path / ".unfinished-step-00000004-77").mkdir()
    (tmp_path / ".unfinished-step-00000004-77" / "model-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".unfinished-run.json").write_text("{")
    assert checkpoint.existing(tmp_path) == []
    durable.remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, assembled(), Progress(1, None), {}, keep=2)
    for other in ("hidden_size=64", "num_hidden_layers=3", "tie_word_embeddings=false"):
        with pytest.raises(InputError, match="do not fit"):
            checkpoint.load(path, assembled(f"model.config.{other}"))
    with pytest.raises(InputError, match="do not fit"):
        checkpoint.load(path, assembled("precision=bf16"))
