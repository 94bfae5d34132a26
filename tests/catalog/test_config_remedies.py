"""A refusal of a config is true, and a remedy gives the model that the config describes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainfit.api.recipes import load_recipe
from trainfit.catalog.text_model import text_model
from trainfit.cli.main import main
from trainfit.models.build import build_model
from trainfit.models.hf import hf_config_from
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "model_type": "nemotron_h", "hidden_size": 64, "num_hidden_layers": 10, "vocab_size": 100,
}  # fmt: skip
PATTERN = {"hybrid_override_pattern": "MEMEM*EMEM"}
ROUTED = {"model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 0}
IMAGES = {"model_type": "mistral3", "vision_config": {"num_hidden_layers": 24}, "text_config": TINY}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def layers(config: dict[str, Any]) -> int:
    """Return the layers that transformers builds of a config's text model, checked first."""
    checked = load_recipe(config).model.config
    assert isinstance(checked, dict)
    return hf_config_from(text_model(checked).config).num_hidden_layers


@pytest.mark.parametrize(
    ("config", "num_layers"),
    [
        (TINY, 2),
        (HYBRID | PATTERN, 10),
        (without(HYBRID, "num_hidden_layers") | PATTERN, 10),
        (TINY | ROUTED | {"layer_types": ["attention"] * 2}, 2),
        (IMAGES, 2),
        ({"model_type": "odd", "llm_config": IMAGES}, 2),
        (TINY | {"num_params": 8_030_261_248}, 2),
    ],
)
def test_what_a_config_states_is_built(config: dict[str, Any], num_layers: int) -> None:
    assert layers(config) == num_layers


