"""The native decoder against transformers: equal logits and losses, weights through files both ways."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from native_and_hf import LLAMA3, TINY, batch, theirs_with_random_norms_and_biases
from trainfit.models.build import build_native
from trainfit.models.native.safetensors_io import save_safetensors
from trainfit.models.weights.read import read_folder
from trainfit.spec.errors import InputError

CONFIGS = {
    "llama": {"model_type": "llama", **TINY, "rope_theta": 500.0},
    "llama-tied-wide": {"model_type": "llama", **TINY, "tie_word_embeddings": True, "head_dim": 16},
    "llama-biases-gelu": {
        "model_type": "llama", **TINY, "attention_bias": True, "mlp_bias": True,
        "hidden_act": "gelu_pytorch_tanh"
    },
    "llama-rope-llama3": {"model_type": "llama", **TINY, "rope_scaling": LLAMA3, "rope_theta": 100.0},
    "mistral-window": {"model_type": "mistral", **TINY, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", **TINY},
    "qwen3-biases": {"model_type": "qwen3", **TINY, "attention_bias": True},
}  # fmt: skip


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_loss_of_eager_attention_equal(name: str, tmp_path: Path) -> None:
    """test_native_config_keys.py compares SDPA's, with gradients."""
    theirs = theirs_with_random_norms_and_biases(CONFIGS[name], "eager")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ours = build_native(config, dtype=torch.float32, device="cpu", attention="eager")
    read_folder(ours, tmp_path)
    ids, labels = batch()
    expected, got = theirs(input_ids=ids, labels=labels), ours(ids, labels)
    assert expected.logits.std() > 1
    close(got.logits, expected.logits)
    close(got.loss, expected.loss)


@pytest.mark.parametrize(
    ("name", "max_shard_bytes"), [*((name, 2**30) for name in CONFIGS), ("llama-tied-wide", 20_000)]
)
def test_transformers_reads_what_we_write(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIGS[name]
    ours = build_native(config, dtype=torch.float32, device="cpu")
    save_safetensors(ours, tmp_path, config, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes < 2**30)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids, _ = batch()
    close(ours(ids).logits, theirs(input_ids=ids).logits)

    again = build_native(config, dtype=torch.float32, device="cpu")
    read_folder(again, tmp_path)
    assert torch.equal(again(ids).logits, ours(ids).logits)


def test_a_smaller_save_leaves_no_old_shards(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    model = build_native(config, dtype=torch.float32, device="cpu")
    save_safetensors(model, tmp_path, config, max_shard_bytes=20_000)
    save_safetensors(model, tmp_path, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_loss_in_bf16_is_fp32_and_equals_transformers() -> None:
    config = CONFIGS["llama"]
    ours = build_native(config, dtype=torch.bfloat16, device="cpu")
    ids, labels = batch()
    out = ours(ids, labels)
    assert out.logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    from transformers.loss.loss_utils import ForCausalLMLoss

    assert torch.equal(out.loss, ForCausalLMLoss(out.logits, labels, vocab_size=97))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 4}, ["it lacks 9 tensors (model.layers.3", "and 6 more"]),
        ({"num_hidden_layers": 2}, ["it has 9 tensors (model.layers.2", "and 6 more"]),
        ({"intermediate_size": 56}, ["model.layers.0.mlp.gate_proj.weight", "[48, 32]", "[56, 32]"]),
        ({"attention_bias": True}, ["it lacks 12 tensors (model.layers.0.self_attn.q_proj.bias"]),
        ({"tie_word_embeddings": True}, ["lm_head.weight", "tie_word_embeddings: false"]),
    ],
)
def test_weights_of_another_config_are_refused_by_name(
    change: dict[str, object], words: list[str], tmp_path: Path
) -> None:
    config = CONFIGS["llama"]
    save_safetensors(build_native(config, dtype=torch.float32, device="cpu"), tmp_path, config)
    other = build_native({**config, **change}, dtype=torch.float32, device="cpu")
    with pytest.raises(InputError) as caught:
        read_folder(other, tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    model = build_native(config, dtype=torch.float32, device="cpu")
    with pytest.raises(InputError, match="neither model.safetensors nor"):
        read_folder(model, tmp_path)
    save_safetensors(model, tmp_path, config)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        read_folder(model, tmp_path)
