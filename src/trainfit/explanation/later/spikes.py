"""Memory spikes that come later than the steady step, each found by running it on the virtual GPU."""

from collections.abc import Callable, Iterator
from typing import Any

from trainfit.catalog.load import model_config
from trainfit.explanation.peak import Explained
from trainfit.ledger.allocator import CachingAllocator, OutOfMemory
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.replay import UncachedAllocator, replay
from trainfit.prediction.device_overhead import overhead_bytes
from trainfit.prediction.machine import Machine
from trainfit.prediction.predict import predict
from trainfit.spec.errors import InputError
from trainfit.spec.explanation import LaterSpike
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from trainfit.spec.units import format_bytes

EVALUATION, CHECKPOINT, FULL_STATE, LOGITS = "evaluation", "checkpoint", "full state dict", "logits kept"
POSITIONS = ("max_position_embeddings", "n_positions")
NOT_TRACED = "after the step: not run for pipelines and compiled models"


def spikes(
    found: Explained, eval_batch: int | None, longest: int, say: Callable[[str], None]
) -> tuple[list[LaterSpike], list[str]]:
    """Return the spikes of a recipe, and notes on what could not be run.

    Args:
        eval_batch: sequences of an evaluation's batch; None: the micro-batch's.
        longest: tokens of the longest sample.
        say: called with what is run next.

    Raises:
        InputError: the recipe cannot have so long a sample.
    """
    recipe, machine = found.recipe, found.machine
    assert recipe is not None, "spikes are a recipe's"
    assert machine is not None, "spikes are a recipe's"
    phases, own = found.explanation.phases, found.explanation.peak_allocated_bytes
    usable = found.capacity_bytes
    fits = usable is None or phases.first.optimizer <= usable
    more = phases.first.optimizer - phases.steady.optimizer
    above = f", {format_bytes(more)} above later updates" if more > 0 else ""
    results = [
        LaterSpike(
            name="first update",
            what="the optimizer's states are made" + above,
            peak_allocated_bytes=phases.first.optimizer,
            more_bytes=phases.first.optimizer - own,
            fits=fits,
        )
    ]
    notes: list[str] = []
    if recipe.mesh.pipeline > 1 or recipe.compile:
        notes.append(NOT_TRACED)
    else:
        say("an evaluation and a checkpoint")
        results += _after_the_step(found, recipe, machine, eval_batch or recipe.batch.micro)
    for name, what, changes in _variants(recipe, longest):
        say(what)
        other = recipe.model_copy(update={"batch": recipe.batch.model_copy(update=changes)})
        results.append(_of_estimate(name, what, predict(other, machine), own))
    return results, notes


