"""The changes with which a recipe that is too large fits, and the GPUs on which it does."""

import math
from collections.abc import Iterable

from trainfit.catalog.load import gpu as find_gpu
from trainfit.catalog.load import gpus, model_config
from trainfit.planning.assembly import found as as_found
from trainfit.planning.combinations import MARGIN, Combinations, Goal, Key
from trainfit.planning.estimates import Estimates, Request, Result
from trainfit.planning.space import OWN_FAMILY, changed
from trainfit.prediction.device_overhead import COMMUNICATOR_BYTES, NCCL_BYTES
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.plan import Advice, Found, written
from trainfit.spec.recipe import Parallel, Recipe
from trainfit.spec.result import Estimate

MOST_CHANGES = 3
TRIES = 2
"""Kinds of GPU, and numbers of GPUs, that are predicted at most."""
LOGITS_BYTES = 14
"""Most bytes that a logit holds at once: its value, its fp32 copy, log-softmax and gradient."""
LAST = "offload"
"""Options of these fields wait for the host: traced only where fewer others than wanted fit."""


def advise(recipe: Recipe, found: Estimate, estimates: Estimates) -> Advice:
    """Return how a recipe that does not fit would.

    Args:
        found: the recipe's own prediction.

    Raises:
        InputError: as ``planning.search.plan``.
    """
    return Advice(
        changes=tuple(changes_that_fit(recipe, Goal(), estimates, most=MOST_CHANGES, at_peak=found)),
        gpu=first_fitting(recipe, _larger_gpus(recipe, found), estimates),
        gpus=first_fitting(recipe, more_gpus(recipe, found), estimates),
    )


def _larger_gpus(recipe: Recipe, found: Estimate) -> list[dict[str, object]]:
    """Return the smallest GPUs whose memory the predicted peak leaves a margin of."""
    own = find_gpu(recipe.hardware.gpu)

    def can(row: Gpu) -> bool:
        supported = "bf16" in row.peak_flops_per_s or "bf16" not in own.peak_flops_per_s
        room = found.peak_device_bytes <= row.usable_bytes * (1 - MARGIN)
        return row.basis != "accounted" and row.vendor == own.vendor and supported and room

    able = sorted(filter(can, gpus().values()), key=lambda one: (one.usable_bytes, one.price_per_hour or 1e9))
    # A price of one's own is of the GPU that the recipe names.
    return [{"hardware.gpu": one.name, "hardware.price_per_hour": None} for one in able[:TRIES]]


def more_gpus(recipe: Recipe, found: Estimate) -> list[dict[str, object]]:
    """Return the smallest numbers of GPUs that may hold the recipe with its state sharded over them."""
    if recipe.parallel not in (Parallel(), Parallel(strategy="fsdp")):
        return []
    own, held, count = find_gpu(recipe.hardware.gpu), found.breakdown, recipe.hardware.count
    sharded = (held.weights + held.gradients + held.optimizer) * count
    nccl = 0 if count > 1 else NCCL_BYTES + COMMUNICATOR_BYTES
    room = own.usable_bytes * (1 - MARGIN) - (found.peak_device_bytes - sharded / count) - nccl
    if room <= 0:
        return []
    least = max(2 * count, 2 ** math.ceil(math.log2(sharded / room)))
    return [{"hardware.count": least * 2**more} for more in range(TRIES)]


def first_fitting(recipe: Recipe, several: Iterable[dict[str, object]], estimates: Estimates) -> Found | None:
    """Return the recipe with the first of several sets of values that makes it fit; None: none does."""
    for values in several:
        try:
            other = changed(recipe, values)
        except InputError:
            return None
        (result,) = estimates.of([Request(other)])
        if (one := _found(result, values)) is not None:
            return one
    return None


def _found(result: Result, values: dict[str, object]) -> Found | None:
    """Return a result that fits, with the values that were set; None where it does not."""
    estimate = result.estimate
    if estimate is None or not estimate.fits:
        return None
    changes = tuple(written(field, value) for field, value in values.items() if value is not None)
    return Found(recipe=result.recipe.content(), changes=changes, numerics=(), estimate=estimate)


def changes_that_fit(
    recipe: Recipe, goal: Goal, estimates: Estimates, *, most: int = 3, at_peak: Estimate | None = None
) -> list[Found]:
    """Return the recipe with one change each that fits; empty: none is enough.

    Those that keep the mathematics come first, of these the fastest. A change is another level of
    recomputation, a smaller micro-batch with as many more of them, or one option of a technique. Options that
    are slow to trace, and other models, are not tried. Where full recomputation fits in the GPU's memory, so
    does ``fit``, which is faster.

    Args:
        goal: limits; without ``tokens_per_step`` the recipe's own tokens are kept.
        most: number of changes returned.
        at_peak: the recipe's own prediction: changes that cannot free enough of it are not traced.

    Raises:
        InputError: as ``planning.search.plan``.
    """
    if goal.tokens_per_step is None:
        goal = Goal(**{**vars(goal), "tokens_per_step": recipe.batch.tokens * recipe.mesh.data_ranks})
    combinations = Combinations(recipe, goal, estimates)
    micro, count = recipe.batch.micro, recipe.batch.accumulate
    own = combinations.space.levels[0]
    smaller = [each for each in combinations.batches(()) if each[0] < micro]
    keys: list[Key] = [((), level, micro, count) for level in combinations.space.levels[1:]]
    keys += [((), own, *each) for each in {*smaller[:1], *smaller[-1:]}]
    for option in combinations.space.options:
        if not option.is_slow and option.family != OWN_FAMILY:
            keys.append(((option,), own, micro, count))
    if at_peak is not None:
        keys = [key for key in keys if _frees(combinations, key, at_peak)]
    fitting: list[Found] = []
    for last in (False, True):
        if len(fitting) < most:
            combinations.trace(
                [key for key in keys if any(LAST in option.family for option in key[0]) is last]
            )
            traced = combinations.traced.values()
            fitting = [as_found(recipe, one) for one in traced if combinations.fits(one)]
    if goal.memory_bytes is None and ("recompute: full",) in [one.changes for one in fitting]:
        (result,) = estimates.of([Request(recipe.model_copy(update={"recompute": "fit"}))])
        fitting += [one] if (one := _found(result, {"recompute": "fit"})) is not None else []
    return sorted(fitting, key=lambda one: (bool(one.numerics), -(one.estimate.tokens_per_s or 0)))[:most]


def _frees(combinations: Combinations, key: Key, at_peak: Estimate) -> bool:
    """Return whether a change may free what is missing: False where a bound of what it frees is below."""
    options, level, micro, _ = key
    held, batch = at_peak.breakdown, combinations.recipe.batch
    config = model_config(combinations.recipe.model.config)
    bounds = {
        "loss": LOGITS_BYTES * batch.micro * batch.seq * config.get("vocab_size", 2**20),
        "optimizer.name": 0.75 * held.optimizer,
        "optimizer.in_backward": held.gradients,
    }
    fields = {field for option in options for field, _ in option.values}
    if not fields <= bounds.keys() or level != combinations.space.levels[0] or micro != batch.micro:
        return True
    if at_peak.peak_phase.endswith("optimizer"):
        return True  # The update's own memory counts too.
    unused = at_peak.peak_reserved_bytes - at_peak.peak_allocated_bytes
    missing = at_peak.peak_device_bytes - combinations.usable_bytes
    return sum(bounds[field] for field in fields) + unused >= missing
