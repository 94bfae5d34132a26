"""Plan a memory budget: what each decoder block recomputes and offloads, as fast as the budget allows.

``recompute: {budget_gib: x}`` -> ``recompute: {layers: [...]}``. The budget bounds the highest allocated
bytes (``torch.cuda.max_memory_allocated``) at every point of the step. One short trace measures a block's
cost in each way (``probe``), many assignments are evaluated from it (``candidates``, ``assignments``), and
the fastest that fits is traced whole, as ``predict`` does. Only a plan whose own prediction is within the
budget is returned.

A larger budget is never predicted slower: the candidates and their order do not depend on the budget.
"""

import math
from typing import NamedTuple

import numpy as np

from trainfit.catalog.load import gpu as find_gpu
from trainfit.planning.assignments import Array, Option, evaluate, table
from trainfit.planning.candidates import Assignments, assignments, options, runs_of
from trainfit.planning.probe import probe
from trainfit.prediction.estimate import predict
from trainfit.prediction.roofline import copy_bytes_per_s
from trainfit.prediction.trace import trace_whole
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import BudgetGib, Layers
from trainfit.spec.result import Estimate
from trainfit.spec.units import GIB
from trainfit.virtual.trace.process_state import frozen_gc

LEVELS = ("none", "elementwise", "full")
COMPILED_LEVELS = ("none", "full")
COPY_SHARE = 0.9
"""Share of the sustained copy rate that a plan assumes."""
MAX_WAITS = 0.003
"""Share of a step that a plan may wait for copies."""
BATCH = 4096
"""Assignments evaluated at once."""
MAX_TRIALS = 12
"""Plans traced whole. The excess of one that is over the budget corrects the estimate of the others."""


class Plan(NamedTuple):
    """A budget resolved."""

    recipe: Recipe
    """With the plan in place of the budget."""
    estimate: Estimate


class Candidates(NamedTuple):
    """Everything that may be chosen, fastest first."""

    choices: list[Option]
    rows: Assignments
    peak_bytes: Array

    def recipe(self, recipe: Recipe, index: int) -> Recipe:
        """The recipe with this assignment."""
        runs = runs_of(self.rows[index].tolist(), self.choices)
        plain = len(runs) == 1 and runs[0].recompute == "none" and not runs[0].offload
        return recipe.model_copy(update={"recompute": "none" if plain else Layers(layers=runs)})


def resolve(recipe: Recipe) -> Recipe:
    """Return the recipe with its GiB budget planned; any other recipe unchanged.

    Raises:
        InputError: as ``plan``.
    """
    return plan(recipe).recipe if isinstance(recipe.recompute, BudgetGib) else recipe


@frozen_gc()
def plan(recipe: Recipe) -> Plan:
    """Return the fastest plan found within the recipe's GiB budget.

    Raises:
        InputError: no plan is within it (the least reachable is named), or the blocks are not repeated.
    """
    assert isinstance(recipe.recompute, BudgetGib)
    found = candidates(recipe)
    budget_bytes = recipe.recompute.budget_gib * GIB
    off = 0.0
    """Excess of a traced peak over its evaluation."""
    for _ in range(MAX_TRIALS):
        within = np.flatnonzero(found.peak_bytes + off <= budget_bytes)
        if not len(within):
            break
        tried = _traced(recipe, found, int(within[0]))
        if tried.estimate.peak_allocated_bytes <= budget_bytes:
            return tried
        off = max(off, tried.estimate.peak_allocated_bytes - float(found.peak_bytes[within[0]]))
    least = _traced(recipe, found, int(np.argmin(found.peak_bytes)))
    if least.estimate.peak_allocated_bytes <= budget_bytes:
        return least
    reachable_gib = math.ceil(least.estimate.peak_allocated_bytes / GIB * 1000) / 1000
    smaller = "batch.micro or batch.seq smaller"
    others = f"{smaller}, or loss: chunked" if recipe.hardware.count == 1 else f"or {smaller}"
    raise InputError(
        f"the least that any plan reaches is {reachable_gib} GiB",
        f"set recompute.budget_gib to {reachable_gib} or more, {others}",
        field="recompute.budget_gib",
        value=recipe.recompute.budget_gib,
    )


def _traced(recipe: Recipe, found: Candidates, index: int) -> Plan:
    planned = found.recipe(recipe, index)
    return Plan(planned, predict(planned))


def candidates(recipe: Recipe) -> Candidates:
    """Return all plans of the recipe's blocks, ordered by time, offloaded bytes and peak."""
    _check(recipe)
    gpu = find_gpu(recipe.hardware.gpu)
    levels = COMPILED_LEVELS if recipe.compile else LEVELS
    found = probe(recipe, levels)
    choices = options(found, levels, offload_levels=_offload_levels(recipe))
    copy_rate = 1.0 if gpu.vendor == "host" else copy_bytes_per_s(gpu) * COPY_SHARE
    accumulate = recipe.batch.accumulate
    rows = assignments(found, choices, copy_rate, accumulate)
    numbers = table(found, choices)
    parts = [
        evaluate(found, numbers, rows[start : start + BATCH], copy_rate, accumulate)
        for start in range(0, len(rows), BATCH)
    ]
    seconds, waits_s, gone_bytes, peak_bytes = (np.concatenate(part) for part in zip(*parts, strict=True))
    kept = np.flatnonzero(waits_s <= MAX_WAITS * seconds)
    seconds = np.round(seconds / seconds.min(), 9)  # Sums of the same numbers in another order are equal.
    order = kept[np.lexsort((peak_bytes[kept], gone_bytes[kept], seconds[kept]))]
    return Candidates(choices, rows[order], peak_bytes[order])


def _offload_levels(recipe: Recipe) -> tuple[str, ...]:
    if recipe.compile or find_gpu(recipe.hardware.gpu).vendor == "host":
        return ()
    # Under autocast, saved copies of weights look like activations; autocast holds them, so offloading frees
    # nothing.
    return LEVELS[1:] if recipe.precision.startswith("amp") else LEVELS


def _check(recipe: Recipe) -> None:
    field = "recompute.budget_gib"
    value = recipe.recompute.budget_gib if isinstance(recipe.recompute, BudgetGib) else None
    if recipe.compile == "model":
        raise InputError(
            "the compiler decides what a whole compiled model recomputes",
            "use recompute: {budget: share}, or compile: block or false",
            field=field,
            value=value,
        )
    if recipe.adapter is not None and trace_whole(recipe):
        raise InputError(
            "the adapter's targets name layers by number, so the blocks are not alike",
            "name targets without numbers, or write out recompute: {layers: [...]}",
            field=field,
            value=value,
        )
