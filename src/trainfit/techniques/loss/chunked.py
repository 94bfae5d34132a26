"""Chunked loss: the next-token loss from hidden states, one chunk of tokens at a time.

Method and chunk size: kernels/cross_entropy/chunked.py. For vocabulary v and hidden size e, n tokens of
bf16 hold 10 n v bytes with ``standard`` where the loss begins its backward; here 6 c v for a chunk of c
tokens, 2 e v for the output weight's gradient and 2 n e for that of the hidden states. With ``compile:
model`` everything below the output layer is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import refuse_old_gpu
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft
from trainfit.techniques.loss._hidden_states import loss_of, refuse_own_forward

if TYPE_CHECKING:
    from torch import Tensor

    from trainfit.kernels.cross_entropy.chunked import Head


def check(recipe: Recipe) -> None:
    """Refuse adapters that change the model's own forward, and GPUs too old for Triton."""
    refuse_own_forward(recipe)
    refuse_old_gpu(recipe, "loss", "chunked", "loss: standard")


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse a GPU without Triton."""
    from trainfit.kernels.custom_op import require_triton

    require_triton(device_type, "loss", "chunked", "loss: standard")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the model's own loss.

    Raises:
        InputError: a model whose output layer is not known.
    """
    from trainfit.kernels.cross_entropy.chunked import linear_cross_entropy
    from trainfit.models.language_head import language_head

    def function(hidden: Tensor, head: Head, targets: Tensor, expected: Tensor | float) -> Tensor:
        return linear_cross_entropy(hidden, head, targets, expected_gradient=expected)

    parts = language_head(draft.model, recipe.loss)
    draft.body = parts.body
    draft.loss = loss_of(draft, parts, function)


TECHNIQUE = Technique(
    name="chunked_loss",
    order=120,
    title="Chunked loss",
    fields=("loss",),
    covers={"loss": ("chunked",)},
    check=check,
    check_device=check_device,
    apply=apply,
    describe=lambda recipe: "chunked loss",
    examples=({"loss": "chunked"},),
    draw=Draw(alone=lambda chance, _: {"loss": "chunked"}),
)
