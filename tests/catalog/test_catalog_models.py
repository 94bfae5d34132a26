"""The catalog's model configs build with transformers and have the published number of parameters."""

import functools
import json
import re

import pytest

from trainfit.catalog import load
from trainfit.catalog.config_checks import check_config
from trainfit.spec.errors import InputError
from trainfit.spec.units import read_count

ROWS = load.models()
PUBLISHED = [name for name, row in ROWS.items() if row.published and row.config["model_type"] != "trainfit"]


@functools.cache
def meta_parameters(name: str) -> int:
    """Count the parameters of transformers' model of the config, tied ones once; nothing is allocated."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = load.model_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in model.parameters())


def rounds_to(params: int, published: str) -> bool:
    """Return whether a count equals the published one within half a unit of its last printed digit."""
    last_digit = re.sub(r"\d(?=.*\d)", "0", re.sub(r"\d(?!.*\d)", "1", published))
    return abs(params - read_count(published)) <= read_count(last_digit) / 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_count(name: str) -> None:
    row, params = ROWS[name], meta_parameters(name)
    assert rounds_to(params, row.published), f"{params:,} does not round to {row.published}"


@pytest.mark.parametrize(
    ("name", "published"), [("gemma-3-4b", "3209M"), ("gemma-3-12b", "10759M"), ("gemma-3-27b", "25600M")]
)
def test_gemma_3_without_its_embedding(name: str, published: str) -> None:
    """https://arxiv.org/abs/2503.19786, table 1: non-embedding parameters of the text model."""
    config = load.model_config(name)
    assert rounds_to(meta_parameters(name) - config["vocab_size"] * config["hidden_size"], published)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.published])
def test_a_config_without_a_published_count_builds(name: str) -> None:
    assert meta_parameters(name) > 1e5


def llama_parameters(d: int, ff: int, layers: int, vocab: int) -> int:
    """Return the number of parameters of a Llama in closed form.

    Untied embeddings; a layer: four d x d projections, three d x ff, two norms; one final norm.
    """
    return 2 * vocab * d + layers * (4 * d * d + 3 * d * ff + 2 * d) + d


@pytest.mark.parametrize(
    ("name", "d", "ff", "layers", "heads"),
    [
        ("small", 768, 3072, 12, 12),
        ("medium", 1024, 4096, 24, 16),
        ("large", 1280, 5120, 36, 20),
        ("xl", 1600, 6400, 48, 25),
        ("2.7b", 2560, 10240, 32, 32),
        ("10b", 4608, 12288, 50, 36),
    ],
)
def test_the_course_sizes_have_the_stated_shape(name: str, d: int, ff: int, layers: int, heads: int) -> None:
    config = load.model_config(name)
    assert (config["hidden_size"], config["intermediate_size"]) == (d, ff)
    assert (config["num_hidden_layers"], config["num_attention_heads"]) == (layers, heads)
    assert config["num_key_value_heads"] == heads
    assert config["head_dim"] * heads == d
    stated = {"vocab_size": 10_000, "hidden_act": "silu", "tie_word_embeddings": False}
    assert stated.items() <= config.items()
    assert meta_parameters(name) == llama_parameters(d, ff, layers, 10_000)


def test_deep_one_has_the_stated_shape_and_count() -> None:
    config = load.model_config("deep-one-1.6b")
    stated = {
        "model_type": "trainfit", "hidden_act": "relu", "norm_placement": "post",
        "position_embedding": "alibi", "tie_word_embeddings": False, "gated_mlp": True,
    }  # fmt: skip
    assert stated.items() <= config.items()
    weights = 2 * 8000 * 2048 + 32 * (4 * 2048**2 + 3 * 2048 * 5400)  # Norms add less than 0.01 %.
    assert rounds_to(weights, ROWS["deep-one-1.6b"].published)


def test_the_families_that_people_ask_for_are_there() -> None:
    assert len(ROWS) >= 40
    families = {row.family for row in ROWS.values()}
    assert families >= {
        "GPT-2", "Pythia", "GPT-NeoX", "OPT", "Llama 2", "Llama 3", "Mistral", "Mixtral", "Qwen2.5", "Qwen3",
        "Qwen3 MoE", "Gemma", "Gemma 2", "Gemma 3", "Phi-3", "Phi-4", "Falcon", "BLOOM", "DeepSeek",
        "TinyLlama",
    }  # fmt: skip
    assert all(row.source.url and row.source.accessed for row in ROWS.values())
    assert {path.stem for path in (load.FOLDER / "models").glob("*.json")} == set(ROWS)


def test_the_config_given_out_is_a_copy() -> None:
    load.model_config("gpt2")["n_layer"] = 99
    assert load.model_config("gpt2")["n_layer"] == 12


def test_a_users_own_config_json_works_in_the_same_way(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}))
    assert load.model_config(str(path))["hidden_size"] == 64
    assert load.model_config({"model_type": "gpt2", "n_layer": 3}) == {"model_type": "gpt2", "n_layer": 3}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"trust_remote_code": True},
            r"model\.config\.trust_remote_code = [Tt]rue.*never run; remove the key: it changes no layer",
        ),
        ({"model_type": None}, r"model\.config\.model_type: missing; add the model type"),
        ({"hidden_size": -1}, r"model\.config\.hidden_size = -1: not a size; write a whole number"),
        ({"hidden_size": "64"}, r"model\.config\.hidden_size = '64': not a size"),
        ({"num_hidden_layers": True}, r"num_hidden_layers = [Tt]rue: not a size"),
        ({"vocab_size": 10**12}, r"vocab_size = 1000000000000: not a size"),
        ({"intermediate_size": [8, -8]}, r"intermediate_size\[1\] = -8: not a"),
        ({"attn_layer_period": 10**6}, r"attn_layer_period = 1000000: far over any model's"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            r"heads = 3: does not divide the 4 atten",
        ),
        ({"num_attention_heads": 1, "hidden_size": 2**17}, "over 65,536 each"),
        (
            {"rope_scaling": {"short_factor": [1.0]}},
            r"short_factor = \[1\.0\]: a list of one factor",
        ),
        ({"rope_scaling": {"factor": 0}}, r"rope_scaling\.factor = 0: a model of it cannot train"),
        ({"return_dict": None}, "null, but training needs the model's outputs by name; write true"),
    ],
)
def test_a_config_that_cannot_be_trusted_is_refused_in_one_line(keys: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load.model_config({"model_type": "llama"} | keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"model_type": "llama", "x": NaN}', '{"a": 1, "a": 2}', "[1]", "{"])
def test_a_file_that_is_no_strict_json_object_is_refused(tmp_path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        load.model_config(str(path))


def test_an_unknown_model_lists_near_names() -> None:
    with pytest.raises(InputError, match=r"model\.config = 'lama-3\.1-8b'.*did you mean llama-3\.1-8b"):
        load.model_config("lama-3.1-8b")


def test_the_default_config_of_every_causal_model_of_transformers_passes() -> None:
    """The limits and ranges that are checked by a key's name refuse none of some 190 model types."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    num_checked = 0
    for model_type in {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # Some have no default that their own checks take.
            continue
        check_config(json.loads(config.to_json_string(use_diff=False)))
        num_checked += 1
    assert num_checked > 220
