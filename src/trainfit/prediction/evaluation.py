"""The memory of an evaluation: a forward without gradients, of more sequences than a step's micro-batch.

Recipe -> its step on the virtual GPU, then that forward -> the peak of each.
"""

import os
from functools import partial
from typing import NamedTuple

from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.allocator_settings import allocator_settings
from trainfit.ledger.replay import UncachedAllocator, replay
from trainfit.prediction.device_overhead import overhead_bytes
from trainfit.prediction.machine import Machine, machine_of
from trainfit.spec.recipe import Recipe
from trainfit.spec.value import MOST_COUNT


class EvaluationPeak(NamedTuple):
    """Peaks of a step and of an evaluation after it, in bytes."""

    step_allocated_bytes: int
    allocated_bytes: int
    device_bytes: int
    """Of both: what the allocator reserves at most, and what lies outside it."""


def evaluation_peak(
    recipe: Recipe, sequences: int, machine: Machine | None = None, *, deterministic: bool = False
) -> EvaluationPeak:
    """Return the peaks of a recipe's step and of an evaluation of ``sequences`` at a time.

    Raises:
        InputError: as ``predict``.
    """
    from trainfit.prediction.trace import trace
    from trainfit.prediction.traced_steps import EVALUATION, run_evaluation

    assert 0 < sequences <= MOST_COUNT
    machine = machine or machine_of(recipe.hardware)
    evaluates = partial(run_evaluation, sequences=sequences)
    ledger = trace(recipe, machine.row, deterministic=deterministic, run=evaluates)
    # Steady steps are not repeated: the evaluation may have freed what the last one left.
    is_host = machine.gpu.vendor == "host"
    expandable = allocator_settings(os.environ).expandable_segments
    allocator = UncachedAllocator() if is_host else CachingAllocator(None, expandable)
    found = replay(ledger, allocator, empty_cache_after_init=True)
    of_evaluation = [segment.step == EVALUATION for segment in ledger.segments]
    in_steps = [segment.step not in ("init", "setup", EVALUATION) for segment in ledger.segments]
    peaks = found.segment_peaks
    return EvaluationPeak(
        step_allocated_bytes=max(peak for peak, counts in zip(peaks, in_steps, strict=True) if counts),
        allocated_bytes=max(peak for peak, counts in zip(peaks, of_evaluation, strict=True) if counts),
        device_bytes=found.peak_reserved_bytes + overhead_bytes(machine.gpu, ledger),
    )
