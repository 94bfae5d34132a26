"""The native decoder's forward with a cache: of whole prompts, and of one new token a sequence.

The modules are those of training, with their adapters and quantised weights; only attention differs. Blocks
are not called as a whole, so what is registered on them (recomputation, FSDP's gathering, compilation) does
not run: weights have to be there.

Shapes: n prompts, s positions of the longest, b slots, e hidden_size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.decode_attention.op import decode_attention
from trainfit.models.native import positions
from trainfit.models.native.decoder import NativeDecoder, PositionTensors
from trainfit.rl.rollout.cache import KVCache
from trainfit.spec.errors import InputError


def check(model: NativeDecoder) -> None:
    """Refuse what a cache does not hold: the keys and values of a trained prefix.

    Raises:
        InputError: the model has one.
    """
    if model.num_prefix:
        raise InputError("generation keeps no trained prefix", "use adapter: lora", field="adapter.kind")


def prefill(
    model: NativeDecoder, cache: KVCache, slots: Tensor, input_ids: Tensor, lengths: Tensor
) -> Tensor:
    """Write the prompts' keys and values, and return the logits after each prompt's last token, [n, v].

    Args:
        slots: int64 [n], where the prompts' sequences are kept.
        input_ids: int64 [n, s], padded at the end. Padding follows every token that counts, so no token
            attends to it, and decoding writes over it.
        lengths: int64 [n].
    """
    n, s = input_ids.shape
    x = _embedded(model, input_ids, torch.arange(s, device=input_ids.device))
    shared = model.position_tensors(s, x)
    for layer, block in enumerate(_blocks(model)):
        attention = block.attention

        def attend(x: Tensor, layer: int = layer, attention: Any = attention) -> Tensor:
            q, k, v = attention.projected(x, shared)
            cache.write_prompts(layer, slots, k, v)
            bias = shared.bias
            if shared.slopes is not None:
                bias = positions.additive_bias(model.config, s, shared.slopes, q.dtype, q.device)
            attended = attention.attended(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias)
            return attention.out(attended.transpose(1, 2).reshape(n, s, -1))

        x = _around(block, x, attend)
    last = x[torch.arange(n, device=x.device), lengths - 1]
    return model.lm_head(model.norm(last))


def decode(model: NativeDecoder, cache: KVCache, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Append one token to every slot, and return the logits after it, [b, v].

    Args:
        tokens: int64 [b].
        lengths: int64 [b], tokens in the cache before these.
    """
    b = len(tokens)
    x = _embedded(model, tokens[:, None], lengths[:, None])
    shared = _shared(model, lengths, x)
    seen = (lengths + 1).to(torch.int32)
    for layer, block in enumerate(_blocks(model)):
        attention = block.attention

        def attend(x: Tensor, layer: int = layer, attention: Any = attention) -> Tensor:
            q, k, v = attention.projected(x, shared)
            cache.write_tokens(layer, lengths, k[:, 0], v[:, 0])
            attended = decode_attention(
                q[:, 0].to(cache.keys.dtype), cache.keys[layer], cache.values[layer], seen,
                window=model.config.sliding_window or 0, slopes=model.slopes,
            )  # fmt: skip
            return attention.out(attended.to(q.dtype).reshape(b, 1, -1))

        x = _around(block, x, attend)
    return model.lm_head(model.norm(x[:, 0]))


def _blocks(model: NativeDecoder) -> list[Any]:
    return list(model.layers)


def _embedded(model: NativeDecoder, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    x = model.embed(input_ids)
    return x if model.embed_positions is None else x + model.embed_positions(position_ids)


def _around(block: Any, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute a block with another attention."""
    if block.post:
        x = block.attention_norm(x + attend(x))
        return block.mlp_norm(x + block.mlp(x))
    x = x + attend(block.attention_norm(x))
    return x + block.mlp(block.mlp_norm(x))


def _shared(model: NativeDecoder, position_ids: Tensor, x: Tensor) -> PositionTensors:
    """Return RoPE's cos and sin at each slot's own position, [b, 1, 1, r/2]."""
    if model.frequencies is None:
        return PositionTensors()
    amp = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if amp else x.dtype
    angles = position_ids[:, None].float()[..., None] * model.frequencies.float()
    factor = positions.attention_factor(model.config.rope)
    cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    return PositionTensors(cos.unsqueeze(-2), sin.unsqueeze(-2))
