"""Context parallel: long sequences shared by ranks, which gather each other's keys and values."""

from __future__ import annotations

from trainfit.catalog.load import model_config
from trainfit.catalog.model_types import tried_with
from trainfit.spec.recipe import Recipe
from trainfit.techniques import attention
from trainfit.techniques.base import Data, Offer, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.parallel._ranks import check_gpus, check_processes, check_values, expected

ALLOWED: dict[str, tuple[object, ...]] = {
    "parallel.tensor": (1,),
    "parallel.replicate": (1,),
    "loss_terms.label_smoothing": (0.0,),
    "loss_terms.z_loss": (0.0,),
    "compile": (False,),
    "adapter.kind": (None,),
}
"""Field -> values that were tried; FSDP2 refuses more."""


def check(recipe: Recipe) -> None:
    """Refuse models with other attention than plain causal, and untested values.

    Raises:
        InputError: naming the field.
    """
    check_gpus(recipe)
    if not recipe.mesh.shards_weights:
        problem = f"{recipe.mesh.strategy} does not average gradients over the ranks of a sequence"
        raise refusal(recipe, "parallel.strategy", problem, "use parallel.strategy: fsdp")
    if recipe.attention != "triton":
        problem = "its causal mask aligns queries with the first keys; a rank's queries belong to the last"
        raise refusal(recipe, "attention", problem, "use attention: triton with parallel.context")
    check_values(recipe, ALLOWED, "context parallel")
    config, ranks = model_config(recipe.model.config), recipe.mesh.context
    tried = tried_with("context")
    kind = config.get("model_type")
    plain = kind in (*tried, "trainfit") and config.get("position_embedding") != "alibi"
    has_window = config.get("sliding_window") and (kind != "qwen2" or config.get("use_sliding_window"))
    if not plain or has_window:
        problem = f"this {kind} model's attention is not plain causal, or was not tried"
        remedy = f"use a model of {', '.join(tried)} without a sliding window, or parallel.context: 1"
        raise refusal(recipe, "parallel.context", problem, remedy)
    if recipe.batch.seq % (2 * ranks):
        problem = f"a sequence of {recipe.batch.seq} tokens cannot be cut into {2 * ranks} equal chunks"
        raise refusal(recipe, "parallel.context", problem, f"use a multiple of {2 * ranks} as batch.seq")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Let attention gather keys and values, and the loss take this rank's tokens."""
    from trainfit.models.hf_attention import no_packed_sequences
    from trainfit.parallel.context_parallel import SequenceShards

    assert draft.mesh is not None, "a recipe for several GPUs is assembled with a mesh"
    shards = SequenceShards(draft.mesh["context"])
    for name, module in draft.model.named_modules():
        if name.rpartition(".")[2] in ("self_attn", "attention"):
            module.attend = shards.attend  # pyright: ignore[reportArgumentType]
    draft.sequences, draft.loss = shards, shards.loss
    if recipe.model.implementation == "hf":
        # transformers would read positions that jump as packed sequences.
        draft.around_forward.append(no_packed_sequences)


LONG = 32768
"""Tokens of the shortest sequence for which the planner tries it."""


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    ranks = [n for n in (2, 4, 8) if recipe.hardware.count % n == 0 and recipe.batch.seq >= LONG]
    meshes: list[Data] = [{"context": n} for n in ranks]
    kernel = attention.expected(recipe)
    return tuple(
        Offer({"parallel": mesh, "attention": "triton"}, kernel.then(expected(recipe, mesh)))
        for mesh in meshes
    )


TECHNIQUE = Technique(
    name="context_parallel",
    order=66,
    title="Context parallel",
    fields=("parallel.context",),
    when=lambda recipe: recipe.mesh.context > 1,
    check=check,
    check_device=check_processes,
    apply=apply,
    describe=lambda recipe: f"context parallel over {recipe.mesh.context}",
    variants=({"hardware": {"count": 2}, "attention": "triton", "parallel": {"context": 2}},),
    offers=_offers,
)
