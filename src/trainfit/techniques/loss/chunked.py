"""Chunked loss: the next-token loss from hidden states, one chunk of tokens at a time.

Method and chunk size: kernels/cross_entropy/chunked.py. With ``compile: model`` everything below the output
layer is compiled.
"""

from functools import partial

from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import check_device
from trainfit.techniques.base import Draw, Offer, Technique
from trainfit.techniques.draft import Draft
from trainfit.techniques.loss._hidden_states import loss_of, refuse_own_forward, without_logits


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the model's own loss; refuse a model whose output layer is not known."""
    from trainfit.kernels.cross_entropy.chunked import linear_cross_entropy
    from trainfit.models.language_head import Setting, language_head

    parts = language_head(draft.model, Setting("loss", recipe.loss, "use loss: standard"))
    draft.body = parts.body
    draft.loss = loss_of(draft, parts, linear_cross_entropy)


TECHNIQUE = Technique(
    name="chunked_loss",
    order=120,
    title="Chunked loss",
    covers={"loss": ("chunked",)},
    triton={"loss": ("chunked",)},
    check_device=partial(check_device, field="loss"),
    check=refuse_own_forward,
    apply=apply,
    describe=lambda recipe: "chunked loss",
    draw=Draw(alone=lambda chance, _: {"loss": "chunked"}),
    offers=lambda recipe: (Offer({"loss": "chunked"}, without_logits(recipe)),),
)