REFUSED: dict[str, tuple[dict[str, Any], str, dict[str, Any] | None]] = {
    "a key that the type does not read": (
        without(TINY, "num_hidden_layers") | {"n_layers": 2},
        "n_layers = 2: transformers' llama would be built with 32; write num_hidden_layers",
        TINY,
    ),
    "no pattern": (
        HYBRID,
        "num_hidden_layers = 10: transformers' nemotron_h would be built with 4; add the keys",
        HYBRID | {"layer_types": ["full_attention"] * 10},
    ),
    "a pattern of another length": (
        HYBRID | PATTERN | {"num_hidden_layers": 12},
        "num_hidden_layers = 12: transformers' nemotron_h would be built with 10; correct it, or hybrid_",
        HYBRID | PATTERN,
    ),
    "a class that transformers has": (
        TINY | {"model_type": "odd", "architectures": ["LlamaForCausalLM"]},
        "'odd': unknown to transformers; write model_type: llama, whose LlamaForCausalLM its",
        TINY | {"architectures": ["LlamaForCausalLM"]},
    ),
    "a class that transformers has, with other keys": (
        without(TINY, "num_hidden_layers")
        | {"model_type": "odd", "n_layers": 2, "architectures": ["LlamaForCausalLM"], "auto_map": {"a": "b"}},
        "'odd': code of its repository, which is never run, and no type of transformers is known",
        None,
    ),
    "trust_remote_code": (
        TINY | {"trust_remote_code": True}, "never run; remove the key: it changes no layer", TINY,
    ),
    "a method": (TINY | {"to_dict": 1}, "to_dict = 1: is the name of a method", TINY),
    "two numbers of layers": (
        IMAGES | {"num_hidden_layers": 40},
        "num_hidden_layers = 40: the text model's own is 2, which is built; correct model.config.text_config",
        IMAGES,
    ),
    "a bidirectional model": (TINY | {"is_causal": False}, "name a causal language model, or trace", None),
    "a wrong size inside": (
        IMAGES | {"text_config": TINY | {"hidden_size": "x"}}, "config.text_config.hidden_size = 'x'", None,
    ),
    "no type inside": (
        IMAGES | {"text_config": without(TINY, "model_type")}, "text_config.model_type: missing", None,
    ),
    "a part that is a list": (IMAGES | {"text_config": [1]}, "text_config = [1]: not a mapping", None),
    "experts that no token meets": (
        TINY | ROUTED | {"num_local_experts": 4}, "num_experts_per_tok = 0: no token would meet", None,
    ),
    "experts of the type's default number": (
        TINY | {"model_type": "mixtral", "num_experts_per_tok": 0}, "no token would meet an expert", None,
    ),
    "heads without elements": (
        TINY | {"head_dim": 0}, "head_dim = 0: not a size; write at least 1, or leave it out", TINY,
    ),
    "an infinite number": (
        TINY | {"rms_norm_eps": {"__float__": "Infinity"}}, "rms_norm_eps = inf: a model of it cannot", None,
    ),
}  # fmt: skip
"""Case -> a config, words of its refusal, and the config that the remedy gives."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusals_remedy_gives_the_model_that_was_described(case: str) -> None:
    config, words, remedied = REFUSED[case]
    with pytest.raises(InputError) as caught:
        build_model(load_recipe(config).model, dtype=torch.float32, device="meta")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    if remedied is not None:
        assert layers(remedied) == (10 if remedied["model_type"] == "nemotron_h" else 2)


OTHER_FILES = {
    "adapter_config.json": ({"peft_type": "LORA", "base_model_name_or_path": "a/b"}, "PEFT.*trainfit import"),
    "tokenizer_config.json": ({"tokenizer_class": "LlamaTokenizer"}, "a tokenizer's config"),
    "tokenizer.json": ({"added_tokens": [], "pre_tokenizer": None, "model": {"type": "BPE"}}, "a tokenizer,"),
    "generation_config.json": ({"eos_token_id": 2, "transformers_version": "5"}, "a generation_config.json"),
    "model.safetensors.index.json": ({"metadata": {}, "weight_map": {}}, "the index of a model's weights"),
    "preprocessor_config.json": ({"image_processor_type": "x"}, "an image processor's config"),
    "params.json": ({"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": -1}, "the params.json of"),
    "ds.json": ({"zero_optimization": {"stage": 3}}, "a DeepSpeed config"),
    "config.json": (without(TINY, "model_type"), "model.config.model_type: missing; add the model type"),
    "named.json": ({"vocab_size": 8, "architectures": ["XForCausalLM"]}, "add the one of XForCausalLM"),
    "empty.json": ({}, "model.config.model_type: missing"),
    "list.json": ([1], "model.config: not a mapping"),
}  # fmt: skip


def test_another_file_is_named_and_never_read_as_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, (content, _) in OTHER_FILES.items():
        (tmp_path / name).write_text(json.dumps(content))
    cases = {name: words for name, (_, words) in OTHER_FILES.items()}
    for name, words in {**cases, "folder": "this folder has no config.json"}.items():
        assert main(["predict", name]) == 65
        (line,) = capsys.readouterr().err.splitlines()
        assert all(part in line for part in words.split(".*")), line


def test_notes_say_what_is_built_otherwise() -> None:
    from trainfit.catalog.config_notes import config_notes

    stored = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    quantized = recipe_from({"model": {"config": TINY | stored}, "quantize": "nf4", "adapter": "lora"})
    name = "model.config.quantization_config (bitsandbytes, 4 bits)"
    assert config_notes(quantized) == (f"{name} is not applied: quantize: nf4 is",)
    for content, words in (("gptq", "(gptq)"), ({"bits": "x"}, "(unknown method)")):
        (note,) = config_notes(recipe_from({"model": {"config": TINY | {"quantization_config": content}}}))
        assert words in note
        assert "quantize" not in note.partition(")")[2]
    experts = recipe_from({"model": {"config": TINY | stored | {"num_experts": 8}}})
    assert "adapter" not in " ".join(config_notes(experts))
    assert config_notes(recipe_from({"model": "gpt2"})) == ()
