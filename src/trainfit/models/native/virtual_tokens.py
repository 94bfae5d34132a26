"""Prompt and prefix tuning of a native decoder: trainable virtual tokens before every sequence.

Shapes: b batch, s sequence, t virtual tokens, e hidden_size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.models.native.decoder import IGNORED_LABEL, NativeDecoder, Output
from trainfit.spec.errors import InputError


class Prompted(nn.Module):
    """Decoder with virtual tokens from a trained ``encoder``, which maps 0..t-1 [1, t] to [1, t, e].

    As in PEFT, there are logits of all t + s tokens, and the last virtual token predicts the first real one.
    """

    def __init__(self, base: NativeDecoder, encoder: nn.Module, num_tokens: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.config = base.config
        self.prompt_encoder = encoder
        numbers_1t = torch.arange(num_tokens, device=base.embed.weight.device)[None]
        self.register_buffer("numbers", numbers_1t, persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Run the decoder on virtual and real tokens."""
        x_bse = self.base.embed(input_ids)
        prompt_1te = self.prompt_encoder(self.numbers).to(x_bse.dtype)
        x_bse = torch.cat((prompt_1te.expand(len(x_bse), -1, -1), x_bse), dim=1)
        if labels is not None:
            labels = F.pad(labels, (prompt_1te.shape[1], 0), value=IGNORED_LABEL)
        return self.base(inputs_embeds=x_bse, labels=labels)


@torch.no_grad()
def add_prefix(model: NativeDecoder, num_tokens: int, dtype: torch.dtype) -> None:
    """Freeze the model and add ``num_tokens`` keys and values from N(0, 1) to each block, as PEFT does.

    Raises:
        InputError: Attention depends on the distance between tokens, which a prefix does not have.
    """
    config = model.config
    if config.position_embedding == "alibi" or config.sliding_window is not None:
        problem = "a prefix has no distance from the tokens, which ALiBi and sliding windows need"
        remedy = "use adapter.kind: lora or prompt"
        raise InputError(problem, remedy, field="adapter.kind", value="prefix")
    model.requires_grad_(False)
    shape = (2, num_tokens, config.num_key_value_heads, config.head_dim)
    for block in model.layers:
        prefix = torch.empty(shape, dtype=dtype, device=model.embed.weight.device).normal_()
        block.attention.prefix = nn.Parameter(prefix)  # pyright: ignore[reportAttributeAccessIssue]
    model.num_prefix = num_tokens
