"""Pipeline parallel: each GPU holds some of the model's blocks, and micro-batches pass through them in turn.

Predicted, not run: a step is that of one stage, with its receive buffers.
"""

from __future__ import annotations

from typing import Any

from trainfit.catalog.load import model_config
from trainfit.catalog.model_types import tried_with
from trainfit.spec.errors import InputError
from trainfit.spec.pipeline import Stage, stages
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.parallel._ranks import check_gpus, check_values

ALLOWED: dict[str, tuple[object, ...]] = {
    "precision": ("bf16", "fp32", "bf16-master", "amp-bf16", "mixed-bf16"),
    "recompute": ("none", "full", "selective", "every"),
    "compile": (False, "block"),
    "adapter.kind": (None,),
    "quantize": (None,),
    "optimizer.in_backward": (False,),
    "offload.activations": (False,),
    "offload.weights": (False,),
    "parallel.context": (1,),
    "parallel.expert": (1,),
}
"""Field -> values that act on each stage alone."""
NOT_RUN = "pipeline parallel is predicted, not run"


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """Return the stages of a recipe's model, first to last.

    Raises:
        InputError: more stages than blocks.
    """
    mesh, config = recipe.mesh, model_config(recipe.model.config)
    num_blocks, num_stages = config.get("num_hidden_layers", 0), mesh.pipeline * mesh.stages_per_rank
    found = stages(num_blocks, num_stages)
    if min(stage.num_blocks for stage in found) < 1:
        problem = f"{num_blocks} blocks leave some of {num_stages} stages without one"
        raise refusal(recipe, "parallel.pipeline", problem, "use fewer stages")
    return found


def hidden_shape(recipe: Recipe) -> tuple[int, ...]:
    """Return the shape of the hidden states that a GPU sends: with tensor parallel its share of tokens."""
    config: Any = model_config(recipe.model.config)
    size, batch, ranks = config["hidden_size"], recipe.batch, recipe.mesh.tensor
    return (1, batch.micro * batch.seq // ranks, size) if ranks > 1 else (batch.micro, batch.seq, size)


def check(recipe: Recipe) -> None:
    """Refuse models that were not compared stage by stage, and values that do not act on each stage alone.

    Raises:
        InputError: naming the field.
    """
    check_gpus(recipe)
    check_values(recipe, ALLOWED, "pipeline parallel")
    tried = tried_with("pipeline")
    kind = model_config(recipe.model.config).get("model_type")
    if recipe.model.implementation == "hf" and kind not in tried:
        remedy = f"use a model of {', '.join(tried)}, or parallel.pipeline: 1"
        raise refusal(recipe, "parallel.pipeline", f"stages of {kind} models were not tried", remedy)
    mesh = recipe.mesh
    if mesh.schedule == "interleaved" and recipe.batch.accumulate % mesh.pipeline:
        problem = f"interleaved stages take micro-batches in groups of {mesh.pipeline}"
        raise refusal(recipe, "batch.accumulate", problem, f"use a multiple of {mesh.pipeline}")
    stages_of(recipe)


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse to run.

    Raises:
        InputError: naming ``parallel.pipeline``.
    """
    raise InputError(
        NOT_RUN,
        "use trainfit predict, or parallel.pipeline: 1",
        field="parallel.pipeline",
        value=recipe.mesh.pipeline,
    )


def apply(recipe: Recipe, draft: Draft) -> None:
    """Let the stage begin with received hidden states, and end with sent ones."""
    from trainfit.models.layers import decoder_blocks
    from trainfit.parallel import pipeline

    stage, model = draft.stage, draft.model
    assert stage is not None, "a recipe with a pipeline is assembled stage by stage"
    received = next((one for one in model.modules() if isinstance(one, pipeline.Received)), None)
    if received is not None and received.shape is not None:
        received.give_to(decoder_blocks(model)[0])
    if not stage.is_last:
        draft.body, draft.cross_entropy = model, None
        draft.loss = lambda model, batch: pipeline.send(pipeline.hidden_states(model, batch["input_ids"]))
    config: Any = model.config
    if getattr(config, "tie_word_embeddings", False) and stage.is_first != stage.is_last:
        _sum_of_both_ends(recipe, draft)


def _sum_of_both_ends(recipe: Recipe, draft: Draft) -> None:
    """All-reduce the gradient of a weight that the first and the last stage share (arXiv:1909.08053)."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    assert draft.stage is not None
    group = dist.new_group([0, recipe.hardware.count // recipe.mesh.pipeline * (recipe.mesh.pipeline - 1)])
    names = ("embed_tokens.weight", "embed.weight") if draft.stage.is_first else ("lm_head.weight",)
    (weight,) = (p for name, p in draft.model.named_parameters() if name.endswith(names))
    owner, name = next(
        (module, name)
        for module in draft.model.modules()
        for name, parameter in module._parameters.items()
        if parameter is weight
    )

    def reduce() -> None:
        gradient = getattr(owner, name).grad  # FSDP2 replaces the parameter.
        dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=group)

    draft.after_backward.append(reduce)


TECHNIQUE = Technique(
    name="pipeline_parallel",
    order=148,
    title="Pipeline parallel",
    fields=("parallel.pipeline", "parallel.schedule", "parallel.virtual_stages"),
    when=lambda recipe: recipe.mesh.pipeline > 1,
    check=check,
    check_device=check_device,
    apply=apply,
    describe=lambda recipe: (
        f"pipeline over {recipe.mesh.pipeline}, {recipe.mesh.schedule}"
        + f" x {recipe.mesh.stages_per_rank}" * (recipe.mesh.schedule == "interleaved")
    ),
    variants=(
        {"hardware": {"count": 2}, "parallel": {"pipeline": 2}, "batch": {"accumulate": 4}},
        {
            "hardware": {"count": 2},
            "parallel": {"pipeline": 2, "schedule": "interleaved"},
            "batch": {"accumulate": 4},
        },
    ),
)
