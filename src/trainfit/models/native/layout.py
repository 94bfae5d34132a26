"""Map tensors of the Hugging Face layout (Llama, Mistral, Qwen) to parameters of a NativeDecoder.

Fused parameters hold several of them as row ranges: ``attention.qkv`` is q_proj, k_proj and v_proj;
``mlp.up`` is gate_proj and up_proj.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from trainfit.models.native.config import NativeConfig
from trainfit.models.native.decoder import NativeDecoder


class MappedTensor(NamedTuple):
    """Hugging Face name, native parameter, and its rows (None: all)."""

    name: str
    parameter: str
    rows: slice | None = None


def mapped_tensors(config: NativeConfig) -> Iterator[MappedTensor]:
    """Yield every tensor of the config's Hugging Face layout in file order, without a tied output layer."""
    yield MappedTensor("model.embed_tokens.weight", "embed.weight")
    if config.position_embedding == "learned":
        yield MappedTensor("model.embed_positions.weight", "embed_positions.weight")
    for layer in range(config.num_hidden_layers):
        yield from _block_tensors(config, f"model.layers.{layer}", f"layers.{layer}")
    if config.norm_placement == "pre":
        yield from _norm_tensors(config, "model.norm", "norm")
    if not config.tie_word_embeddings:
        yield MappedTensor("lm_head.weight", "lm_head.weight")


def tensor_of(model: NativeDecoder, entry: MappedTensor) -> Tensor:
    """Return a detached view of the tensor in the model, to read or write."""
    parameter = model.get_parameter(entry.parameter).detach()
    return parameter if entry.rows is None else parameter[entry.rows]


def _block_tensors(config: NativeConfig, theirs: str, ours: str) -> Iterator[MappedTensor]:
    heads = config.num_attention_heads * config.head_dim
    groups = config.num_key_value_heads * config.head_dim
    qkv = {"q_proj": heads, "k_proj": groups, "v_proj": groups}
    yield from _norm_tensors(config, f"{theirs}.input_layernorm", f"{ours}.attention_norm")
    yield from _fused_tensors(qkv, f"{theirs}.self_attn", f"{ours}.attention.qkv", config.attention_bias)
    if config.qk_norm:
        yield from _norm_tensors(config, f"{theirs}.self_attn.q_norm", f"{ours}.attention.q_norm")
        yield from _norm_tensors(config, f"{theirs}.self_attn.k_norm", f"{ours}.attention.k_norm")
    yield MappedTensor(f"{theirs}.self_attn.o_proj.weight", f"{ours}.attention.out.weight")
    if config.attention_output_bias:
        yield MappedTensor(f"{theirs}.self_attn.o_proj.bias", f"{ours}.attention.out.bias")
    yield from _norm_tensors(config, f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm")
    up = {"gate_proj": config.intermediate_size} if config.gated_mlp else {}
    up["up_proj"] = config.intermediate_size
    yield from _fused_tensors(up, f"{theirs}.mlp", f"{ours}.mlp.up", config.mlp_bias)
    yield MappedTensor(f"{theirs}.mlp.down_proj.weight", f"{ours}.mlp.down.weight")
    if config.mlp_bias:
        yield MappedTensor(f"{theirs}.mlp.down_proj.bias", f"{ours}.mlp.down.bias")


def _fused_tensors(sizes: dict[str, int], theirs: str, ours: str, bias: bool) -> Iterator[MappedTensor]:
    for kind in ("weight", "bias") if bias else ("weight",):
        start = 0
        for part, size in sizes.items():
            yield MappedTensor(f"{theirs}.{part}.{kind}", f"{ours}.{kind}", slice(start, start + size))
            start += size


def _norm_tensors(config: NativeConfig, theirs: str, ours: str) -> Iterator[MappedTensor]:
    yield MappedTensor(f"{theirs}.weight", f"{ours}.weight")
    if config.norm == "layernorm":
        yield MappedTensor(f"{theirs}.bias", f"{ours}.bias")
