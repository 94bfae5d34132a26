"""Configuration of the native decoder: the keys of a config.json with ``model_type: trainfit``.

families.py reads the configs of other model types.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainfit.models.hf import NOT_THE_ARCHITECTURE
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.value import Count, PositiveInt, Value

Activation = Literal["silu", "silu_unfused", "gelu", "gelu_tanh", "relu"]
PositiveFloat = Annotated[float, Field(gt=0)]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "silu_unfused": "silu_unfused", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip
"""Activation by its name in ``hidden_act``."""

NOT_READ = (
    *NOT_THE_ARCHITECTURE, "model_type", "_name_or_path", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
RENAMED = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), "norm_eps"),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), "rope"),
}


class Rope(Value):
    """Rotary embedding; keys are those of transformers' ``rope_parameters``, described in positions.py."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: PositiveFloat = 10_000.0
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    factor: PositiveFloat = 1.0
    original_max_position_embeddings: PositiveInt | None = None
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @model_validator(mode="after")
    def _complete(self) -> "Rope":
        if self.rope_type in {"llama3", "yarn"} and self.original_max_position_embeddings is None:
            raise ValueError(f"{self.rope_type} needs original_max_position_embeddings: add it")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"llama3 interpolates from low_freq_factor {self.low_freq_factor:g} to high_freq_factor "
                f"{self.high_freq_factor:g}: make the second larger"
            )
        if self.rope_type == "yarn" and self.rope_theta <= 1:
            problem = f"yarn divides by the logarithm of rope_theta {self.rope_theta:g}"
            raise ValueError(f"{problem}: write more than 1")
        return self


class NativeConfig(Value):
    """A decoder of ``num_hidden_layers`` identical blocks; sizes are in elements."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt = 2048
    hidden_act: Activation = "silu"
    gated_mlp: bool = True
    norm: Literal["rmsnorm", "rmsnorm_unfused", "layernorm"] = "rmsnorm"
    """``rmsnorm_unfused``: separate fp32 operations, which save two fp32 copies of the input."""
    softmax: Literal["fused", "unfused"] = "fused"
    """For ``attention: eager``: one operation, or exp(x - max) / sum, which saves numerator and result."""
    norm_eps: PositiveFloat = 1e-6
    norm_placement: Literal["pre", "post"] = "pre"
    position_embedding: Literal["rope", "learned", "alibi"] = "rope"
    alibi_bias: Literal["shared", "per_layer"] = "shared"
    """One bias for all blocks, or one that each block computes and saves for its backward."""
    rope: Rope = Rope()
    qk_norm: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: PositiveInt | None = None
    """A token attends to itself and the ``sliding_window - 1`` tokens before it; None: all before it."""
    initializer_range: PositiveFloat = 0.02
    pad_token_id: Count | None = None
    """Token whose input embedding is zero and not trained, as in transformers."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "NativeConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}: make it one"
            )
        if self.position_embedding == "rope" and (self.rotary_dim % 2 or self.rotary_dim < 2):
            raise ValueError(
                f"rope rotates pairs, but {self.rotary_dim} elements of each head rotate: make it even"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that RoPE rotates."""
        return int(self.head_dim * self.rope.partial_rotary_factor)


def from_own_keys(config: dict[str, Any]) -> NativeConfig:
    """Parse a ``model_type: trainfit`` mapping; unknown keys are refused with near names."""
    given = {key: value for key, value in config.items() if key not in NOT_READ and value is not None}
    keys: dict[str, Any] = {RENAMED.get(key, key): value for key, value in given.items()}
    heads = keys.get("num_attention_heads")
    keys.setdefault("num_key_value_heads", heads)
    if isinstance(heads, int) and isinstance(keys.get("hidden_size"), int):
        if "head_dim" not in keys and keys["hidden_size"] % heads:
            problem = f"hidden_size {keys['hidden_size']} is no multiple of it"
            raise InputError(problem, "add head_dim", field="model.config.num_attention_heads", value=heads)
        keys.setdefault("head_dim", keys["hidden_size"] // heads)
    flat = {key: keys.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in keys}
    keys["rope"] = {**flat, **dict(keys.get("rope", {}))}
    keys["hidden_act"] = activation(keys.get("hidden_act", "silu"))
    keys.setdefault("attention_output_bias", keys.get("attention_bias", False))
    return parse(NativeConfig, keys)


def activation(name: Any) -> Activation:
    """Return the activation that ``hidden_act`` names."""
    if name not in ACTIVATIONS:
        problem = f"native has {', '.join(ACTIVATIONS)}"
        raise InputError(problem, "use implementation: hf", field="model.config.hidden_act", value=name)
    return ACTIVATIONS[name]
