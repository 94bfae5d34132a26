"""Keys of a config.json one by one: native computes the same as transformers, or refuses them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from native_and_hf import LLAMA3, TINY, YARN, batch, theirs_with_random_norms_and_biases
from trainfit.catalog.model_types import native_types
from trainfit.models.build import build_native
from trainfit.models.hf import build_hf
from trainfit.models.native.config import NativeConfig
from trainfit.models.weights.layout import layout
from trainfit.models.weights.read import read_folder
from trainfit.spec.errors import InputError

WINDOWS = {"sliding_window": 8, "use_sliding_window": True}
FULL, SLIDING = "full_attention", "sliding_attention"


def yarn(**more: Any) -> dict[str, Any]:
    return {"rope_theta": 100.0, "rope_scaling": {**YARN, **more}}


def llama3(**more: Any) -> dict[str, Any]:
    return {"rope_theta": 100.0, "rope_scaling": {**LLAMA3, **more}}


EQUAL: list[dict[str, Any]] = [
    {},
    {"head_dim": 16},
    {"num_key_value_heads": 1},
    {"attention_bias": True, "tie_word_embeddings": True},
    {"mlp_bias": True},
    *({"hidden_act": name} for name in ("gelu", "gelu_new", "relu", "swish")),
    {"rms_norm_eps": 0.1},
    {"pretraining_tp": 2},
    # RoPE
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_theta": 100.0}},
    {"rope_theta": 100.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
    {"rope_theta": 7},
    {"rope_scaling": None},
    {"rope_scaling": {"rope_type": "default", "factor": 2.0, "attention_factor": 3.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "attention_factor": 3.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0}},
    llama3(),
    llama3(attention_factor=3.0),
    llama3(low_freq_factor=2.0),
    {"max_position_embeddings": 16, "rope_scaling": LLAMA3},
    {"original_max_position_embeddings": 8, "rope_scaling": LLAMA3},
    {"original_max_position_embeddings": 8, **yarn()},
    yarn(),
    yarn(factor=None),
    yarn(factor=0.5),
    yarn(mscale=0.7, mscale_all_dim=1.0),
    yarn(mscale=0.7),
    yarn(attention_factor=0.5),
    yarn(beta_fast=8, beta_slow=2),
    yarn(truncate=False, beta_fast=4.0),
    # the embedding's padding row
    {"pad_token_id": 5},
    {"pad_token_id": 5, "tie_word_embeddings": True},
    {"pad_token_id": -1},
    # keys that these families do not have
    dict.fromkeys(("rotary_pct", "layer_norm_eps", "hidden_dropout", "resid_pdrop", "embd_pdrop"), 0.5)
    | dict.fromkeys(
        ("logit_scale", "logits_scaling", "attention_multiplier", "residual_multiplier",
         "embedding_multiplier", "final_logit_softcapping", "attn_logit_softcapping",
         "query_pre_attn_scalar", "clip_qkv"), 2.0)
    | dict.fromkeys(
        ("use_qk_norm", "qkv_bias", "use_bias", "alibi", "parallel_attn", "scale_embedding"), True)
    | {"no_rope_layers": [0, 1, 0], "attention_chunk_size": 8},
]  # fmt: skip
"""What native and transformers compute alike, in every family."""

WINDOWED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": 8, "layer_types": [SLIDING] * 3}),
    *((family, {"sliding_window": 8}) for family in ("llama", "qwen2", "qwen3")),
    *((family, {**WINDOWS, "max_window_layers": 3}) for family in ("qwen2", "qwen3")),
    *((family, {**WINDOWS, "layer_types": [FULL] * 3}) for family in ("llama", "qwen2", "qwen3")),
]
"""Windows, which the families read differently, where all layers are alike."""

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention_dropout": 0.5}, "native has no dropout"),
    ({"is_causal": False}, "is_causal"),
    ({"hidden_act": "quick_gelu"}, "hidden_act"),
    ({"layer_types": [SLIDING, FULL, FULL], "sliding_window": 8}, "identical"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "native has default, linear, llama3, yarn"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
     "rotates whole heads"),
    (llama3(partial_rotary_factor=0.5), "rotates whole heads"),
    (yarn(partial_rotary_factor=0.5), "rotates whole heads"),
    ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor"),
    (llama3(low_freq_factor=8.0, high_freq_factor=2.0), "from low_freq_factor 8 to high_freq_factor 2"),
    ({"rope_theta": None}, "rope_theta"),
    ({"pad_token_id": 97}, "pad_token_id"),
    ({"pad_token_id": -98}, "pad_token_id"),
]  # fmt: skip


def config_of(family: str, change: dict[str, Any]) -> dict[str, Any]:
    plain = {"model_type": family, **TINY, **({"sliding_window": None} if family == "mistral" else {})}
    return copy.deepcopy({**plain, **change})


@pytest.mark.parametrize("change", EQUAL, ids=str)
def test_every_family_computes_it_as_transformers_does(change: dict[str, Any], tmp_path: Path):
    for family in native_types():
        assert_equal(family, change, tmp_path / family)


@pytest.mark.parametrize(("family", "change"), WINDOWED, ids=str)
def test_windows_are_read_as_the_family_reads_them(family: str, change: dict[str, Any], tmp_path: Path):
    assert_equal(family, change, tmp_path)


def assert_equal(family: str, change: dict[str, Any], folder: Path) -> None:
    config = config_of(family, change)
    given = copy.deepcopy(config)
    theirs = theirs_with_random_norms_and_biases(config)
    ours = build_native(config, dtype=torch.float32, device="cpu")
    assert config == given, "building changes no recipe"
    if theirs.generation_config.pad_token_id == -1:
        theirs.generation_config.pad_token_id = None  # Which transformers 5.17 does not save.
    theirs.save_pretrained(folder)
    read_folder(ours, folder)
    ids, labels = batch()
    ids[:, ::3] = 5  # also the padding token of some changes
    expected, got = theirs(input_ids=ids, labels=labels), ours(ids, labels)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
    expected.loss.backward()
    got.loss.backward()
    entries = {entry.name: entry for entry in layout(ours)}
    gradients = {key: value.grad for key, value in theirs.named_parameters()}
    assert set(gradients) == set(entries), "the same weights"
    for parameter in ours.parameters():
        parameter.data = parameter.grad
    own = dict(ours.named_parameters())
    for key, gradient in gradients.items():
        got_gradient = entries[key].of(own[entries[key].parameter])
        torch.testing.assert_close(got_gradient, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=str)
def test_the_rest_is_refused_in_one_line(change: dict[str, Any], words: str):
    for family in native_types():
        with pytest.raises(InputError, match=words) as caught:
            build_native(config_of(family, change), dtype=torch.float32, device="meta")
        assert "\n" not in str(caught.value)


def test_a_padding_row_begins_as_zeros_and_stays():
    model = build_native(config_of("llama", {"pad_token_id": 5}), dtype=torch.float32, device="cpu")
    assert not model.embed.weight[5].any()
    assert model.embed.weight[4].any()


def test_a_model_whose_tokens_see_the_next_ones_is_no_language_model():
    with pytest.raises(InputError, match="no next token to learn"):
        build_hf(config_of("llama", {"is_causal": False}), dtype=torch.float32, device="meta")


def test_own_keys_still_turn_a_part_of_each_head():
    config = {"model_type": "trainfit", **TINY, "partial_rotary_factor": 0.5}
    found = build_native(config, dtype=torch.float32, device="meta").config
    assert isinstance(found, NativeConfig)
    assert found.rotary_dim == 4
