"""Fully sharded data parallel: ``torch.distributed.fsdp.fully_shard`` (FSDP2) over each decoder block.

Parameters, gradients and optimizer state are sharded; each block's parameters are gathered before its forward
and its backward. Several replicas of the shards (HSDP) all-reduce their gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainfit.catalog.load import gpu as find_gpu
from trainfit.catalog.load import link as find_link
from trainfit.catalog.load import model_config
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Offer, Technique, refusal, value_at
from trainfit.techniques.draft import Draft
from trainfit.techniques.parallel._ranks import (
    check_buckets,
    check_gpus,
    check_optimizer,
    check_processes,
    check_values,
    expected,
    kept_bytes,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    from trainfit.spec.hardware import Gpu

ALLOWED: dict[str, tuple[object, ...]] = {
    "compile": (False, "block"),
    "optimizer.in_backward": (False,),
    "offload.weights": (False,),
}
"""Field -> values that work on sharded parameters, with the results of one process on the whole batch."""
COMPARED: dict[str, tuple[object, ...]] = {
    "precision": ("bf16", "fp32", "bf16-master", "amp-bf16", "mixed-bf16"),
    "loss": ("standard", "chunked", "fused"),
    "recompute": ("none", "full", "selective", "every", "budget"),
    "compile": (False, "block"),
    "adapter.kind": (None, "lora"),
    "optimizer.name": ("adamw", "adamw8bit", "sgd", "adafactor", "muon"),
    "optimizer.clip_norm": (None,),
    "optimizer.stochastic_rounding": (False,),
    "quantize": (None, "nf4"),
    "offload.activations": (False,),
    "parallel.tensor": (1, 2),
    "parallel.context": (1,),
    "parallel.expert": (1, 2),
    "parallel.prefetch": (None,),
    "parallel.copy_engines": (False,),
}
"""Field -> values of recipes for several GPUs whose peaks were compared with measured runs."""
MAX_TRACED_LAYERS = 64
"""Of deeper models three layers stand for all (70B over 64: -0.03 % allocated, +0.12 % reserved), and of a
pipeline's stages (8B over 4 x 4: equal to the byte, reserved -0.3 to +0.5 %)."""


COPIED: dict[str, tuple[object, ...]] = {
    "precision": ("bf16", "fp32", "amp-bf16"),
    "adapter.kind": (None,),
    "quantize": (None,),
    "compile": (False,),
    "parallel.replicate": (1,),
    "parallel.tensor": (1,),
    "parallel.context": (1,),
    "parallel.expert": (1,),
    "parallel.pipeline": (1,),
}
"""Field -> values that work with copy engines."""


def check(recipe: Recipe) -> None:
    """Refuse values that do not work on sharded parameters, or are untested.

    Raises:
        InputError: naming the field.
    """
    check_gpus(recipe)
    check_values(recipe, ALLOWED, "FSDP2")
    check_optimizer(recipe, "fsdp", "FSDP2")
    check_buckets(recipe, "FSDP2")
    if recipe.mesh.copy_engines:
        check_values(recipe, COPIED, "parallel.copy_engines")
    if recipe.optimizer.name == "sgd" and recipe.optimizer.implementation == "fused":
        problem = "PyTorch's fused SGD does not update shards"
        raise refusal(recipe, "optimizer.implementation", problem, "use foreach")


