"""Configs of the shapes that are published build the models that they describe, or are refused in one line.

The counts are the publishers' own (the Hub's count of a checkpoint's tensors, or what a report or a model's
name says), of the text model where a model has others. Every model is built on meta, in full size.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainfit.api.recipes import load_recipe
from trainfit.catalog.config_notes import config_notes
from trainfit.catalog.text_model import LAYER_KEYS, text_model, translations
from trainfit.models.build import build_model
from trainfit.models.hf import hf_config_from
from trainfit.models.language_head import language_head
from trainfit.models.layers import active_shares, decoder_blocks, slow_layers
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import ModelSpec
from trainfit.spec.units import read_count

FILE = Path(__file__).parents[1] / "data" / "public_configs.jsonl"
ROWS = {row["name"]: row for row in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())}
BUILT = [name for name, row in ROWS.items() if "refused" not in row]


def rounds_to(count: float, published: str) -> bool:
    """Return whether a count equals the published one within half a unit of its last printed digit."""
    last_digit = re.sub(r"\d(?=.*\d)", "0", re.sub(r"\d(?!.*\d)", "1", published))
    return abs(count - read_count(published)) <= read_count(last_digit) / 2


def built(config: dict[str, Any]) -> nn.Module:
    return build_model(ModelSpec(config=config), dtype=torch.bfloat16, device="meta")


def active_params(model: Any, without: str) -> float:
    """Return the parameters that one token meets; ``without``: parts that the publisher does not count."""
    shares = {one: share for experts, share in active_shares(model).items() for one in experts.parameters()}
    tables = {"embedding": model.get_input_embeddings().weight, "head": model.get_output_embeddings().weight}
    left_out = {tables[name] for name in without.split()}
    return sum(one.numel() * shares.get(one, 1.0) for one in model.parameters() if one not in left_out)


@pytest.mark.parametrize("name", BUILT)
def test_a_published_config_builds_the_model_that_it_describes(name: str) -> None:
    row = ROWS[name]
    recipe = load_recipe(row["config"])
    model = built(row["config"])
    params = sum(one.numel() for one in model.parameters())
    assert rounds_to(params, row.get("params", f"{params}")), f"{params:,}"
    text = text_model(row["config"]).config
    stated = [text[key] for key in LAYER_KEYS if key in text]
    assert len(decoder_blocks(model)) in (stated or [32])
    if "active" in row:
        active = active_params(model, row["without"])
        assert rounds_to(active, row["active"]), f"{active:,.0f}"
    assert bool(active_shares(model)) == ("active" in row or name in ("deepseek-v2-lite", "qwen3-30b-a3b"))
    notes, expected = config_notes(recipe), row.get("notes", [])
    assert len(notes) == len(expected), notes
    assert all(any(words in note for note in notes) for words in expected), notes
    slow = " ".join(slow_layers(model))
    assert row.get("slow", "") in slow
    assert bool(slow) == ("slow" in row)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "refused" in row])
def test_what_is_no_causal_language_model_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(InputError) as caught:
        built(ROWS[name]["config"])
    assert ROWS[name]["refused"] in str(caught.value)
    assert "name a causal language model, or trace a script" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_translated_type_is_published_here() -> None:
    """So a row of remote_code.toml is never without a count from outside."""
    kinds = {row["config"]["model_type"] for row in ROWS.values() if "params" in row}
    untested = {
        "llava_mistral",
        "llava_qwen",
    }  # As llava_llama: the keys of the type that they are named after
    assert translations().keys() - kinds == untested
    assert len(ROWS) >= 60


def test_a_default_config_states_the_sizes_that_are_built() -> None:
    """The check of sizes refuses none of transformers' own types."""
    num_checked = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[kind]()
            written = json.loads(config.to_json_string(use_diff=False))
            CONFIG_MAPPING[kind](**written)
        except Exception:  # Some have no default that their own checks take, or do not read what they write.
            continue
        text = text_model(written).config
        if text["model_type"] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not config.is_encoder_decoder:
            hf_config_from(text)
            num_checked += 1
    assert num_checked > 150


VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32}
IMAGES = {
    "model_type": "qwen2_5_vl", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "vision_config": VISION,
}  # fmt: skip


def test_a_text_model_alone_computes_what_it_does_among_its_towers() -> None:
    """The reference is transformers' whole model, given text; the loss of our output layer's is equal."""
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

    ids_bs = torch.randint(10, 400, (2, 16), generator=torch.Generator().manual_seed(0))
    alone: Any = build_model(ModelSpec(config=IMAGES), dtype=torch.float32, device="cpu", attention="eager")
    whole: Any = AutoModelForImageTextToText.from_config(
        Qwen2_5_VLConfig(**{key: value for key, value in IMAGES.items() if key != "model_type"}),
        attn_implementation="eager",
    )
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    whole.tie_weights()
    expected = whole(input_ids=ids_bs, labels=ids_bs, use_cache=False).loss
    found = alone(input_ids=ids_bs, labels=ids_bs).loss
    assert torch.allclose(found, expected, atol=1e-6), (found, expected)
    assert alone.lm_head.weight is alone.model.embed_tokens.weight
    head = language_head(alone, "chunked")
    assert torch.allclose(head.layer(head.hidden(ids_bs)), alone(input_ids=ids_bs).logits, atol=1e-5)


def test_a_text_model_alone_takes_an_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    model = build_model(ModelSpec(config=IMAGES), dtype=torch.float32, device="meta")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))  # type: ignore[arg-type]
    assert any("lora" in name for name, _ in wrapped.named_parameters())
