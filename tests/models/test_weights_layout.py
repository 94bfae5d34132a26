"""The layout of a model's folder against the folders that transformers writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trainfit.catalog.model_types import native_types
from trainfit.models.build import build_model
from trainfit.models.weights.layout import layout, tied
from trainfit.spec.recipe import ModelSpec

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in native_types()},
    "gpt2": {},
    "gpt_neox": {},
    "bloom": {},
    "phi3": {},
    "gemma3_text": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4,
    },
}  # fmt: skip


def saved(kind: str, folder: Path) -> Any:
    """Return a small model of transformers, saved by it in ``folder``."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **CONFIGS[kind]}))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_names_shapes_and_values_both_ways(kind: str, tmp_path: Path) -> None:
    theirs = saved(kind, tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    spec = ModelSpec(config=config)
    stored = layout(build_model(spec, dtype=torch.float32, device="meta"))
    assert {one.name: one.shape for one in stored} == {name: tuple(one.shape) for name, one in files.items()}

    own = theirs.state_dict()
    for one in stored:
        assert torch.equal(one.of(own[one.parameter]), files[one.name])
    read = {name: torch.full_like(tensor, float("nan")) for name, tensor in own.items()}
    for one in stored:
        one.of(read[one.parameter]).copy_(files[one.name])
    for name in set(own) - set(tied(theirs)):
        assert torch.equal(read[name], own[name]), f"{name} is filled, and in its order"


@pytest.mark.parametrize("kind", native_types())
def test_native_layout_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    spec = ModelSpec(config=config, implementation="native")
    model = build_model(spec, dtype=torch.float32, device="meta")
    stored = layout(model)
    assert {one.name: one.shape for one in stored} == {name: tuple(one.shape) for name, one in files.items()}
    places = {one.name: one for one in stored}
    up = model.get_parameter("layers.1.mlp.up.weight")
    gate, down = places["model.layers.1.mlp.gate_proj.weight"], places["model.layers.1.mlp.up_proj.weight"]
    assert (gate.rows_of(up), down.rows_of(up)) == (slice(0, 48), slice(48, 96))


def test_rows_of_experts_are_no_range_of_whole_rows(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    spec = ModelSpec(config=json.loads((tmp_path / "config.json").read_text()))
    model = build_model(spec, dtype=torch.float32, device="meta")
    experts = [one for one in layout(model) if "experts" in one.name]
    assert experts
    assert not any(one.rows_of(model.get_parameter(one.parameter)) for one in experts)
