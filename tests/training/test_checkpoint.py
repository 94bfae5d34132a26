"""Checkpoints: bit-identical state, sealed with SHA-256, whole or not there at all."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from trainfit.spec.errors import InputError
from trainfit.spec.recipe_file import recipe_from
from trainfit.step import Step, assemble
from trainfit.training import checkpoint, durable, state
from trainfit.training.checkpoint import Progress

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 97, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 97, "n_positions": 64}


def assembled(settings: tuple[str, ...] = (), config=LLAMA) -> Step:
    data = {"model": {"config": config}, "batch": {"micro": 2, "seq": 16}, "precision": "fp32"}
    return assemble(recipe_from(data, list(settings)), torch.device("cpu"))


def run(step: Step, seeds: range) -> list[float]:
    return [step(step.random_batches(seed)).item() for seed in seeds]


CASES = {
    "adamw-fused": (),
    "adamw-foreach-bf16": ("optimizer.implementation=foreach", "precision=bf16"),
    "adamw-forloop": ("optimizer.implementation=forloop",),
    "sgd-momentum": ("optimizer.name=sgd", "optimizer.momentum=0.9"),
    "sgd": ("optimizer.name=sgd",),
    "adafactor": ("optimizer.name=adafactor", "optimizer.implementation=forloop", "precision=bf16"),
    "adafactor-momentum": (
        "optimizer.name=adafactor", "optimizer.implementation=forloop", "optimizer.momentum=0.9",
        "precision=bf16",
    ),
    "in-backward": ("optimizer.in_backward=true",),
    "lora": ("adapter={kind: lora, rank: 4}", "precision=bf16"),
    "amp-fp16": ("precision=amp-fp16",),
    "amp-bf16": ("precision=amp-bf16", "batch.accumulate=2"),
}  # fmt: skip


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_loaded_step_goes_on_with_the_same_bits(tmp_path, settings):
    straight = assembled(settings)
    run(straight, range(3))
    saved = checkpoint.save(tmp_path, straight, Progress(3, 1.5), {"recipe": 1}, keep=2)
    resumed = assembled(settings)
    durable.check_folder(saved)
    assert durable.read_json(saved / "run.json") == {"recipe": 1}
    assert checkpoint.load(saved, resumed) == Progress(3, 1.5)
    assert run(straight, range(3, 7)) == run(resumed, range(3, 7))
    for (name, one), (_, other) in zip(
        straight.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


def test_random_generators_go_on(tmp_path):
    # GPT-2 drops out, so its loss depends on torch's generator.
    straight = assembled(("attention=eager",), GPT2)
    run(straight, range(2))
    saved = checkpoint.save(tmp_path, straight, Progress(2, None), {}, keep=2)
    losses = run(straight, range(2, 5))
    resumed = assembled(("attention=eager",), GPT2)
    checkpoint.load(saved, resumed)
    assert run(resumed, range(2, 5)) == losses
    checkpoint.load(saved, resumed)
    torch.manual_seed(99)
    assert run(resumed, range(2, 5)) != losses, "the generator matters here"


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
    durable.check_folder(path)
    checkpoint.load(path, resumed)
    assert run(step, range(1, 3)) == run(resumed, range(1, 3))


def test_views_are_saved_as_they_read(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    parts = {"row": whole[1], "transposed": whole.T, "whole": whole}
    checkpoint._write(tmp_path, "x", parts)
    read = load_file(tmp_path / "x-00000.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in parts.items())


def test_any_flipped_byte_is_found_and_its_file_named(tmp_path):
    step = assembled()
    run(step, range(1))
    path = checkpoint.save(tmp_path, step, Progress(1, None), {"recipe": {}}, keep=2)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in (0, len(content) // 3, len(content) - 2):
            changed = bytearray(content)
            changed[place] ^= 0x10
            file.write_bytes(changed)
            with pytest.raises(InputError) as refused:
                durable.check_folder(path)
            assert refused.value.file == str(file)
        file.write_bytes(content)
    durable.check_folder(path)


def test_missing_added_and_cut_files_are_found(tmp_path):
    path = checkpoint.save(tmp_path, assembled(), Progress(1, None), {}, keep=2)
    extra = path / "notes.txt"
    extra.write_text("hello")
    with pytest.raises(InputError, match=r"notes\.txt: not part"):
        durable.check_folder(path)
    extra.unlink()
    weights = path / "model-00000.safetensors"
    os.truncate(weights, 100)
    with pytest.raises(InputError, match="has 100 bytes"):
        durable.check_folder(path)
    weights.unlink()
    with pytest.raises(InputError, match=r"model-00000\.safetensors: missing"):
        durable.check_folder(path)
    (path / durable.MANIFEST).unlink()
    with pytest.raises(InputError, match=r"manifest\.json: missing"):
        durable.check_folder(path)


def test_the_newest_are_kept_and_none_overwritten(tmp_path):
    step = assembled()
    for number in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, Progress(number, None), {}, keep=2)
    assert [path.name for path in checkpoint.existing(tmp_path)] == ["step-00000003", "step-00000010"]
    before = durable.sha256(tmp_path / "step-00000010" / durable.MANIFEST)
    with pytest.raises(FileExistsError):
        checkpoint.save(tmp_path, step, Progress(10, None), {"other": 1}, keep=2)
    assert durable.sha256(tmp_path / "step-00000010" / durable.MANIFEST) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, assembled(), Progress(1, None), {}, keep=2)
    assert list(tmp_path.iterdir()) == []


def test_leavings_of_a_killed_process_are_no_checkpoints(tmp_path):
    (tmp_path / ".unfinished-step-00000004-77").mkdir()
    (tmp_path / ".unfinished-step-00000004-77" / "model-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".unfinished-run.json").write_text("{")
    assert checkpoint.existing(tmp_path) == []
    durable.remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, assembled(), Progress(1, None), {}, keep=2)
    for config in (
        LLAMA | {"hidden_size": 64},
        LLAMA | {"num_hidden_layers": 3},
        LLAMA | {"tie_word_embeddings": False},
    ):
        with pytest.raises(InputError, match="do not fit"):
            checkpoint.load(path, assembled((), config))
    with pytest.raises(InputError, match="do not fit"):
        checkpoint.load(path, assembled(("precision=bf16",)))
