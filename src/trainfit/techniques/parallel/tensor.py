"""Tensor parallel: each rank computes a share of every block's heads and columns, of the same batch.

A plan names the modules of an implementation's blocks by how they are sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainfit.catalog.load import gpu, model_config
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

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainfit.parallel.tensor_parallel import TokenShards

ALLOWED: dict[str, tuple[object, ...]] = {
    "precision": ("bf16", "fp32", "bf16-master", "amp-bf16", "mixed-bf16"),
    "loss": ("standard",),
    "parallel.context": (1,),
    "loss_terms.label_smoothing": (0.0,),
    "loss_terms.z_loss": (0.0,),
    "recompute": ("none", "full", "selective", "every"),
    "compile": (False, "block"),
    "adapter.kind": (None, "lora"),
    "adapter.dora": (None, False),
    "adapter.dropout": (None, 0.0),  # Ranks with one seed would drop the same places of different shares.
    "adapter.modules_to_save": (None, ()),
    "optimizer.clip_norm": (None,),
    "optimizer.in_backward": (False,),
    "optimizer.stochastic_rounding": (False,),
    "quantize": (None, "int8", "fp8"),
    "offload.activations": (False,),
    "offload.weights": (False,),
}
"""Field -> values whose losses equal one process's, or that act on each shard alone."""
SHARED_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
"""Keys of a config.json that the ranks must share equally."""
PLAN = {
    "hf": {
        "q_proj": "columns", "k_proj": "columns", "v_proj": "columns", "o_proj": "rows",
        "gate_proj": "columns", "up_proj": "columns", "down_proj": "rows",
        "self_attn": "gather", "mlp": "gather", "embed_tokens": "embedding", "lm_head": "head",
        "input_layernorm": "shared", "post_attention_layernorm": "shared", "norm": "shared",
        "q_norm": "shared", "k_norm": "shared",
    },
    "native": {
        "out": "rows", "down": "rows", "attention": "gather", "mlp": "gather", "embed": "embedding",
        "lm_head": "head", "embed_positions": "whole", "attention_norm": "shared",
        "mlp_norm": "shared", "norm": "shared", "q_norm": "shared", "k_norm": "shared",
    },
}  # fmt: skip
"""Implementation -> last part of a module's name -> how it is sharded.

``shared``: whole on each rank, applied to its share of the tokens or heads. ``whole``: applied to all.
"""


def check(recipe: Recipe) -> None:
    """Refuse models without a plan, sizes that the ranks cannot share equally, and untested values.

    Raises:
        InputError: naming the field.
    """
    check_gpus(recipe)
    if not recipe.mesh.shards_weights:
        problem = f"{recipe.mesh.strategy} keeps whole weights on every rank"
        raise refusal(recipe, "parallel.strategy", problem, "use parallel.strategy: fsdp")
    check_values(recipe, ALLOWED, "tensor parallel")
    check_optimizer(recipe, "tensor_parallel", "tensor parallel")
    config, ranks = model_config(recipe.model.config), recipe.mesh.tensor
    tried = tried_with("tensor")
    kind = config.get("model_type")
    if recipe.model.implementation == "hf" and kind not in tried:
        problem = f"no plan for {kind} models"
        remedy = f"use a model of {', '.join(tried)}, or parallel.tensor: 1"
        raise refusal(recipe, "parallel.tensor", problem, remedy)
    if config.get("position_embedding") == "alibi":
        raise refusal(recipe, "parallel.tensor", "no plan for ALiBi", "use parallel.tensor: 1")
    for key in SHARED_SIZES:
        size = config.get(key) or config.get("num_attention_heads")
        if isinstance(size, int) and size % ranks:
            problem = f"the model's {key} {size} cannot be shared equally by {ranks} ranks"
            raise refusal(recipe, "parallel.tensor", problem, f"use a divisor of {size}")
    tokens = recipe.batch.micro * recipe.batch.seq
    if tokens % ranks:
        problem = f"a micro-batch of {tokens} tokens cannot be shared equally by {ranks} ranks"
        raise refusal(recipe, "parallel.tensor", problem, f"use a divisor of {tokens}")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Shard the model's parameters by its plan, the tokens between parts, and the logits."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    from trainfit.models.layers import decoder_blocks, num_weights
    from trainfit.parallel import tensor_parallel

    assert draft.mesh is not None, "a recipe for several GPUs is assembled with a mesh"
    tokens = tensor_parallel.TokenShards(draft.mesh["tensor"])
    plan = PLAN[recipe.model.implementation]
    modules = {name.rpartition(".")[2]: module for name, module in draft.model.named_modules()}
    for name, module in list(draft.model.named_modules()):
        kind = plan.get(name.rpartition(".")[2])
        if kind not in (None, "columns", "rows") and hasattr(module, "base_layer"):
            problem, remedy = f"no plan for an adapter of {name}", "adapt the blocks' linear layers alone"
            raise refusal(recipe, "adapter.targets", problem, remedy)
        if kind is not None and num_weights(module):  # A pipeline's stage has stand-ins for absent modules.
            _shard(kind, module, tokens, modules["lm_head"])
    if draft.stage is None or draft.stage.is_first:
        tensor_parallel.split_input(decoder_blocks(draft.model)[0], tokens)
    tokens.batch_shape = recipe.batch.micro, recipe.batch.seq
    for name, parameter in draft.model.named_parameters():
        if not isinstance(parameter, DTensor):
            problem, remedy = f"no plan for the parameter {name}", "use parallel.tensor: 1"
            raise refusal(recipe, "parallel.tensor", problem, remedy)
    draft.loss = _loss
    draft.around_forward.append(loss_parallel)
    draft.around_backward.append(loss_parallel)


