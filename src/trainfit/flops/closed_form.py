"""FLOPs of a step in closed form, counted by products or by the published 6N; no torch.

A multiply-add is two FLOPs. A weight in a product costs 2 FLOPs a token in the forward and 4 in the backward,
half of them for its own gradient, which frozen weights do not need. Products of queries and keys cost
6 H (Q + V) a layer and pair: H heads, Q and V the head sizes of keys and values (PaLM,
https://arxiv.org/abs/2204.02311, appendix B). Recomputation counts one more forward, in the hardware's FLOPs
only.

- ``product_step_flops`` counts what the virtual GPU counts: multiplied weights, and the pairs that causal
  masks, windows and chunks leave: s(s+1)/2 of a causal sequence.
- ``step_flops`` is the published convention: N is all parameters, also of tables that are only looked up;
  windows are not followed, and a causal token sees half of the sequence.
"""

from typing import Any, Literal

from trainfit.catalog.model_types import ModelType, model_type
from trainfit.flops.shape import Shape, shape_of
from trainfit.spec.value import Flops, Value

AttentionCount = Literal["causal", "full", "none"]
Trained = Literal["all", "adapter"]
Recomputed = Literal["none", "full"]

WHOLE_FORWARD = {"none": "", "full": "; recomputation as one whole forward, an upper bound"}
"""A block's last product and the output head are not run again."""


class StepFlops(Value):
    """FLOPs of one optimizer step over all its tokens, and the convention they are counted by."""

    model_flops: Flops
    hardware_flops: Flops
    convention: str


def step_flops(
    config: dict[str, Any],
    params: int,
    *,
    batch: int,
    seq: int,
    attention: AttentionCount = "causal",
    trained: Trained = "all",
    recomputed: Recomputed = "none",
) -> StepFlops:
    """Return the FLOPs of a step of ``batch`` sequences of ``seq`` tokens by the published convention.

    Args:
        params: the base model's parameters, N. A mixture's idle experts are subtracted here.
        attention: the part of the scores that counts.
        trained: ``all`` weights (6N) or an ``adapter`` on frozen ones (4N; its own few FLOPs are left out).
        recomputed: ``full`` adds one more forward to the hardware's FLOPs.
    """
    tokens, active = batch * seq, active_params(config, params)
    scores = attention_flops_per_token(shape_of(config), seq, attention) * tokens
    per_param = 6 if trained == "all" else 4
    model = per_param * active * tokens + scores
    count = "N" if active == params else "N active"
    return StepFlops(
        model_flops=model,
        hardware_flops=model + (2 * active * tokens + scores / 3 if recomputed == "full" else 0),
        convention=f"{per_param}{count} + {attention} attention a token, N = {active:,} parameters, "
        f"embedding included{WHOLE_FORWARD[recomputed]}",
    )


def active_params(config: dict[str, Any], params: int) -> int:
    """Return the parameters that one token meets: of a mixture, without the experts not chosen."""
    shape = shape_of(config)
    idle = (shape.layers - shape.dense_layers) * (shape.experts - shape.experts_per_token)
    return params - idle * 3 * shape.hidden * shape.expert_feed_forward


def attention_flops_per_token(shape: Shape, seq: int, attention: AttentionCount) -> float:
    """Return the forward and backward FLOPs of scores and weighted values: 6 L H (Q + V) T."""
    seen = {"full": 1.0, "causal": 0.5, "none": 0.0}[attention] * seq
    return 6.0 * shape.layers * shape.heads * (shape.head_dim + shape.value_dim) * seen


def product_step_flops(
    config: dict[str, Any],
    *,
    batch: int,
    seq: int,
    attention: AttentionCount = "causal",
    trained: Trained = "all",
    recomputed: Recomputed = "none",
    adapter_params: int = 0,
) -> StepFlops:
    """Return the FLOPs of a step by its products; arguments as ``step_flops`` takes them.

    Args:
        adapter_params: weights of the adapter, each in a product.

    Raises:
        InputError: a model type whose layers are not known here, or a size that is missing.
    """
    shape, tokens, weights = shape_of(config), batch * seq, multiplied_params(config)
    pairs = _all_pairs(config, shape, seq, attention)
    scores = 2 * batch * shape.heads * (shape.head_dim + shape.value_dim) * pairs
    forward = 2 * (weights + adapter_params) * tokens + scores
    convention, excluded = "6N", ""
    model = 3 * forward
    if trained == "adapter":
        # Nothing before the first block is trained, so its input needs no gradient.
        unneeded = 2 * _first_inputs(config, shape) * tokens
        model = (4 * weights + 6 * adapter_params) * tokens + 3 * scores - unneeded
        convention = "4N"
        if shape.experts:
            excluded = "; not the products in which PEFT writes out each expert's adapter"
    return StepFlops(
        model_flops=model,
        hardware_flops=model + (forward if recomputed == "full" else 0),
        convention=f"{convention} + {attention} attention a token, windows followed, "
        f"N = {weights:,} multiplied weights{excluded}{WHOLE_FORWARD[recomputed]}",
    )


