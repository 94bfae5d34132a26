"""Expert parallel: the ranks of a group share a layer's experts, and exchange tokens by all-to-alls."""

from __future__ import annotations

from trainfit.catalog.load import model_config
from trainfit.catalog.model_types import tried_with
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Offer, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.parallel._ranks import (
    check_gpus,
    check_optimizer,
    check_processes,
    check_values,
    expected,
)

ALLOWED: dict[str, tuple[object, ...]] = {
    "precision": ("bf16", "fp32", "bf16-master", "amp-bf16", "mixed-bf16"),
    "parallel.tensor": (1,),
    "parallel.context": (1,),
    "parallel.pipeline": (1,),
    "parallel.prefetch": (None,),
    "recompute": ("none", "full", "selective", "every"),
    "compile": (False,),
    "adapter.kind": (None,),
    "optimizer.in_backward": (False,),
    "optimizer.stochastic_rounding": (False,),
    "quantize": (None,),
    "offload.activations": (False,),
    "offload.weights": (False,),
}
"""Field -> values whose losses and gradients equal one process's."""


def check(recipe: Recipe) -> None:
    """Refuse models without stacked experts, sizes that ranks cannot share equally, and untested values.

    Raises:
        InputError: naming the field.
    """
    check_gpus(recipe)
    mesh, field = recipe.mesh, "parallel.expert"
    if not mesh.shards_weights:
        problem = f"{mesh.strategy} keeps whole weights on every rank"
        raise refusal(recipe, "parallel.strategy", problem, "use parallel.strategy: fsdp")
    check_values(recipe, ALLOWED, "expert parallel")
    check_optimizer(recipe, "expert_parallel", "expert parallel")
    config = model_config(recipe.model.config)
    tried = tried_with("expert")
    kind = config.get("model_type")
    if kind not in tried or recipe.model.implementation != "hf":
        problem = f"no experts to share in this {recipe.model.implementation} model of {kind}, or not tried"
        raise refusal(recipe, field, problem, f"use a model of {', '.join(tried)}, or parallel.expert: 1")
    if mesh.shard % mesh.expert:
        problem = f"groups of {mesh.expert} ranks cannot be taken from {mesh.shard} shards"
        raise refusal(recipe, field, problem, "use a divisor of parallel.shard")
    experts = _size(config, "num_local_experts", "num_experts", "n_routed_experts")
    if experts % mesh.expert:
        problem = f"the model's {experts} experts cannot be shared equally by {mesh.expert} ranks"
        raise refusal(recipe, field, problem, f"use a divisor of {experts}")
    holders = mesh.shard // mesh.expert
    sizes = [_size(config, "hidden_size"), _size(config, "moe_intermediate_size", "intermediate_size")]
    if (experts // mesh.expert) % holders and any(size % holders for size in sizes):
        problem = (
            f"{holders} ranks cannot share {experts // mesh.expert} experts equally, nor an expert's rows"
        )
        raise refusal(recipe, field, problem, "use more of parallel.replicate, or of parallel.expert")
    if recipe.gathers_in_bf16 and holders * mesh.replicate == 1:
        problem = "FSDP2 casts what it gathers, and each expert is on one rank"
        raise refusal(recipe, "precision", problem, "use bf16 or amp-bf16, or fewer parallel.expert")


def _size(config: dict[str, object], *names: str) -> int:
    found = (config[name] for name in names if isinstance(config.get(name), int))
    return int(next(found, 0))  # pyright: ignore[reportArgumentType, reportCallIssue]


def apply(recipe: Recipe, draft: Draft) -> None:
    """Keep this rank's experts of each layer, and send tokens to their experts' ranks."""
    from torch import nn

    from trainfit.parallel.expert_parallel import ExpertRanks, shard_experts

    assert draft.mesh is not None, "a recipe for several GPUs is assembled with a mesh"
    ranks = ExpertRanks.of(draft.mesh, recipe.mesh.expert, draft.cluster)
    stacks = [one for name, one in draft.model.named_modules() if name.endswith(".experts")]
    if not stacks or any(isinstance(one, nn.ModuleList) for one in stacks):
        problem = "this version of transformers keeps each expert in a separate module"
        raise refusal(recipe, "parallel.expert", problem, "use parallel.expert: 1")
    for experts in stacks:
        shard_experts(experts, ranks)


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    if model_config(recipe.model.config).get("model_type") not in tried_with("expert"):
        return ()
    meshes: tuple[Data, ...] = tuple({"expert": n} for n in (2, 4, 8) if recipe.hardware.count % n == 0)
    return tuple(Offer({"parallel": mesh}, expected(recipe, mesh)) for mesh in meshes)


TECHNIQUE = Technique(
    name="expert_parallel",
    order=67,
    title="Expert parallel",
    fields=("parallel.expert",),
    when=lambda recipe: recipe.mesh.expert > 1,
    check=check,
    check_device=check_processes,
    apply=apply,
    describe=lambda recipe: f"expert parallel over {recipe.mesh.expert}",
    needs={"model": {"config": "olmoe-1b-7b"}},
    variants=({"hardware": {"count": 2}, "parallel": {"expert": 2}},),
    offers=_offers,
)