def _variants(recipe: Recipe, longest: int) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Yield name, description and changed fields of the batch of steps that a run may also have."""
    if longest > recipe.batch.seq:
        yield "longest sample", f"a batch of {longest:,} tokens a sequence", {"seq": longest}
    if recipe.batch.accumulate == 1:
        held = "gradients are alive in the next micro-batch's forward"
        if recipe.hardware.count > 1 and recipe.mesh.shards_weights:
            held = "sharded gradients are alive in the next micro-batch's forward"
        yield "accumulation", f"two micro-batches a step: {held}", {"accumulate": 2}


def _of_estimate(name: str, what: str, found: Estimate, own: int) -> LaterSpike:
    return LaterSpike(
        name=name,
        what=what,
        peak_allocated_bytes=found.highest.allocated,
        peak_device_bytes=found.highest.device,
        more_bytes=found.highest.allocated - own,
        fits=found.fits,
    )


def _after_the_step(found: Explained, recipe: Recipe, machine: Machine, eval_batch: int) -> list[LaterSpike]:
    """Run an evaluation, and the writing of a checkpoint, after the steady step."""
    from trainfit.prediction.trace import trace

    own = found.explanation.peak_allocated_bytes

    ledger = trace(recipe, machine.row, run=_After(recipe, eval_batch))
    ledger = ledger.with_lower_peak()
    limit = (
        None
        if machine.gpu.vendor == "host"
        else machine.gpu.usable_bytes - overhead_bytes(machine.gpu, ledger)
    )
    peaks = step_peaks(ledger, limit, expandable=found.expandable)
    words = {
        EVALUATION: f"{eval_batch} x {recipe.batch.seq:,} tokens, without gradients",
        LOGITS: "the same, the logits of two batches kept, as a Trainer with compute_metrics keeps all",
        CHECKPOINT: "as train writes it: each parameter is checked for NaN, then copied to the host",
        FULL_STATE: "every parameter gathered whole on each GPU",
    }
    return [
        LaterSpike(
            name=name,
            what=what,
            peak_allocated_bytes=peaks[name][0],
            more_bytes=peaks[name][0] - own,
            fits=peaks[name][1],
        )
        for name, what in words.items()
        if name in peaks
    ]


def step_peaks(ledger: Ledger, limit: int | None, *, expandable: bool) -> dict[str, tuple[int, bool]]:
    """Return the peak of allocated bytes of each step of a ledger, and whether it fits.

    The first step that finds no room within the limit ends the run. What comes after a training step that
    fails does not fit; what comes after a later spike that fails is compared with the limit by its peak.

    Args:
        limit: of reserved bytes; None: a CPU's memory, into which every step fits.
    """
    free = UncachedAllocator() if limit is None else CachingAllocator(None, expandable)
    replayed = replay(ledger, free, empty_cache_after_init=True)
    peaks: dict[str, int] = {}
    for segment, peak in zip(ledger.segments, replayed.segment_peaks, strict=True):
        peaks[segment.step] = max(peaks.get(segment.step, 0), peak)
    failed = None if limit is None else _failed_step(ledger, limit, expandable=expandable)
    if failed is None:
        return {name: (peak, True) for name, peak in peaks.items()}
    order, is_spike = list(peaks), failed in (EVALUATION, LOGITS, CHECKPOINT, FULL_STATE)
    assert limit is not None
    ran = order[: order.index(failed)]
    return {
        name: (peak, name in ran or (is_spike and name != failed and peak <= limit))
        for name, peak in peaks.items()
    }


def _failed_step(ledger: Ledger, limit: int, *, expandable: bool) -> str | None:
    """Return the step in which a replay within the limit finds no room; None: it succeeds."""
    allocator = _Counting(limit, expandable)
    try:
        replay(ledger, allocator, empty_cache_after_init=True)
    except OutOfMemory:
        return ledger.segments[ledger.expand()[allocator.num_events].segment].step
    return None


class _Counting(CachingAllocator):
    """Counts the events of a ledger that it has done."""

    num_events = 0

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        handle = super().malloc(num_bytes, stream)
        self.num_events += 1
        return handle

    def free(self, handle: int) -> None:
        super().free(handle)
        self.num_events += 1


class _After:
    """Runs the steps and what comes after them, each as a step of its own in the ledger."""

    def __init__(self, recipe: Recipe, eval_batch: int):
        self.recipe, self.eval_batch = recipe, eval_batch

    def __call__(self, step: Any, virtual: Any) -> None:
        import torch

        from trainfit.prediction.traced_steps import run_evaluation
        from trainfit.training.state import finite_checks, optimizer_state

        run_evaluation(step, virtual, self.eval_batch)
        if self.recipe.model.implementation == "hf" and self.recipe.hardware.count == 1:
            virtual.begin(LOGITS, LOGITS)
            batch = step.random_batches(sequences=self.eval_batch)[0]
            with torch.no_grad():
                kept = [step.model(input_ids=batch["input_ids"]).logits for _ in range(2)]
            del kept, batch
        virtual.begin(CHECKPOINT, CHECKPOINT)
        for _ in finite_checks(step):
            pass
        step.model.state_dict()
        optimizer_state(step)
        if step.mesh is not None and self.recipe.mesh.shards_weights:
            virtual.begin(FULL_STATE, FULL_STATE)
            self._gather(step, virtual)

    def _gather(self, step: Any, virtual: Any) -> None:
        from torch.distributed.tensor import DTensor

        whole: list[Any] = []
        for parameter in step.model.parameters():
            if isinstance(parameter, DTensor):
                with virtual.within(virtual.scope_of(parameter)):
                    whole.append(parameter.full_tensor().detach())
        del whole


def check_longest(recipe: Recipe, longest: int | None) -> int:
    """Return the longest sample's tokens: those given, else twice the recipe's, as far as positions go.

    Raises:
        InputError: shorter than the recipe's sequences.
    """
    if longest is None:
        config = model_config(recipe.model.config)
        known = [value for name in POSITIONS if isinstance(value := config.get(name), int)]
        return max(recipe.batch.seq, min([2 * recipe.batch.seq, *known]))
    if longest < recipe.batch.seq:
        problem = f"the recipe's sequences have {recipe.batch.seq:,} tokens"
        raise InputError(problem, "name a longer one", field="--longest", value=longest)
    return longest
