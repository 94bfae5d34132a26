"""Plan a memory budget: what each decoder block recomputes and offloads, as fast as the budget allows.

``recompute: {budget_gib: x}`` -> ``recompute: {layers: [...]}``. The budget bounds the highest allocated
bytes (``torch.cuda.max_memory_allocated``) at every point of the step; ``recompute: fit`` bounds the bytes on
the device, which hold the CUDA context, NCCL and the allocator's unused memory too. One short trace measures
a block's cost in each way (``probe``), many assignments are evaluated from it (``assignment``), and the
fastest that fits is traced whole, as ``predict`` does. Only a plan whose own prediction is within the bound
is returned.

A larger budget is never predicted slower: the candidates and their order do not depend on the budget.
"""

import math
import time
from typing import NamedTuple

import numpy as np

from trainfit.planning.recompute.assignment import (
    Array,
    Assignments,
    Policy,
    assignments,
    evaluate,
    policies_of,
    runs_of,
    table,
)
from trainfit.planning.recompute.probe import probe
from trainfit.prediction.device_overhead import offload_bytes
from trainfit.prediction.machine import Machine, machine_of
from trainfit.prediction.predict import predict
from trainfit.prediction.time.roofline import copy_bytes_per_s
from trainfit.prediction.trace import trace_whole
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import BudgetGib, Layers
from trainfit.spec.result import Estimate
from trainfit.spec.units import GIB
from trainfit.techniques.recompute.layers import planned_field
from trainfit.virtual.trace.process_state import frozen_gc

LEVELS = ("none", "elementwise", "full")
COMPILED_LEVELS = ("none", "full")
COPY_SHARE = 0.9
"""Share of the sustained copy rate that a plan assumes."""
MAX_WAITS = 0.003
"""Share of a step that a plan may wait for copies."""
BATCH = 4096
"""Most assignments that are evaluated together."""
MAX_TRIALS = 12
"""Plans traced whole. The excess of one that is over the budget corrects the estimate of the others."""
FILLED = 0.99
"""Share of the available device bytes from which a plan that fits is not improved further."""


class Plan(NamedTuple):
    """A budget resolved."""

    recipe: Recipe
    """With the plan in place of the budget."""
    estimate: Estimate
    is_complete: bool = True
    """False: time ran out before the search ended, so a faster plan may fit."""


class Candidates(NamedTuple):
    """All plans of the blocks, the fastest first."""

    machine: Machine
    policies: list[Policy]
    rows: Assignments
    peak_bytes: Array
    offload_bytes: Array
    """Bytes on the device outside the allocator."""

    def recipe(self, recipe: Recipe, index: int) -> Recipe:
        """The recipe with this assignment."""
        runs = runs_of(self.rows[index].tolist(), self.policies)
        plain = len(runs) == 1 and runs[0].recompute == "none" and not runs[0].offload
        return recipe.model_copy(update={"recompute": "none" if plain else Layers(layers=runs)})


def resolve(recipe: Recipe, machine: Machine | None = None) -> Recipe:
    """Return the recipe with its budget or fit planned; any other recipe unchanged.

    Args:
        machine: of the recipe's ``hardware``; None: with the catalog's calibration.

    Raises:
        InputError: as ``plan``.
    """
    return plan(recipe, machine).recipe if recipe.plans_recompute else recipe


@frozen_gc()
def plan(recipe: Recipe, machine: Machine | None = None, *, until_s: float = math.inf) -> Plan:
    """Return the fastest plan found within the recipe's GiB budget, or within its GPU's memory.

    Args:
        machine: of the recipe's ``hardware``; None: with the catalog's calibration.
        until_s: no plan that has to fit on its GPU is traced later, by ``time.monotonic()``.

    Raises:
        OutOfTimeError: by then none was found to fit.
        InputError: no plan is within it (the least reachable is named), or the blocks are not repeated.
    """
    found = candidates(recipe, machine)
    if not isinstance(recipe.recompute, BudgetGib):
        return _fitting(recipe, found, until_s)
    budget_bytes = recipe.recompute.budget_gib * GIB
    off = 0.0
    """Excess of a traced peak over its evaluation."""
    for _ in range(MAX_TRIALS):
        within = np.flatnonzero(found.peak_bytes + off <= budget_bytes)
        if not len(within):
            break
        tried = _traced(recipe, found, int(within[0]))
        if tried.estimate.highest.allocated <= budget_bytes:
            return tried
        off = max(off, tried.estimate.highest.allocated - float(found.peak_bytes[within[0]]))
    least = _traced(recipe, found, int(np.argmin(found.peak_bytes)))
    if least.estimate.highest.allocated <= budget_bytes:
        return least
    reachable_gib = math.ceil(least.estimate.highest.allocated / GIB * 1000) / 1000
    raise InputError(
        f"the least that any plan reaches is {reachable_gib} GiB",
        f"set recompute.budget_gib to {reachable_gib} or more, {_others(recipe)}",
        field="recompute.budget_gib",
        value=recipe.recompute.budget_gib,
    )


