"""Find the text model that a config.json describes: plain data, no transformers.

A multimodal config holds it in a part (``text_config``) or among its own keys. A config whose model type is
code of its repository is translated where transformers has the same layers under another name
(remote_code.toml).
"""

import functools
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from trainfit.spec.errors import InputError

FILE = Path(__file__).with_name("remote_code.toml")
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of a multimodal config whose mapping is its language model's config, or holds it in turn."""
OTHER_PARTS = (
    "vision_config",
    "audio_config",
    "visual",
    "vision_tower_config",
    "mm_vision_tower",
    "vq_config",
)
"""Keys of what else a multimodal config describes."""
BUILT_WHOLE = ("git", "phi4_multimodal")
"""Types that transformers builds with their towers alone."""
TEXT_TYPES = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Types of multimodal configs that have the text model's keys among their own -> the text model's type."""
LAYERS_ELSEWHERE = (
    "hybrid_override_pattern",
    "layers_block_type",
    "layer_types",
    "attn_layers",
    "decoder_layers",
)
"""Keys by which some types decide how many layers there are."""
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


class TextModel(NamedTuple):
    """The config of a causal language model, and where it came from."""

    config: dict[str, Any]
    path: str = ""  # Of the part that it is, such as ``text_config.``, with its dot
    left_out: tuple[str, ...] = ()  # Keys of other parts: towers of images or sound
    written_type: str = ""  # The model type that the file has, where it is translated


@functools.cache
def translations() -> dict[str, dict[str, Any]]:
    """Return the rows of remote_code.toml by model type, not to be changed."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def text_model(config: dict[str, Any]) -> TextModel:
    """Return the text model of a config.json's mapping, which is the mapping itself in most cases.

    Raises:
        InputError: the part has no model type, or disagrees with the keys around it.
    """
    left_out = tuple(key for key in OTHER_PARTS if config.get(key))
    part = next((key for key in TEXT_PARTS if isinstance(config.get(key), dict)), None)
    if part is None:
        for key in TEXT_PARTS:
            if config.get(key):
                raise InputError(
                    "not a mapping", "correct it", field=f"model.config.{key}", value=config[key]
                )
        typed = _typed(config)
        return _translated(TextModel(typed, left_out=left_out if typed is not config else ()))
    inner = text_model(config[part])
    found = inner.config
    if not found.get("model_type"):
        raise InputError("missing", "add the type of the text model", field=f"model.config.{part}.model_type")
    for key in LAYER_KEYS:
        if type(config.get(key)) is int and config[key] != found.get(key, config[key]):
            problem = f"the text model's own is {found[key]}, which is built"
            remedy = f"correct model.config.{part}.{key}, or remove this one"
            raise InputError(problem, remedy, field=f"model.config.{key}", value=config[key])
    if "tie_word_embeddings" in config and "tie_word_embeddings" not in found:
        found = {**found, "tie_word_embeddings": config["tie_word_embeddings"]}  # As transformers ties them
    others = (*left_out, *(f"{part}.{key}" for key in inner.left_out))
    return TextModel(found, f"{part}.{inner.path}", others, inner.written_type)


def _typed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose text model has its keys at the top, with the text model's type."""
    kind = TEXT_TYPES.get(str(config.get("model_type")))
    if kind is None:
        return config
    return {**{key: value for key, value in config.items() if key not in OTHER_PARTS}, "model_type": kind}


def _translated(found: TextModel) -> TextModel:
    """Return the text model with transformers' name of its type and keys, if its type is translated."""
    config = found.config
    kind = str(config.get("model_type"))
    row = translations().get(kind)
    if row is None or any(config.get(key) != value for key, value in row.get("only", {}).items()):
        return found
    keys = row.get("keys", {})
    changed = {keys.get(key, key): value for key, value in config.items()}
    for key in row.get("halved", ()):
        changed[key] = changed[key] // 2 if type(changed.get(key)) is int else changed.get(key)
    for key, source in row.get("copied", {}).items():
        if changed.get(key) is None and source in changed:
            changed[key] = changed[source]
    for key, words in row.get("lists", {}).items():
        if isinstance(changed.get(key), list):
            changed[key] = [words.get(str(value), value) for value in changed[key]]
    changed = {**row.get("set", {}), **changed, "model_type": row["is"]}
    left_out = tuple(key for key in OTHER_PARTS if config.get(key))
    return found._replace(config=changed, written_type=kind, left_out=left_out)
