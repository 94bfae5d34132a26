"""Prefix tuning of a native decoder: trainable keys and values of virtual tokens in each block."""

import torch
from torch import nn

from trainfit.models.native.decoder import NativeDecoder
from trainfit.spec.errors import InputError


@torch.no_grad()
def add_prefix(model: NativeDecoder, num_tokens: int, dtype: torch.dtype) -> None:
    """Freeze the model and add ``num_tokens`` keys and values from N(0, 1) to each block, as PEFT does.

    Raises:
        InputError: Attention depends on the distance between tokens, which a prefix does not have.
    """
    config = model.config
    if config.position_embedding == "alibi" or config.sliding_window is not None:
        raise InputError(
            "a prefix has no distance from the tokens, which ALiBi and sliding windows need",
            "use adapter.kind: lora or prompt",
            field="adapter.kind",
            value="prefix",
        )
    model.requires_grad_(False)
    shape = (2, num_tokens, config.num_key_value_heads, config.head_dim)
    for block in model.layers:
        prefix = torch.empty(shape, dtype=dtype, device=model.embed.weight.device).normal_()
        block.attention.prefix = nn.Parameter(prefix)  # pyright: ignore[reportAttributeAccessIssue]
    model.num_prefix = num_tokens
