"""Read a config.json as NativeConfig: ``model_type: trainfit``, Llama, Mistral, Qwen2 and Qwen3.

The four families are read by transformers' config classes, which fill in defaults and normalise RoPE keys.
Keys that a family's code ignores are ignored; features that the native decoder lacks (dropout, mixed layer
types, other RoPE kinds) are refused.
"""

from typing import Any, NoReturn

from trainfit.catalog.model_types import NativeForm, native_types
from trainfit.catalog.model_types import model_type as find_type
from trainfit.models.hf import hf_config_from
from trainfit.models.native.config import NativeConfig, Rope, activation, from_own_keys
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
EQUAL_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "tie_word_embeddings", "initializer_range",
)  # fmt: skip
"""Keys with one meaning in all families and in NativeConfig."""
OWN_KEYS = ("norm_placement", "position_embedding", "norm", "gated_mlp", "qk_norm")


def native_config(config: dict[str, Any]) -> NativeConfig:
    """Return the native config of a config.json mapping; unsupported types, keys and values are refused."""
    model_type = config.get("model_type")
    if model_type == "trainfit":
        return from_own_keys(config)
    form = find_type(model_type).native
    if form is not None:
        return from_transformers(config, form)
    _refuse("model_type", model_type, f"native builds {', '.join(('trainfit', *native_types()))}")


def from_transformers(config: dict[str, Any], form: NativeForm) -> NativeConfig:
    """Return the native config of a mapping of a model type of this form."""
    family = config["model_type"]
    for key in OWN_KEYS:
        if key in config:
            _refuse(key, config[key], f"is no key of {family}", "use model_type: trainfit")
    hf = hf_config_from(config)
    if hf.attention_dropout:
        _refuse("attention_dropout", hf.attention_dropout, "native has no dropout")
    if getattr(hf, "is_causal", None) is False:
        _refuse("is_causal", False, "native's tokens attend only to those before them")
    biased = "attention_bias" in form.bias_keys and bool(getattr(hf, "attention_bias", False))
    heads = hf.num_attention_heads
    keys = {name: getattr(hf, name) for name in EQUAL_KEYS} | {
        "num_key_value_heads": hf.num_key_value_heads or heads,
        "head_dim": getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        "hidden_act": activation(hf.hidden_act),
        "norm_eps": hf.rms_norm_eps,
        "rope": _rope(hf, family).model_dump(),
        "qk_norm": form.qk_norm,
        "attention_bias": form.qkv_bias or biased,
        "attention_output_bias": biased,
        "mlp_bias": "mlp_bias" in form.bias_keys and bool(getattr(hf, "mlp_bias", False)),
        "sliding_window": _sliding_window(hf, form),
        "pad_token_id": _pad_token(hf.pad_token_id, hf.vocab_size),
    }
    return parse(NativeConfig, keys)


def _sliding_window(hf: Any, form: NativeForm) -> int | None:
    """Return the window of every layer; Qwen's differ by layer if ``use_sliding_window`` is set."""
    kinds = set(getattr(hf, "layer_types", None) or ())
    if len(kinds) > 1 or (not form.window and "sliding_attention" in kinds):
        _refuse("layer_types", sorted(kinds), "native's layers are identical")
    return getattr(hf, "sliding_window", None) if form.window else None


def _pad_token(token: int | None, vocabulary: int) -> int | None:
    """Return the padding token; a negative one counts from the end, as in ``nn.Embedding``."""
    if token is None or -vocabulary <= token < vocabulary:
        return token if token is None else token % vocabulary
    problem = f"the vocabulary has {vocabulary} tokens"
    _refuse("pad_token_id", token, problem, "name one of them, or leave it out")


def _rope(hf: Any, family: str) -> Rope:
    hf.standardize_rope_params()  # As models do; a top-level key may replace an inner one.
    given = {key: value for key, value in dict(hf.rope_parameters).items() if value is not None}
    given.pop("type", None)
    kind = given.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        _refuse("rope_parameters.rope_type", kind, f"native has {', '.join(ROPE_KINDS)}")
    share = given.pop("partial_rotary_factor", 1.0)
    if kind != "default" and share != 1.0:
        # These families rotate whole heads: default RoPE ignores the key, the other kinds fail.
        _refuse("rope_parameters.partial_rotary_factor", share, f"{family} rotates whole heads")
    if kind == "yarn" and "factor" not in given:
        given["factor"] = hf.max_position_embeddings / given["original_max_position_embeddings"]
    for key in ("rope_theta", *(() if kind == "default" else ("factor",))):
        if key not in given:
            _refuse(f"rope_parameters.{key}", None, "missing", f"add it, as {kind} RoPE needs it")
    return parse(Rope, given)


def _refuse(key: str, value: Any, problem: str, remedy: str = "use implementation: hf") -> NoReturn:
    raise InputError(problem, remedy, field=f"model.config.{key}", value=value)