def _shard(kind: str | None, module: Any, tokens: TokenShards, head: Any) -> None:
    from trainfit.models.native.decoder import Attention, FeedForward
    from trainfit.parallel import tensor_parallel

    if kind == "columns":
        _shard_columns(module, tokens)
    elif kind == "rows":
        _shard_rows(module, tokens)
    elif kind == "embedding":
        is_tied = module.weight is getattr(head, "weight", None)
        tensor_parallel.shard_embedding(module, tokens)
        if is_tied:
            head._parameters["weight"] = module._parameters["weight"]
    elif kind == "head":
        tensor_parallel.shard_head(module, tokens)
    elif kind in ("shared", "whole"):
        tensor_parallel.replicate(module, tokens, is_shared=kind == "shared")
    elif kind == "gather":
        tensor_parallel.gather_input(module, tokens)
        if isinstance(module, Attention):  # Fused projections: each rank gets a share of every part.
            sizes = [heads * module.config.head_dim for heads in module.heads]
            _shard_columns(module.qkv, tokens, sizes)
            module.heads = [heads // tokens.mesh.size() for heads in module.heads]
        elif isinstance(module, FeedForward):
            size = module.down.in_features
            _shard_columns(module.up, tokens, (size, size) if module.gated else ())


def _shard_columns(module: Any, tokens: TokenShards, parts: Sequence[int] = ()) -> None:
    from trainfit.parallel import tensor_lora, tensor_parallel

    if tensor_lora.is_adapted(module):
        tensor_lora.shard_adapted_columns(module, tokens, parts)
    else:
        tensor_parallel.shard_columns(module, tokens, parts)


def _shard_rows(module: Any, tokens: TokenShards) -> None:
    from trainfit.parallel import tensor_lora, tensor_parallel

    if tensor_lora.is_adapted(module):
        tensor_lora.shard_adapted_rows(module, tokens)
    else:
        tensor_parallel.shard_rows(module, tokens)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the model's own loss of logits that are sharded over the vocabulary."""
    return model(**batch).loss.to_local()


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    """Offer 2, 4 and 8 ranks within a host."""
    in_host = min(recipe.hardware.count, gpu(recipe.hardware.gpu).gpus_per_host)
    meshes: tuple[Data, ...] = tuple({"tensor": ranks} for ranks in (2, 4, 8) if in_host % ranks == 0)
    return tuple(Offer({"parallel": mesh}, expected(recipe, mesh)) for mesh in meshes)


TECHNIQUE = Technique(
    name="tensor_parallel",
    order=65,
    title="Tensor parallel",
    fields=("parallel.tensor",),
    when=lambda recipe: recipe.mesh.tensor > 1,
    check=check,
    check_device=check_processes,
    apply=apply,
    describe=lambda recipe: f"tensor parallel over {recipe.mesh.tensor}",
    variants=({"hardware": {"count": 2}, "parallel": {"tensor": 2}},),
    offers=_offers,
)