class OutOfTimeError(InputError):
    """Raised where time ran out before a plan was found to fit."""


def _fitting(recipe: Recipe, found: Candidates, until_s: float) -> Plan:
    """Return the fastest plan found that fits on the GPU with ``least_headroom`` free.

    What else the device holds differs from plan to plan. That of the last traced one selects the next: a
    smaller plan after one that is too large, a faster one where room is left.
    """
    gpu = found.machine.gpu
    most_bytes = gpu.usable_bytes * (1 - gpu.least_headroom)
    evaluated = found.peak_bytes + found.offload_bytes
    best: Plan | None = None
    first_slower, others, other_bytes = len(found.peak_bytes), np.ones(len(found.peak_bytes), bool), 0.0
    for _ in range(MAX_TRIALS):
        within = np.flatnonzero(others & (evaluated + other_bytes <= most_bytes))
        if not len(within) or within[0] > first_slower:
            break
        if time.monotonic() >= until_s:
            if best is None:
                raise OutOfTimeError("no plan was found to fit in time", "plan it alone", field="recompute")
            return best._replace(is_complete=False)
        index = int(within[0])
        tried, others[index] = _traced(recipe, found, index), False
        device_bytes = tried.estimate.highest.device
        other_bytes = device_bytes - float(evaluated[index])
        if tried.estimate.fits and device_bytes <= most_bytes:
            best, first_slower = tried, index
            if device_bytes >= FILLED * most_bytes:
                break
    best = best or _traced(recipe, found, int(np.argmin(evaluated)))
    if best.estimate.fits:
        return best
    least = f"{best.estimate.highest.device / GIB:.2f} GiB of {gpu.usable_bytes / GIB:.2f}"
    raise InputError(
        f"the least that any plan reaches on {gpu.name} is {least}",
        f"set {_others(recipe).removeprefix('or ')}",
        field="recompute",
        value=recipe.recompute,
    )


def _others(recipe: Recipe) -> str:
    """Return what else makes a step smaller."""
    smaller = "batch.micro or batch.seq smaller"
    return f"{smaller}, or loss: chunked" if recipe.hardware.count == 1 else f"or {smaller}"


def _traced(recipe: Recipe, found: Candidates, index: int) -> Plan:
    planned = found.recipe(recipe, index)
    return Plan(planned, predict(planned, found.machine))


def candidates(recipe: Recipe, machine: Machine | None = None) -> Candidates:
    """Return all plans of the recipe's blocks, ordered by time, offloaded bytes and peak."""
    _check(recipe)
    machine = machine or machine_of(recipe.hardware)
    gpu = machine.gpu
    levels = COMPILED_LEVELS if recipe.compile else LEVELS
    found = probe(recipe, levels, machine)
    policies = policies_of(found, levels, offload_levels=_offload_levels(recipe, gpu))
    copy_rate = 1.0 if gpu.vendor == "host" else copy_bytes_per_s(gpu) * COPY_SHARE
    accumulate = recipe.batch.accumulate
    rows = assignments(found, policies, copy_rate, accumulate)
    numbers = table(found, policies)
    parts = [
        evaluate(found, numbers, rows[start : start + BATCH], copy_rate, accumulate)
        for start in range(0, len(rows), BATCH)
    ]
    seconds, waits_s, gone_bytes, peak_bytes = (np.concatenate(part) for part in zip(*parts, strict=True))
    kept = np.flatnonzero(waits_s <= MAX_WAITS * seconds)
    seconds = np.round(
        seconds / seconds.min(), 9
    )  # The same numbers summed in another order differ in the last bits, and count as equal.
    order = kept[np.lexsort((peak_bytes[kept], gone_bytes[kept], seconds[kept]))]
    outside = offload_bytes(gpu, gone_bytes[order])
    return Candidates(machine, policies, rows[order], peak_bytes[order], outside)


def _offload_levels(recipe: Recipe, gpu: Gpu) -> tuple[str, ...]:
    if recipe.compile or gpu.vendor == "host":
        return ()
    # Under autocast, saved copies of weights look like activations; autocast holds them, so offloading frees
    # nothing.
    return LEVELS[1:] if recipe.precision.startswith("amp") else LEVELS


def _check(recipe: Recipe) -> None:
    goal = recipe.recompute
    field = planned_field(recipe)
    value = goal.budget_gib if isinstance(goal, BudgetGib) else goal
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
