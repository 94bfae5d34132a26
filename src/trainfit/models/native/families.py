"""Any config.json as NativeConfig: our own ``model_type: trainfit``, and Llama, Mistral, Qwen2 and Qwen3.

Those four are read the way transformers reads them: its config classes fill in defaults and bring old RoPE spellings
into one form; what they then hold is copied. What the native decoder lacks (dropout, mixed layer types, other RoPE
kinds) is refused.
"""

from typing import Any, NoReturn

from trainfit.models.hf import hf_config_from
from trainfit.models.native.config import NativeConfig, Rope, activation, from_own_keys
from trainfit.spec.errors import InputError
from trainfit.spec.value import parse

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
OWN_KEYS = ("norm_placement", "position_embedding", "norm", "gated_mlp", "qk_norm")


def native_config(config: dict[str, Any]) -> NativeConfig:
    """The native value of a config.json mapping.

    Raises:
        InputError: a family that native cannot express, an unknown key of ``trainfit``, or a wrong value.
    """
    model_type = config.get("model_type")
    if model_type == "trainfit":
        return from_own_keys(config)
    if model_type in FAMILIES:
        return from_transformers(config)
    known = ", ".join(("trainfit", *FAMILIES))
    raise InputError(
        f"native builds {known}", "use implementation: hf", field="model.config.model_type", value=model_type
    )


def from_transformers(config: dict[str, Any]) -> NativeConfig:
    """The native value of a config.json mapping of one of FAMILIES.

    Raises:
        InputError: naming the key that native cannot express.
    """
    family = config["model_type"]
    for key in OWN_KEYS:
        if key in config:
            raise InputError(
                f"is no key of {family}",
                "use model_type: trainfit",
                field=f"model.config.{key}",
                value=config[key],
            )
    hf = hf_config_from(config)
    if hf.attention_dropout:
        _refuse("attention_dropout", hf.attention_dropout, "native has no dropout")
    heads = hf.num_attention_heads
    keys = {
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": hf.intermediate_size,
        "num_hidden_layers": hf.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": hf.num_key_value_heads or heads,
        "head_dim": getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        "max_position_embeddings": hf.max_position_embeddings,
        "hidden_act": activation(hf.hidden_act),
        "norm_eps": hf.rms_norm_eps,
        "rope": _rope(hf).model_dump(),
        "qk_norm": family == "qwen3",
        "attention_bias": family == "qwen2" or bool(getattr(hf, "attention_bias", False)),
        "attention_output_bias": family != "qwen2" and bool(getattr(hf, "attention_bias", False)),
        "mlp_bias": bool(getattr(hf, "mlp_bias", False)),
        "tie_word_embeddings": hf.tie_word_embeddings,
        "sliding_window": _sliding_window(hf, family),
        "initializer_range": hf.initializer_range,
    }
    return parse(NativeConfig, keys)


def _sliding_window(hf: Any, family: str) -> int | None:
    """The window of every layer; Qwen's are off unless ``use_sliding_window``, and then differ by layer."""
    kinds = set(getattr(hf, "layer_types", None) or ())
    if len(kinds) > 1 or (family != "mistral" and "sliding_attention" in kinds):
        _refuse("layer_types", sorted(kinds), "native's layers are all alike")
    return getattr(hf, "sliding_window", None) if family == "mistral" else None


def _rope(hf: Any) -> Rope:
    given = {key: value for key, value in dict(hf.rope_parameters).items() if value is not None}
    given.pop("type", None)
    if given.get("rope_type", "default") not in ROPE_KINDS:
        _refuse("rope_parameters.rope_type", given["rope_type"], f"native has {', '.join(ROPE_KINDS)}")
    return parse(Rope, given)


def _refuse(key: str, value: Any, problem: str) -> NoReturn:
    raise InputError(problem, "use implementation: hf", field=f"model.config.{key}", value=value)
