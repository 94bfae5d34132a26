"""Recognise files of a model's folder that are given in place of its config.json, by their keys."""

from collections.abc import Mapping
from typing import Any

from trainfit.catalog.text_model import LAYER_KEYS, TEXT_PARTS
from trainfit.spec.errors import InputError

OF_THE_FOLDER = "name the config.json of the same folder"
OTHER_FILES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("weight_map",), "the index of a model's weights", OF_THE_FOLDER),
    (("added_tokens", "pre_tokenizer"), "a tokenizer", OF_THE_FOLDER),
    (("tokenizer_class",), "a tokenizer's config", OF_THE_FOLDER),
    (("added_tokens_decoder",), "a tokenizer's config", OF_THE_FOLDER),
    (("image_processor_type",), "an image processor's config", OF_THE_FOLDER),
    (("feature_extractor_type",), "a feature extractor's config", OF_THE_FOLDER),
    (("processor_class",), "a processor's config", OF_THE_FOLDER),
    (("log_history", "global_step"), "the state of a Trainer", OF_THE_FOLDER),
    (("zero_optimization",), "a DeepSpeed config", "name a model's config.json or a recipe"),
    (("_diffusers_version",), "a config of diffusers", "trace a script that trains it with trainfit trace"),
)  # fmt: skip
"""Keys that all stand in a file -> what it is, and the remedy; the first that fits holds."""
OF_GENERATION = frozenset(
    """
    bos_token_id eos_token_id pad_token_id do_sample temperature top_p top_k max_length max_new_tokens
    repetition_penalty
    """.split()
)
SIZES = frozenset((*LAYER_KEYS, *TEXT_PARTS)) | frozenset(
    """
    model_type architectures hidden_size n_embd d_model vocab_size num_attention_heads n_head
    intermediate_size
    """.split()
)
"""Keys by one of which a mapping is taken for a model's config."""


def is_no_recipe(data: Any) -> bool:
    """Return whether a mapping is a model's config, or another file of a model's folder, and no recipe."""
    if not isinstance(data, Mapping) or data.keys() & {"extends"}:
        return False
    if _other_file(data) is not None:
        return True
    return "model" not in data and bool(data.keys() & SIZES)


def _other_file(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what the file is, and the remedy; None: it may be a config or a recipe."""
    if "peft_type" in config:
        base = config.get("base_model_name_or_path")
        named = f" ({base})" if isinstance(base, str) and base else ""
        return "an adapter's config", f"name its base model{named} and add --set adapter=lora"
    if "model_type" not in config and config.keys() >= {"dim", "n_layers", "n_heads"}:
        remedy = "name the config.json of the model in transformers' format"
        return "the params.json of an original checkpoint", remedy
    if config.keys() & SIZES:
        return None
    for keys, kind, remedy in OTHER_FILES:
        if all(key in config for key in keys):
            return kind, remedy
    if "_from_model_config" in config or ("transformers_version" in config and config.keys() & OF_GENERATION):
        return "a generation_config.json", OF_THE_FOLDER
    return None


def refuse_other_file(config: Mapping[str, Any]) -> None:
    """Refuse another file than a model's config, and a config without a model type."""
    other = _other_file(config)
    if other is not None:
        raise InputError(f"this is {other[0]}, and no model's config", other[1], field="model.config")
    kind = config.get("model_type")
    if (isinstance(kind, str) and kind) or any(isinstance(config.get(part), dict) for part in TEXT_PARTS):
        return
    architectures = config.get("architectures")
    remedy = "add the model type, such as 'llama'"
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        remedy = f"add the one of {architectures[0]}"
    problem = "missing" if kind is None else "not a name"
    raise InputError(problem, remedy, field="model.config.model_type", value=kind)
