"""One stage of a pipeline: a part of a model that receives hidden states, and sends on what it computes.

On one process nothing is sent: the buffers are made that a real stage receives into. The input is kept as
what the first block saves, its gradient and the output until the micro-batch's backward is done.

Shapes: b micro-batch, s sequence, e hidden size, x the hidden states between blocks: [b, s, e], or with
tensor parallel this rank's tokens of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainfit.models.layers import layer_lists
from trainfit.models.native.decoder import NativeDecoder
from trainfit.spec.pipeline import Stage
from trainfit.spec.recipe import Recipe


class Received(nn.Module):
    """The embedding of a later stage: returns the hidden states that the stage before sends.

    Args:
        size: e.
        shape: of x; None: [b, s, e].
    """

    def __init__(self, size: int, dtype: torch.dtype, shape: tuple[int, ...] | None):
        super().__init__()
        self.size, self.dtype, self.shape = size, dtype, shape
        self.x: Tensor | None = None

    def forward(self, ids_bs: Tensor) -> Tensor:
        """Return x; with tensor parallel all tokens' shape, which positions are made of, without memory."""
        x = torch.empty(self.shape or (*ids_bs.shape, self.size), dtype=self.dtype, device=ids_bs.device)
        x.requires_grad_()
        if self.shape is None:
            return x
        self.x = x
        return torch.empty((), dtype=self.dtype, device=ids_bs.device).expand(*ids_bs.shape, self.size)

    def give_to(self, block: nn.Module) -> None:
        """Let a block take x in place of its first argument."""

        def take(_: nn.Module, args: tuple[Any, ...]) -> Any:
            x, self.x = self.x, None
            return (x, *args[1:])

        block.register_forward_pre_hook(take)


class _Send(torch.autograd.Function):
    """Keep the output, and receive its gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return torch.empty_like(ctx.saved_tensors[0])


def send(x: Tensor) -> Tensor:
    """Return a scalar whose backward begins at x with the gradient that the next stage sends."""
    return _Send.apply(x)  # pyright: ignore[reportReturnType]


def cut(model: nn.Module, stage: Stage, recipe: Recipe) -> list[Tensor]:
    """Leave one stage of the recipe's model, and return the parameters and buffers that it has no more."""
    before = {id(t): t for t in (*model.parameters(), *model.buffers())}
    ((_, blocks),) = layer_lists(model)
    del blocks[stage.first_block + stage.num_blocks :]
    del blocks[: stage.first_block]
    whole: Any = model
    native = isinstance(model, NativeDecoder)
    body = whole if native else whole.base_model
    if not stage.is_first:
        parameter, (b, s, n) = (
            next(model.parameters()),
            (recipe.batch.micro, recipe.batch.seq, recipe.mesh.tensor),
        )
        size = whole.config.hidden_size
        dtype = torch.bfloat16 if recipe.gathers_in_bf16 else parameter.dtype
        received = Received(size, dtype, (1, b * s // n, size) if n > 1 else None)
        setattr(body, "embed" if native else "embed_tokens", received)
        if native:
            body.embed_positions = None
    if not stage.is_last:
        body.norm, whole.lm_head = nn.Identity(), nn.Identity()
    kept = {id(t) for t in (*model.parameters(), *model.buffers())}
    return [t for key, t in before.items() if key not in kept]


def hidden_states(model: nn.Module, ids_bs: Tensor) -> Tensor:
    """Return the output x of a stage without the output layer."""
    whole: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    if isinstance(whole, NativeDecoder):
        return whole.hidden(ids_bs)
    return whole.base_model(input_ids=ids_bs).last_hidden_state
