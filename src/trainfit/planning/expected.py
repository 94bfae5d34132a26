"""What a change of a recipe is expected to do to its memory and time, before the change is traced.

The shares are rounded from predicted recipes of Llama models with 1 to 405 billion parameters. They order
what is traced and leave out what is far from enough; what a user reads is traced.
"""

from typing import NamedTuple

from trainfit.catalog.load import model_config
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate

LOGITS_BYTES = 14
"""Most bytes that a logit holds at once: its value, its fp32 copy, log-softmax and gradient."""
LEVELS = {"none": 0, "selective": 1, "full": 2}
"""Levels of recomputation by what they keep; all others are between ``none`` and ``full``."""
TOLERANCE = 0.8
"""Share of the expected device memory that a change may turn out to take."""
KEPT_BY_SELECTIVE, KEPT_BY_KERNELS, KEPT_BY_OPTIMIZER, NOT_SPLIT = 0.45, 0.7, 0.4, 0.1
"""Shares of what a recipe holds that remain: activations with selective recomputation (0.46 to 0.49) and
with fused block kernels (0.7), the state of a smaller optimizer (0.25 to 0.5), and what tensor and
context parallel do not divide (0.09 to 0.11)."""


class Expected(NamedTuple):
    """The memory of a changed recipe, and its step time over that before."""

    device_bytes: float
    host_bytes: float
    time_ratio: float


def expected(before: Recipe, own: Estimate, after: Recipe) -> Expected:
    """Return what a changed recipe is expected to take.

    Args:
        own: estimate of the recipe ``before`` the change.
    """
    held = dict(own.breakdown)
    weights, gradients, state = held["weights"], held["gradients"], held["optimizer"]
    others = held["activations"] + held["temporary"]
    config = model_config(before.model.config)
    logits = min(others, _logits_bytes(before, _vocabulary(config)))
    blocks, gathered = others - logits, held["communication"]
    host, time = 0.0, 1.0
    if _level(after) > _level(before):
        inputs = 0.05 + 1 / max(1, int(config.get("num_hidden_layers", 32)))
        blocks *= inputs if after.recompute == "full" else KEPT_BY_SELECTIVE
        time *= 1.2 if after.recompute == "full" else 1.05
    if after.block_kernels != before.block_kernels and after.block_kernels != "standard":
        blocks *= KEPT_BY_KERNELS
        time *= 0.9
    if after.offload.activations and not before.offload.activations:
        blocks *= 0.5
        time *= 1.05
    if after.offload.weights and not before.offload.weights:
        host = weights + state
        weights, gradients, state = 0.1 * weights, 0.1 * gradients, 0.1 * state
        time *= 2.0
    if before.loss == "standard" != after.loss:
        logits *= 0.3
    if after.precision != before.precision:
        blocks *= 0.6
        if after.precision == "bf16":
            weights, gradients, state = 0.5 * weights, 0.5 * gradients, 0.5 * state
    if before.attention == "eager" != after.attention:
        blocks *= 0.5
    micro = after.batch.micro / before.batch.micro
    blocks, logits, time = blocks * micro, logits * micro, time * (1.02 if micro < 1 else 1.0)
    if after.optimizer.name != before.optimizer.name:
        state *= KEPT_BY_OPTIMIZER
    if after.optimizer.in_backward and not before.optimizer.in_backward:
        gradients *= 0.1
    if after.quantize != before.quantize:
        weights *= 0.3
    ranks = after.mesh.tensor * after.mesh.context / (before.mesh.tensor * before.mesh.context)
    if ranks > 1:
        part = NOT_SPLIT + (1 - NOT_SPLIT) / ranks
        blocks, logits, gathered, time = (
            blocks * part,
            logits * part,
            gathered * part,
            time * (1 + 0.04 * ranks),
        )
    weight_ranks, state_ranks = (
        old / new for old, new in zip(_sharing(before), _sharing(after), strict=True)
    )
    weights, gradients, state = weights * weight_ranks, gradients * weight_ranks, state * state_ranks
    if not after.mesh.reshard_after_forward and before.mesh.reshard_after_forward:
        weights *= max(1, after.mesh.shard)
    allocated = weights + gradients + state + blocks + logits + gathered + held["workspace"]
    highest = own.highest
    other = highest.device - highest.reserved
    # What the allocator cannot use grows with what it holds.
    unused = highest.reserved / max(1, highest.allocated)
    return Expected(allocated * unused + other, host, time)


def _level(recipe: Recipe) -> int:
    return LEVELS.get(recipe.recompute, 1) if isinstance(recipe.recompute, str) else 1


def _logits_bytes(recipe: Recipe, vocabulary: int) -> int:
    """Return the most that logits take; 0 where few are there at once, or the fullest GPU may have none."""
    if recipe.loss != "standard" or recipe.mesh.pipeline > 1:
        return 0
    tokens = recipe.batch.tokens // recipe.batch.accumulate
    return LOGITS_BYTES * tokens * vocabulary // (recipe.mesh.tensor * recipe.mesh.context)


def _vocabulary(config: dict[str, object]) -> int:
    found = config.get("vocab_size", 2**15)
    return found if isinstance(found, int) else 2**15


def _sharing(recipe: Recipe) -> tuple[int, int]:
    """Return over how many ranks the weights and gradients, and the optimizer's state, are divided."""
    mesh = recipe.mesh
    split = mesh.tensor * mesh.pipeline
    if mesh.shards_weights:
        ranks = mesh.shard * mesh.context * split
        return ranks, ranks
    return split, split * (mesh.data_ranks if mesh.strategy == "zero1" else 1)
