"""What a config.json must be before anything is built from it: plain data, no remote code, sizes that make sense.

Enters: a mapping read as strict JSON. Leaves: the same mapping. Whether the model type can be built is for the
room that builds it.
"""

from typing import Any

from trainfit.spec.errors import InputError

REMOTE_CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")
"""Keys by which a config.json asks for Python code to be downloaded and run."""

POSITIVE_KEYS = (
    "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "num_layers", "num_attention_heads", "n_head",
    "num_key_value_heads", "num_kv_heads", "head_dim", "intermediate_size", "ffn_dim", "moe_intermediate_size",
    "vocab_size", "max_position_embeddings", "n_positions", "num_local_experts", "num_experts", "n_routed_experts",
    "num_experts_per_tok",
)  # fmt: skip
"""Sizes that must be whole numbers of at least 1 where they stand (null means the model type's default)."""

LARGEST_SIZE = 2**31 - 1


def check_config(config: Any, *, file: str = "") -> dict[str, Any]:
    """The mapping itself, if it can be built from.

    Raises:
        InputError: not a mapping, no ``model_type``, remote code asked for, or a size that is no positive integer.
    """
    if not isinstance(config, dict):
        raise InputError(
            "not a mapping", "write a config.json's object", field="model.config", value=config, file=file
        )
    for key in REMOTE_CODE_KEYS:
        if config.get(key):
            problem = "asks for code to be downloaded and run, which is never done"
            remedy = "remove the key and use a model type that transformers has itself"
            raise InputError(problem, remedy, field=f"model.config.{key}", value=config[key], file=file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InputError(
            "missing", "add the model type, such as 'llama'", field="model.config.model_type", file=file
        )
    for key in POSITIVE_KEYS:
        _check_size(key, config.get(key), file)
    return config


def _check_size(key: str, value: Any, file: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
        remedy = f"write a whole number from 1 to {LARGEST_SIZE}"
        raise InputError("not a size", remedy, field=f"model.config.{key}", value=value, file=file)