def multiplied_params(config: dict[str, Any]) -> int:
    """Return the number of weights that one token is multiplied with: no tables, a tied head once."""
    shape = shape_of(config)
    blocks = shape.layers * sum(_attention_inputs(config, shape))
    for layer in range(shape.layers):
        blocks += _mixture(config, shape) if _is_mixture(config, shape, layer) else _dense(shape)
    return blocks + _head(config, shape)


def layer_windows(config: dict[str, Any]) -> list[tuple[str, int] | None]:
    """For each layer ``("window", tokens)``, ``("chunk", tokens)``, or None where it sees all tokens before.

    A window counts the token itself.
    """
    row, layers = model_type(config.get("model_type")), shape_of(config).layers
    window = config.get("sliding_window", row.window)
    if row.window_is_switched and not config.get("use_sliding_window"):
        window = None
    chunk = config.get("attention_chunk_size")
    limits = {
        "sliding_attention": ("window", window) if window else None,
        "chunked_attention": ("chunk", chunk) if chunk else None,
    }
    return [limits.get(kind) for kind in _layer_kinds(config, row, layers)]


def _layer_kinds(config: dict[str, Any], row: ModelType, layers: int) -> list[str]:
    """Return each layer's kind as transformers' configuration classes name them."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    if row.full_attention_every:
        named = config.get(row.full_attention_every_key) if row.full_attention_every_key else None
        period = named or row.full_attention_every
        return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    if row.full_attention_first:
        first = config.get("max_window_layers", row.full_attention_first)
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    return ["sliding_attention"] * layers


def visible_pairs(seq: int, limit: tuple[str, int] | None) -> int:
    """Query-key pairs of one causal sequence under a window or chunks."""
    if limit is None or limit[1] >= seq:
        return seq * (seq + 1) // 2
    kind, tokens = limit
    if kind == "window":
        return tokens * (tokens + 1) // 2 + (seq - tokens) * tokens
    rest = seq % tokens
    return seq // tokens * (tokens * (tokens + 1) // 2) + rest * (rest + 1) // 2


def _all_pairs(config: dict[str, Any], shape: Shape, seq: int, attention: AttentionCount) -> int:
    if attention == "none":
        return 0
    if attention == "full":
        return shape.layers * seq * seq
    return sum(visible_pairs(seq, limit) for limit in layer_windows(config))


def _attention_inputs(config: dict[str, Any], shape: Shape) -> tuple[int, int]:
    """One layer's weights that read the block's input, and attention's others."""
    h = shape.hidden
    if "kv_lora_rank" not in config:
        return h * shape.head_dim * (shape.heads + 2 * shape.kv_heads), shape.heads * shape.head_dim * h
    # Multi-head latent attention (arXiv:2405.04434, section 2.1).
    latent, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    queries, compressed = shape.heads * shape.head_dim, config.get("q_lora_rank")
    first = h * (compressed or queries) + h * (latent + rope)
    others = latent * shape.heads * (nope + shape.value_dim) + shape.heads * shape.value_dim * h
    return first, others + (compressed * queries if compressed else 0)


def _matrices(shape: Shape) -> int:
    return 3 if shape.kind == "swiglu" else 2


def _dense(shape: Shape) -> int:
    return _matrices(shape) * shape.hidden * shape.feed_forward


def _mixture(config: dict[str, Any], shape: Shape) -> int:
    """The router, a token's experts and those that all tokens share."""
    shared = config.get("n_shared_experts") or 0
    experts = (shape.experts_per_token + shared) * _matrices(shape) * shape.hidden * shape.expert_feed_forward
    return shape.hidden * shape.experts + experts


def _is_mixture(config: dict[str, Any], shape: Shape, layer: int) -> bool:
    if not shape.experts or layer < shape.dense_layers or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _head(config: dict[str, Any], shape: Shape) -> int:
    """Return the output matrix's size. OPT-350M has a matrix before and after its blocks."""
    narrow = config.get("word_embed_proj_dim") or shape.hidden
    between = 2 * narrow * shape.hidden if narrow != shape.hidden else 0
    return shape.vocab * narrow + between


def _first_inputs(config: dict[str, Any], shape: Shape) -> int:
    """Weights of the first block that read its input."""
    first, _ = _attention_inputs(config, shape)
    if not model_type(config.get("model_type")).parallel_blocks or config.get("parallel_attn") is False:
        return first
    return first + (_matrices(shape) - 1) * shape.hidden * shape.feed_forward
