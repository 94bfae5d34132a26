"""Check a config.json before anything is built from it: plain data, no remote code, valid sizes and values.

Whether the model type can be built is decided in ``models/``.
"""

import re
from collections.abc import Iterator
from typing import Any

from trainfit.catalog.config_values import check_values
from trainfit.spec.errors import InputError

REMOTE_CODE_KEYS = ("auto_map", "custom_pipelines")
"""Keys that name Python code of a repository, which is never run."""
TRUST_KEY = "trust_remote_code"

LARGEST = {
    2**31 - 1: ("max_position_embeddings", "n_positions"),
    2**24: ("vocab_size",),
    2**20: ("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "moe_intermediate_size"),
    2**16: (
        "num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_kv_heads", "head_dim",
        "num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok",
    ),
    256: ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
}  # fmt: skip
"""Sizes that must be whole numbers from 1 to this where they stand (null means the model type's default).

The limits are far over any model (the deepest published have 126 layers); beyond them a tensor's 64-bit size
overflows, or building takes minutes.
"""

LARGEST_OF_KIND = (
    (re.compile(r"^(?!max_).*(?:layers?|blocks|depth|cycles|per_stack)$"), 256),
    (re.compile(r"_mult$|functions$|^attention_types$"), 256),
    (re.compile(r"^num_labels$|(?:^|_)(?:heads?|experts?|groups?|codebooks|hashes)$|ngram"), 2**16),
    (re.compile(r"^(?:num|n)_"), 2**20),
    (re.compile(r""), 2**31 - 1),
)
"""Pattern of a key -> the largest whole number it may have, wherever it stands; the first that fits holds.

Model types have many names for counts, and their configs or modules make as many of something.
"""
LARGE_COUNTS = re.compile(r"vocab|positions$|ctx$|tokens$")
"""Keys of the kinds above that count what is no module: up to 2**31 - 1."""

SWITCHES = {"return_dict": True, "torchscript": False}
"""Keys that set what transformers' forward returns -> the value that training needs."""

HEAD_KEYS = ("num_attention_heads", "n_head", "num_heads")
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
LARGEST_HEAD = 2**16
"""No attention kernel takes a wider head."""
KEY_VALUE_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads")
"""Config keys of the key-value heads, each shared by a group of query heads."""


def check_config(config: Any, *, file: str = "") -> dict[str, Any]:
    """Return the mapping itself, if a model can be built from it.

    Raises:
        InputError: not a mapping, no ``model_type``, remote code requested, a size that is no positive
            integer or too large, query heads that do not share the key-value heads evenly, a forward that
            returns no mapping, or a value with which no model trains.
    """
    if not isinstance(config, dict):
        raise InputError(
            "not a mapping", "write a config.json's object", field="model.config", value=config, file=file
        )
    if config.get(TRUST_KEY):
        raise remote_code_refused(config, TRUST_KEY, file=file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InputError(
            "missing", "add the model type, such as 'llama'", field="model.config.model_type", file=file
        )
    for largest, keys in LARGEST.items():
        for key in keys:
            _check_size(key, config.get(key), largest, file)
    for part, path in _parts(config, "model.config"):
        _check_counts(part, path, file)
        _check_factors(part, path, file)
    _check_heads(config, file)
    _check_switches(config, file)
    check_values(config, file=file)
    return config


def remote_code_keys(config: Any) -> tuple[str, ...]:
    """Keys of the config that name code of a repository."""
    return tuple(key for key in REMOTE_CODE_KEYS if isinstance(config, dict) and config.get(key))


def ignored(config: Any) -> tuple[str, ...]:
    """A line for each key of the config that names code of a repository."""
    return tuple(
        f"model.config.{key} is ignored: the code that it names is never run"
        for key in remote_code_keys(config)
    )


def remote_code_refused(config: dict[str, Any], key: str, *, file: str = "") -> InputError:
    """The refusal of a config that cannot be built without the code that its ``key`` names."""
    problem = "asks for code to be downloaded and run, which is never done"
    remedy = "remove the key and use a model type that transformers has itself"
    return InputError(problem, remedy, field=f"model.config.{key}", value=config[key], file=file)


def _parts(config: dict[str, Any], path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The config and those within it, such as ``text_config``, with their paths."""
    yield config, path
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _parts(value, f"{path}.{key}")


def _check_counts(config: dict[str, Any], path: str, file: str) -> None:
    """Whole numbers under whatever name, in this part of the config and in its lists."""
    for key, value in config.items():
        for item in _numbers(value):
            largest = next(limit for pattern, limit in LARGEST_OF_KIND if pattern.search(key))
            holds_ids = isinstance(value, list) and key != "attention_types"
            if LARGE_COUNTS.search(key) or holds_ids:
                largest = 2**31 - 1
            if item > largest and (isinstance(item, int) or largest < 2**31 - 1):
                remedy = f"write a number of at most {largest:,}"
                raise InputError("far over any model's", remedy, field=f"{path}.{key}", value=item, file=file)


def _check_factors(config: dict[str, Any], path: str, file: str) -> None:
    """Refuse a LongRoPE list of one factor, which torch would broadcast over all frequencies."""
    for key in ("short_factor", "long_factor"):
        if isinstance(config.get(key), list) and len(config[key]) == 1:
            remedy = "write one for each rotary frequency, half a head's rotated size"
            raise InputError(
                "a list of one factor", remedy, field=f"{path}.{key}", value=config[key], file=file
            )


def _numbers(value: Any) -> Iterator[int | float]:
    """The value if it is a number, or those of a list and of the lists in it."""
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _check_switches(config: dict[str, Any], file: str) -> None:
    for key, needed in SWITCHES.items():
        if key in config and config[key] is not needed:
            remedy = f"write {str(needed).lower()}, or leave it out"
            is_null = config[key] is None
            problem = f"{'null, but ' * is_null}training needs the model's outputs by name"
            raise InputError(problem, remedy, field=f"model.config.{key}", value=config[key], file=file)


def _check_size(key: str, value: Any, largest: int, file: str) -> None:
    if isinstance(value, list):  # One for each layer, as Gemma 3n has it.
        for index, item in enumerate(value):
            _check_size(f"{key}[{index}]", item, largest, file)
    elif value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest
    ):
        remedy = f"write a whole number from 1 to {largest:,}"
        raise InputError("not a size", remedy, field=f"model.config.{key}", value=value, file=file)


def _check_heads(config: dict[str, Any], file: str) -> None:
    """Query heads share key-value heads in equal groups: one number must divide the other."""
    heads = next((config[key] for key in HEAD_KEYS if isinstance(config.get(key), int)), None)
    width = next((config[key] for key in WIDTH_KEYS if isinstance(config.get(key), int)), 0)
    if heads is not None and "head_dim" not in config and width // heads > LARGEST_HEAD:
        problem = f"{heads} heads of {width} elements are over {LARGEST_HEAD:,} each"
        raise InputError(
            problem, "write more heads", field="model.config.num_attention_heads", value=heads, file=file
        )
    for key in KEY_VALUE_HEAD_KEYS:
        shared = config.get(key)
        if heads is not None and isinstance(shared, int) and heads % shared:
            problem = f"does not divide the {heads} attention heads"
            remedy = f"write a divisor of {heads}"
            raise InputError(problem, remedy, field=f"model.config.{key}", value=shared, file=file)
