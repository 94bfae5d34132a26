"""The numbers of a decoder that closed forms need, read off a config.json mapping; no torch.

Legend of the closed forms: a heads, b sequences of a micro-batch, h hidden size, h_ff feed-forward size,
L layers, s tokens of a sequence, v vocabulary, N parameters.
"""

from typing import Any, Literal

from trainfit.catalog.model_types import ModelType, model_type, model_types
from trainfit.spec.errors import InputError
from trainfit.spec.value import PositiveInt, Value

FeedForward = Literal["relu", "gelu", "swiglu"]


class Shape(Value):
    """Sizes in elements.

    ``heads * head_dim`` need not be ``hidden``; values may have a head size of their own.
    """

    hidden: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    value_dim: PositiveInt
    feed_forward: PositiveInt
    vocab: PositiveInt
    kind: FeedForward
    tied: bool
    learned_positions: int = 0
    """Rows of a learned position table, if there is one."""
    experts: int = 0
    """Routed experts of a mixture layer; 0 in a dense model."""
    experts_per_token: int = 0
    expert_feed_forward: int = 0
    dense_layers: int = 0
    """Layers of a mixture model that are dense all the same."""


def shape_of(config: dict[str, Any]) -> Shape:
    """The shape that a config.json mapping describes.

    Raises:
        InputError: a model type whose layers are not known here, or a size that is missing.
    """
    row = model_type(config.get("model_type"))
    hidden = _size(config, "hidden_size", "n_embd", "d_model")
    heads = _size(config, "num_attention_heads", "n_head")
    head_dim = _latent_head(config) or config.get("head_dim") or hidden // heads
    return Shape(
        hidden=hidden,
        layers=_size(config, "num_hidden_layers", "n_layer", "num_layers"),
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=head_dim,
        value_dim=config.get("v_head_dim") or head_dim,
        feed_forward=_first(config, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
        or 4 * hidden,
        vocab=_size(config, "vocab_size"),
        kind=_kind(config, row),
        tied=bool(config.get("tie_word_embeddings", row.ties_embeddings)),
        learned_positions=_learned_positions(config, row),
        **_experts(config),
    )


def _latent_head(config: dict[str, Any]) -> int | None:
    if "qk_nope_head_dim" not in config:
        return None
    return config["qk_nope_head_dim"] + config["qk_rope_head_dim"]


def _kv_heads(config: dict[str, Any], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _first(config, "num_key_value_heads", "num_kv_heads") or heads


def _kind(config: dict[str, Any], row: ModelType) -> FeedForward:
    is_own = row.name == "trainfit"
    if config.get("gated_mlp", True) if is_own else row.feed_forward == "gated":
        return "swiglu"
    if row.feed_forward is None and not is_own:
        known = ", ".join((*(one.name for one in model_types().values() if one.feed_forward), "trainfit"))
        raise InputError(
            "no closed form for its layers",
            f"known: {known}",
            field="model.config.model_type",
            value=row.name,
        )
    activation = _first(config, "hidden_act", "activation_function") or "gelu"
    return "relu" if activation == "relu" else "gelu"


def _learned_positions(config: dict[str, Any], row: ModelType) -> int:
    if row.learned_positions or config.get("position_embedding") == "learned":
        return int(_first(config, "n_positions", "max_position_embeddings") or 0)
    return 0


def _experts(config: dict[str, Any]) -> dict[str, int]:
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts")
    if not experts:
        return {}
    return {
        "experts": experts,
        "experts_per_token": _size(config, "num_experts_per_tok"),
        "expert_feed_forward": _first(config, "moe_intermediate_size", "intermediate_size") or 0,
        "dense_layers": config.get("first_k_dense_replace", 0),
    }


def _first(config: dict[str, Any], *keys: str) -> int | Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _size(config: dict[str, Any], *keys: str) -> int:
    found = _first(config, *keys)
    if found is None:
        raise InputError("missing", f"add {keys[0]}", field=f"model.config.{keys[0]}")
    return found
