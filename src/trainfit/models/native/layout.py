"""Where each tensor of the Hugging Face layout lives in a NativeDecoder: one row each, for loading and saving alike.

Llama, Mistral and Qwen share this layout. Fused weights hold several of its tensors, one below the other: rows
0..h*d of ``attention.qkv`` are ``q_proj``, then come ``k_proj`` and ``v_proj``; ``mlp.up`` is ``gate_proj`` above
``up_proj``.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from trainfit.models.native.config import NativeConfig
from trainfit.models.native.decoder import NativeDecoder


class Slot(NamedTuple):
    """Hugging Face name, name in the native decoder, and the rows of that parameter (None: all of it)."""

    name: str
    parameter: str
    rows: slice | None = None


def slots(config: NativeConfig) -> Iterator[Slot]:
    """Every tensor of the Hugging Face layout of this config, in file order; a tied head has none of its own."""
    yield Slot("model.embed_tokens.weight", "embed.weight")
    if config.position_embedding == "learned":
        yield Slot("model.embed_positions.weight", "embed_positions.weight")
    for layer in range(config.num_hidden_layers):
        yield from _block_slots(config, f"model.layers.{layer}", f"layers.{layer}")
    if config.norm_placement == "pre":
        yield from _norm_slots(config, "model.norm", "norm")
    if not config.tie_word_embeddings:
        yield Slot("lm_head.weight", "lm_head.weight")


def tensor_of(model: NativeDecoder, slot: Slot) -> Tensor:
    """The slot's values: a view of the parameter, detached, free to be read or written."""
    parameter = model.get_parameter(slot.parameter).detach()
    return parameter if slot.rows is None else parameter[slot.rows]


def _block_slots(config: NativeConfig, theirs: str, ours: str) -> Iterator[Slot]:
    heads = config.num_attention_heads * config.head_dim
    groups = config.num_key_value_heads * config.head_dim
    qkv = {"q_proj": heads, "k_proj": groups, "v_proj": groups}
    yield from _norm_slots(config, f"{theirs}.input_layernorm", f"{ours}.attention_norm")
    yield from _fused_slots(qkv, f"{theirs}.self_attn", f"{ours}.attention.qkv", config.attention_bias)
    if config.qk_norm:
        yield from _norm_slots(config, f"{theirs}.self_attn.q_norm", f"{ours}.attention.q_norm")
        yield from _norm_slots(config, f"{theirs}.self_attn.k_norm", f"{ours}.attention.k_norm")
    yield Slot(f"{theirs}.self_attn.o_proj.weight", f"{ours}.attention.out.weight")
    if config.attention_output_bias:
        yield Slot(f"{theirs}.self_attn.o_proj.bias", f"{ours}.attention.out.bias")
    yield from _norm_slots(config, f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm")
    up = {"gate_proj": config.intermediate_size} if config.gated_mlp else {}
    up["up_proj"] = config.intermediate_size
    yield from _fused_slots(up, f"{theirs}.mlp", f"{ours}.mlp.up", config.mlp_bias)
    yield Slot(f"{theirs}.mlp.down_proj.weight", f"{ours}.mlp.down.weight")
    if config.mlp_bias:
        yield Slot(f"{theirs}.mlp.down_proj.bias", f"{ours}.mlp.down.bias")


def _fused_slots(sizes: dict[str, int], theirs: str, ours: str, bias: bool) -> Iterator[Slot]:
    for kind in ("weight", "bias") if bias else ("weight",):
        start = 0
        for part, size in sizes.items():
            yield Slot(f"{theirs}.{part}.{kind}", f"{ours}.{kind}", slice(start, start + size))
            start += size


def _norm_slots(config: NativeConfig, theirs: str, ours: str) -> Iterator[Slot]:
    yield Slot(f"{theirs}.weight", f"{ours}.weight")
    if config.norm == "layernorm":
        yield Slot(f"{theirs}.bias", f"{ours}.bias")