def check_gpu(recipe: Recipe, gpu: Gpu) -> None:
    """Refuse copy engines between hosts."""
    in_host = gpu.gpus_per_host
    if recipe.mesh.copy_engines and (recipe.hardware.nodes or -(-recipe.hardware.count // in_host)) > 1:
        problem = f"copy engines reach the {in_host} GPUs of one host"
        raise refusal(recipe, "parallel.copy_engines", problem, "use one host, or leave it out")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Shard each decoder block, then all other parameters as one group."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from trainfit.models.layers import decoder_blocks
    from trainfit.models.quantized_linear import QuantizedLinear
    from trainfit.parallel.expert_parallel import fully_shard_experts, prefetch

    assert draft.mesh is not None, "a recipe for several GPUs is assembled with a mesh"
    mesh = recipe.mesh
    options: dict[str, Any] = {
        "mesh": _mesh(recipe, draft.mesh),
        "mp_policy": _policy(recipe),
        "ignored_params": set(),
    }
    blocks: Any = decoder_blocks(draft.model)
    for module in draft.model.modules():
        if isinstance(module, QuantizedLinear):
            module.codes_to_parameters()
    for block in blocks:
        of_block: dict[str, Any] = options | {"reshard_after_forward": mesh.reshard_after_forward}
        if mesh.expert > 1:
            options["ignored_params"] |= fully_shard_experts(block, of_block)
        fully_shard(block, **of_block)
    draft.outermost = draft.model if draft.body is None else _with_loss(draft)
    if mesh.pipeline > 1:  # Micro-batches in flight do not share gathered parameters.
        options["reshard_after_forward"] = mesh.reshard_after_forward
    if draft.batch_tensors is not None:  # Log-probabilities of the batch stay in fp32.
        options["mp_policy"] = replace(options["mp_policy"], cast_forward_inputs=False)
    model = fully_shard(draft.outermost, **options)
    assert isinstance(model, FSDPModule)
    draft.around_forward.append(_views_are_only_read)
    if mesh.pipeline > 1 and not mesh.reshard_after_forward:
        draft.before_batch.append(model.set_reshard_after_backward)
    if mesh.expert > 1:
        prefetch(blocks)
    elif mesh.prefetch is not None or mesh.copy_engines:
        _prefetch(model, blocks, mesh.prefetch or 1)
    if mesh.copy_engines:
        _send_by_copies(model, draft)
    if not mesh.syncs_each_batch and recipe.batch.accumulate > 1:
        draft.before_batch.append(model.set_requires_gradient_sync)


@contextmanager
def _views_are_only_read() -> Iterator[None]:
    """Silence FSDP2's warning of modules that return views, which an operation in place would harm.

    Nothing here changes the output of a block or of the model in place.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        yield


def _prefetch(model: Any, blocks: list[Any], num_ahead: int) -> None:
    """Gather this many blocks ahead of the running one, in forward and backward."""
    for index, module in enumerate((*blocks, model)):
        following = blocks[index + 1 :] if module is not model else blocks
        module.set_modules_to_forward_prefetch(following[:num_ahead])
        module.set_modules_to_backward_prefetch(blocks[:index][::-1][:num_ahead])


def _send_by_copies(model: FSDPModule, draft: Draft) -> None:
    from trainfit.parallel.peer_copies import send_by_copies

    gather = send_by_copies(model, draft.cluster)

    def updated(*_: Any) -> None:
        gather.is_updated = True

    draft.before_batch.append(updated)
    draft.after_step.append(updated)


def _with_loss(draft: Draft) -> nn.Module:
    """Return the module in whose forward the loss runs: a loss that reads the output layer's weight.

    FSDP2 gathers the parameters outside the blocks for the forward of its outermost module.
    """
    from trainfit.parallel.training_forward import TrainingForward

    root, cross_entropy = TrainingForward(draft.model, draft.loss), draft.cross_entropy
    token_logs = draft.token_logs
    draft.loss = lambda model, batch: root(batch)
    if cross_entropy is not None:
        draft.cross_entropy = lambda model, batch: root(batch, cross_entropy)
    if token_logs is not None:
        draft.token_logs = lambda model, batch: root(batch, token_logs)
    return root


def _mesh(recipe: Recipe, mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks that share weights, and their replicas; ranks that share sequences are among them."""
    if recipe.mesh.context > 1:
        return mesh["shard", "context"]._flatten("shard_context")
    return mesh["replicate", "shard"] if recipe.mesh.replicate > 1 else mesh["shard"]


def _policy(recipe: Recipe) -> MixedPrecisionPolicy:
    """Return bf16 compute and fp32 reduction where weights are gathered so, else the weights' dtype."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not recipe.gathers_in_bf16:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def not_compared(recipe: Recipe) -> tuple[str, ...]:
    """Return a line with the values that no measured run on several GPUs had; empty where there are none."""
    found = [(field, value_at(recipe, field)) for field in COMPARED]
    new = [f"{field}: {value}".lower() for field, value in found if value not in COMPARED[field]]
    return (f"on several GPUs not yet compared with a measured run: {', '.join(new)}",) if new else ()


def _describe(recipe: Recipe) -> str:
    mesh = recipe.mesh
    text = f"FSDP2 over {mesh.shard * mesh.context}"
    if mesh.replicate > 1:
        text = (
            f"{mesh.replicate} replicas of {text}" if mesh.shard > 1 else f"FSDP2, {mesh.replicate} replicas"
        )
    text += ", by copy engines" * mesh.copy_engines
    return text if mesh.prefetch is None else f"{text}, {mesh.prefetch} blocks gathered ahead"


def _trace_whole(recipe: Recipe) -> bool:
    """Return whether every layer is traced: when a block is gathered and freed depends on its neighbours."""
    if recipe.mesh.prefetch is not None or recipe.mesh.copy_engines:
        return True
    config = model_config(recipe.model.config)
    is_deep = int(config.get("num_hidden_layers", 0)) > MAX_TRACED_LAYERS  # pyright: ignore
    return not is_deep and recipe.mesh.pipeline == 1


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    """Offer parameters that stay gathered between forward and backward, also with gradients that stay whole
    until a step's last micro-batch, copy engines, and shards within each host."""
    gpu = find_gpu(recipe.hardware.gpu)
    count, in_host = recipe.hardware.count, gpu.gpus_per_host
    if count == 1:
        return ()
    gathered: Data = {"reshard_after_forward": False}
    meshes: list[Data] = [gathered, {**gathered, "sync_each_batch": False}]
    # Where GPUs read each other's memory; what else they exclude is refused with its reason.
    if count <= in_host and find_link(gpu.link).kind == "nvlink" and recipe.precision in COPIED["precision"]:
        meshes.append({"copy_engines": True})
    if count > in_host and count % in_host == 0:
        meshes.append({"replicate": count // in_host, "shard": in_host})
    return tuple(
        Offer({"parallel": mesh}, expected(recipe, mesh), kept_bytes(recipe, mesh)) for mesh in meshes
    )


TECHNIQUE = Technique(
    name="fsdp",
    order=235,
    title="Fully sharded data parallel",
    fields=(
        "parallel.shard",
        "parallel.replicate",
        "parallel.reshard_after_forward",
        "parallel.prefetch",
        "parallel.copy_engines",
    ),
    when=lambda recipe: recipe.mesh.data_ranks * recipe.mesh.context > 1 and recipe.mesh.shards_weights,
    check_gpu=check_gpu,
    check=check,
    check_device=check_processes,
    apply=apply,
    describe=_describe,
    variants=(
        {"hardware": {"count": 2}},
        {"hardware": {"count": 4}, "parallel": {"replicate": 2, "shard": 2}},
        {"hardware": {"count": 2}, "parallel": {"reshard_after_forward": False}},
    ),
    trace_whole=_trace_whole,
    may_shorten=True,  # A few layers give the memory of the whole model to the byte.
    offers=_offers,
)
