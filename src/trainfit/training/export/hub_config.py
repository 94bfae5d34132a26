"""The config.json of a run's model in the layout of transformers."""

from typing import Any

from trainfit.catalog.load import model_config
from trainfit.models.native.config import NativeConfig
from trainfit.models.native.families import native_config
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import ModelSpec

HIDDEN_ACT = {"silu_unfused": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
SAME_RESULT = ("hidden_act", "norm", "softmax", "alibi_bias")
"""Keys of which some values are the same function in another order of operations."""
NO_TYPE = "no model type of transformers computes this"
NEEDED: dict[str, Any] = {
    "position_embedding": ("rope",), "norm_placement": ("pre",), "gated_mlp": (True,),
    "norm": ("rmsnorm", "rmsnorm_unfused"),
}  # fmt: skip
"""Keys of ``model_type: trainfit`` -> values that a type of Llama's form has."""


def hub_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the mapping of a config.json of transformers with the model's mathematics.

    Raises:
        InputError: ``model_type: trainfit`` with values that no type of transformers has.
    """
    config = model_config(spec.config)
    if config.get("model_type") != "trainfit":
        return config
    native = native_config(config)
    for key, values in NEEDED.items():
        if getattr(native, key) not in values:
            raise _refused(key, getattr(native, key))
    if native.rope.partial_rotary_factor != 1:
        raise _refused("rope.partial_rotary_factor", native.rope.partial_rotary_factor)
    found = _of_llamas_form(native)
    again = native_config(found)
    for key, value in native:
        if key not in SAME_RESULT and getattr(again, key) != value:
            raise _refused(key, value)
    return found


def _of_llamas_form(native: NativeConfig) -> dict[str, Any]:
    kind = "llama"
    if native.qk_norm:
        kind = "qwen3"
    elif native.sliding_window is not None:
        kind = "mistral"
    elif native.attention_bias and not native.attention_output_bias:
        kind = "qwen2"
    keys = native.model_dump(exclude_none=True, exclude={
        *NEEDED, *SAME_RESULT, "norm_eps", "rope", "qk_norm", "attention_bias", "attention_output_bias",
        "mlp_bias",
    })  # fmt: skip
    biases = {"attention_bias": native.attention_bias, "mlp_bias": native.mlp_bias}
    return keys | biases | {
        "model_type": kind,
        "hidden_act": HIDDEN_ACT.get(native.hidden_act, native.hidden_act),
        "rms_norm_eps": native.norm_eps,
        "rope_parameters": native.rope.model_dump(exclude_defaults=True)
        | {"rope_type": native.rope.rope_type, "rope_theta": native.rope.rope_theta},
    }  # fmt: skip


def _refused(key: str, value: Any) -> InputError:
    remedy = "it stays in the run's checkpoint; train a model type of transformers, such as llama, to export"
    return InputError(NO_TYPE, remedy, field=f"model.config.{key}", value=value)
