"""Every family that the catalog speaks of builds, gives an fp32 loss, and shows its decoder blocks."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.loss.loss_utils import LOSS_MAPPING

from trainfit.models.build import build_model
from trainfit.models.hf import hf_config_from
from trainfit.models.layers import layer_lists
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import ModelSpec

VOCABULARY, LAYERS = 97, 3
COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = {
    **COMMON, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TINY = {
    "gpt2": {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64},
    "gpt_neox": {**COMMON, "rotary_pct": 0.25},
    "opt": {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "bloom": {"hidden_size": 32, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCABULARY},
    "falcon": COMMON,
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 8},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "qwen2_moe": {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**GROUPED, **EXPERTS},
    "gemma": GROUPED,
    "gemma2": {**GROUPED, "sliding_window": 8},
    "gemma3_text": {**GROUPED, "sliding_window": 8},
    "phi3": GROUPED,
    "deepseek_v3": {
        **GROUPED, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip


def tiny(family: str, **changes: object) -> ModelSpec:
    return ModelSpec(config={"model_type": family, **TINY[family], **changes})


@pytest.mark.parametrize("family", TINY)
def test_family_builds_trains_and_shows_its_blocks(family: str) -> None:
    attention = "eager" if family in ("gpt2", "llama", "gemma2") else "sdpa"
    torch.manual_seed(0)
    model = build_model(tiny(family), dtype=torch.bfloat16, device="cpu", attention=attention)
    ids = torch.randint(3, VOCABULARY, (2, 16))
    out = model(input_ids=ids, labels=ids)
    assert out.loss.dtype == torch.float32
    assert out.logits.shape == (2, 16, VOCABULARY)
    # Random weights know nothing: the loss is near that of a uniform guess.
    assert abs(out.loss.item() - math.log(VOCABULARY)) < 0.7
    assert out.get("past_key_values") is None
    out.loss.backward()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.training
    [(name, blocks)] = layer_lists(model)
    assert len(blocks) == LAYERS
    assert model.get_submodule(name) is blocks


def test_a_named_backend_is_refused_where_transformers_has_no_sdpa_path() -> None:
    with pytest.raises(InputError, match="use attention: sdpa or eager"):
        build_model(tiny("bloom"), dtype=torch.float32, device="meta", attention="flash")


def test_layer_lists_sees_through_peft() -> None:
    from peft import LoraConfig, get_peft_model

    model = build_model(tiny("llama"), dtype=torch.float32, device="cpu")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))  # type: ignore[arg-type]
    [(name, blocks)] = layer_lists(wrapped)
    assert name.endswith("model.layers")
    assert len(blocks) == LAYERS


def test_meta_and_fake_hold_no_memory_and_a_fake_step_gives_every_gradient() -> None:
    big = tiny("llama", hidden_size=16384, intermediate_size=53248, num_hidden_layers=4, vocab_size=128256)
    on_meta = build_model(big, dtype=torch.bfloat16, device="meta")
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}
    with FakeTensorMode():
        fake = build_model(big, dtype=torch.bfloat16, device="cpu")
        ids = torch.randint(0, VOCABULARY, (2, 16))
        fake(input_ids=ids, labels=ids).loss.backward()
    assert {(type(p), p.device.type) for p in fake.parameters()} == {(FakeTensor, "cpu")}
    assert sum(p.numel() for p in fake.parameters()) == sum(p.numel() for p in on_meta.parameters())
    assert all(p.grad is not None for p in fake.parameters())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "lama"}, ["model.config.model_type", "'lama'", "llama"]),
        ({"hidden_size": 3}, ["model.config.model_type", "missing"]),
        ({"model_type": "vit"}, ["causal language model", "'vit'"]),
        ({"model_type": "llama", "attention_bias": "yes"}, ["llama", "attention_bias"]),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, ["llama", "attention heads"]),
        ({"model_type": "llama", **GROUPED, "pad_token_id": 500}, ["Padding_idx", "'llama'"]),
        ({"model_type": "bert", **COMMON}, ["'bert'", "an encoder", "name a causal language model"]),
    ],
)
def test_bad_configs_are_told_in_one_line(config: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        build_model(ModelSpec(config=config), dtype=torch.float32, device="meta")  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "config", [{"model_type": "bert", **COMMON, "is_decoder": True}, {"model_type": "gpt_neox", **COMMON}]
)
def test_is_decoder_matters_for_encoders_only(config: dict[str, object]) -> None:
    """GPT-NeoX's config has an is_decoder, false, that nothing reads; a BERT with it hides the tokens to
    come."""
    model = build_model(ModelSpec(config=config), dtype=torch.float32, device="cpu").eval()  # type: ignore[arg-type]
    ids_bs = torch.arange(8)[None] + 5
    changed_bs = ids_bs.clone()
    changed_bs[0, -1] = 3
    with torch.no_grad():
        first, second = (model(input_ids=ids).logits[0] for ids in (ids_bs, changed_bs))
    assert torch.equal(first[:-1], second[:-1])
    assert not torch.equal(first[-1], second[-1])


@pytest.mark.parametrize("written", ["Infinity", '{"__float__": "Infinity"}'])
def test_a_config_may_hold_infinity(written: str, tmp_path: Path) -> None:
    """Files of transformers 4 have it as a word, those of transformers 5 tagged."""
    file = tmp_path / "config.json"
    file.write_text(f'{{"model_type": "mamba2", "time_step_limit": [0.0, {written}]}}')
    config = recipe_from({"model": {"config": str(file)}}).model.config
    assert isinstance(config, dict)
    assert tuple(hf_config_from(config).time_step_limit) == (0.0, math.inf)


def test_the_loss_is_chosen_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """transformers cannot tell GPT2LMHeadModel's loss by its name and says so on stderr; we name it."""
    config = {"model_type": "gpt2", **TINY["gpt2"]}
    model = build_model(ModelSpec(config=config), dtype=torch.float32, device="cpu")  # type: ignore[arg-type]
    assert model.loss_function is LOSS_MAPPING["ForCausalLM"]
    assert "loss_type" not in caplog.text


def test_no_model_is_imported_while_the_device_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module makes when it is imported would stay on the GPU (torchaudio's 512 bytes)."""
    name = "transformers.models.persimmon.modeling_persimmon"  # which no other test needs
    there = []

    plain = AutoModelForCausalLM.from_config

    def watched(*arguments: object, **settings: object) -> nn.Module:
        there.append(name in sys.modules)
        return plain(*arguments, **settings)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", watched)
    config = {"model_type": "persimmon", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
              "num_attention_heads": 2, "vocab_size": 64}  # fmt: skip
    build_model(
        ModelSpec(config=config, implementation="hf"), dtype=torch.float32, device="meta", attention="sdpa"
    )
    assert there == [True]


@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_a_model_of_too_many_modules_is_refused_while_it_is_built(implementation, monkeypatch):
    monkeypatch.setattr("trainfit.models.build.MAX_MODULES", 20)
    spec = tiny("llama", num_hidden_layers=20).model_copy(update={"implementation": implementation})
    with pytest.raises(InputError, match="describes over 20 modules"):
        build_model(spec, dtype=torch.float32, device="meta")
    monkeypatch.undo()
    assert build_model(spec, dtype=torch.float32, device="meta") is not None
