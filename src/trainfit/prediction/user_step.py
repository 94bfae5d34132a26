"""Trace the user's own training code on the virtual GPU.

The callable builds a ``torch.nn.Module`` and trains it with plain PyTorch on "cuda". There is no recipe and
no layer is repeated: what the callable executes is counted.
"""

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from trainfit.catalog.load import gpu as find_gpu
from trainfit.ledger.allocator import CachingAllocator, OutOfMemory
from trainfit.ledger.allocator_settings import allocator_settings
from trainfit.ledger.ledger import Ledger, Segment
from trainfit.ledger.replay import Replay, replay
from trainfit.prediction import communication
from trainfit.prediction.bounds import script_bounds
from trainfit.prediction.device_overhead import overhead_bytes
from trainfit.prediction.estimate import of_both_peaks, summary, timed_by
from trainfit.prediction.evaluation_code import evaluates_at
from trainfit.prediction.machine import Machine, machine_with
from trainfit.prediction.time import attention_time
from trainfit.prediction.time.calibrated import OwnCalibration
from trainfit.prediction.time.host_time import num_recomputed_blocks
from trainfit.prediction.time.roofline import copy_bytes_per_s, roofline, without_rows
from trainfit.prediction.versions import LIBRARIES, versions_of
from trainfit.spec import DEFAULT_GPU
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.result import Cost, Estimate, OtherPhase, PeakHolder, Phases, StepInputs, TracedCode
from trainfit.user import UserGpu, user_gpu
from trainfit.user import other_phases as one_phase
from trainfit.user.lacking import lack_of, line_of
from trainfit.user.steps import TraceComplete
from trainfit.virtual.cuda.attention_kernel import prefers_cudnn

LEAVE_OUT = "leave it out of the traced code, or trace a version without it"
NUM_HOLDERS = 10
OTHER_KINDS = ("evaluation", "generation", "checkpoint")
NOT_MODELLED = {
    "convolution": "convolutions: cuDNN's workspaces are not modelled, nor the copies it makes of layouts it "
    "does not like",
    "rnn": "recurrent layers: what cuDNN saves is not known; it is what the backward needs at least",
}


class CodeLedger(NamedTuple):
    """The ledger of a traced callable; nothing of the callable's own is kept alive by it."""

    name: str
    machine: Machine
    ledger: Ledger
    num_steps: int
    """Whole optimizer steps."""
    expandable: bool
    """The environment, or the code, sets ``expandable_segments:True``."""

    def replayed(self) -> tuple[list[Replay], bool]:
        """Return the replays of the ledger's peaks, and whether they fit (``estimate.of_both_peaks``)."""
        gpu, expandable = self.machine.gpu, self.expandable
        return of_both_peaks(self.ledger, lambda one: _replay_on(gpu, one, expandable))

    def step_ledger(self) -> Ledger:
        """Return the ledger whose segments are those of a recipe: a steady step, and what is between."""
        return replace(self.ledger, segments=[self._of_recipe(one) for one in self.ledger.segments])

    def _of_recipe(self, segment: Segment) -> Segment:
        if self.num_steps <= 1 and segment.step == "first":
            segment = segment._replace(step="steady")
        return segment._replace(phase="between") if segment.phase == "data" else segment


class UserTrace(NamedTuple):
    """A traced callable: its ledger, and what an estimate of it needs in addition."""

    code: CodeLedger
    virtual: UserGpu
    world_size: int | None


def traced(
    step: Callable[[], Any],
    *,
    gpu: str = DEFAULT_GPU,
    steps: int = 3,
    world_size: int | None = None,
    nodes: int | None = None,
    calibration: OwnCalibration | None = None,
) -> UserTrace:
    """Run a callable as ``trainfit.trace`` does and return its ledger.

    One trace or prediction runs at a time in a process; another thread's waits.
    """
    row = find_gpu(gpu)
    if steps < 1:
        raise InputError("at least one step is traced", "use steps=3", field="steps", value=steps)
    if world_size is not None and world_size < 1:
        raise InputError("at least one rank is traced", "use 1 or more", field="world_size", value=world_size)
    machine = machine_with(row, calibration, gpus_per_host=_per_host(world_size, nodes))
    with user_gpu(
        machine.gpu,
        prefers_cudnn=prefers_cudnn(row),
        max_steps=steps,
        num_ranks=world_size,
        evaluates_at=evaluates_at(step),
    ) as virtual:
        with contextlib.suppress(TraceComplete):
            _run(step)
        segments, whole = virtual.steps.segments(), virtual.steps.num_steps()
        allocator = allocator_settings(os.environ)  # The code may have set it.
        ledger = virtual.tracer.finish()
    name = _name_of(step)
    if len(segments) == 1 or not virtual.steps.num_parameters:
        raise InputError(
            "no module with parameters was called on the GPU",
            'build the model inside the callable, move it with .to("cuda") and call it',
            field="step",
            value=name,
        )
    ledger.segments = segments
    ledger.params, ledger.trainable_params = virtual.steps.num_parameters, virtual.steps.num_trained
    outside = allocator_settings(os.environ).assumptions  # Stated anyway.
    ledger.assumptions = _assumptions(ledger, virtual, whole)
    ledger.assumptions += tuple(note for note in allocator.assumptions if note not in outside)
    ledger.emptied_at = tuple(sorted(virtual.memory_stats.emptied_at))
    code = CodeLedger(name, machine, ledger, whole, allocator.expandable_segments)
    return UserTrace(code, virtual, world_size)


def _run(step: Callable[[], Any]) -> None:
    """Run the callable; what fails because the virtual GPU lacks something says so."""
    try:
        step()
    except InputError:
        raise
    except Exception as error:
        lack = lack_of(error)
        if lack is None:
            raise
        where = f"; it is called in {line}" if (line := line_of(error)) else ""
        raise InputError(f"{lack}{where}", LEAVE_OUT, field="step", value=_name_of(step)) from error


def _per_host(world_size: int | None, nodes: int | None) -> int | None:
    """Return how many GPUs of a host ``nodes`` says; None: it says nothing."""
    if nodes is None:
        return None
    if nodes < 1 or world_size is None or world_size % nodes:
        ranks = "one process" if world_size is None else f"{world_size} ranks"
        problem = f"{ranks} cannot be shared equally by {nodes} nodes"
        raise InputError(problem, "use a divisor of the world size", field="nodes", value=nodes)
    return world_size // nodes


def _name_of(step: Callable[..., Any]) -> str:
    while isinstance(step, functools.partial):
        step = step.func
    return getattr(step, "__qualname__", type(step).__name__)


def estimate_of(traced: UserTrace) -> Estimate:
    """Return the estimate of a traced callable."""
    estimate = _estimate(traced.code, traced.virtual)
    ranks = traced.world_size
    return estimate if ranks is None else estimate.model_copy(update={"num_gpus": ranks})


def _estimate(traced: CodeLedger, virtual: UserGpu) -> Estimate:
    (replays, fits), machine = traced.replayed(), traced.machine
    name, ledger = traced.name, traced.ledger
    gpu, num_steps, replayed = machine.gpu, traced.num_steps, replays[0]
    phases = replayed.phases
    if num_steps <= 1:
        phases = phases.model_copy(update={"steady": phases.first})
    others = _other_phases(virtual.steps.other_phases(), ledger, machine, replayed)
    scored = _other_phases(virtual.steps.scorings(), ledger, machine, replayed)
    ledger = traced.step_ledger()
    time = roofline(ledger, machine)
    found = summary(gpu, ledger, replays, time, fits=fits)
    inputs, tokens_per_s = _inputs(virtual, found.step_s)
    rates: tuple[str, ...] = ()
    if time is not None:
        timed = attention_time.assumptions(ledger, gpu, machine.known.times)
        rates = (*timed, *without_rows(ledger, machine))
    rates += communication.assumptions(ledger, gpu)
    code = TracedCode(
        name=name,
        gpu=gpu.name,
        num_steps=num_steps,
        holders=_holders(ledger, replayed),
        inputs=inputs,
        other_phases=others,
        scoring=scored[0] if scored else None,
        num_launches=sum(op.calls for op in ledger.steady_ops),
        num_recomputed_blocks=num_recomputed_blocks(ledger),
        num_python_calls=sum(op.python for op in ledger.steady_ops),
    )
    return found.model_copy(
        update={
            "phases": phases,
            "peak_phase": _peak_phase(replayed, phases),
            "assumptions": (*found.assumptions, *rates, *((timed_by(machine),) if time else ())),
            "warnings": (*found.warnings, *communication.large_hosts(machine)),
            "versions": versions_of(name for name in LIBRARIES if name in sys.modules),
            "code": code,
            "bounds": script_bounds(time, gpu, ledger),
            "tokens_per_s": tokens_per_s,
            "cost": _cost(machine.price_per_hour, virtual.num_ranks, tokens_per_s, inputs.samples_per_s),
        }
    )


def _inputs(virtual: UserGpu, step_s: float | None) -> tuple[StepInputs, float | None]:
    """Return the inputs of a step, and the tokens of all GPUs a second."""
    tokens, samples = virtual.steps.step_inputs()
    ranks = virtual.steps.data_ranks or 1
    rates = [ranks * each / step_s if step_s and each else None for each in (tokens, samples)]
    return StepInputs(tokens=tokens, samples=samples, data_ranks=ranks, samples_per_s=rates[1]), rates[0]


def _cost(
    price: float | None, num_gpus: int, tokens_per_s: float | None, samples_per_s: float | None
) -> Cost | None:
    if price is None:
        return None
    per_s = price * num_gpus / 3600
    return Cost(
        price_per_gpu_hour=price,
        num_gpus=num_gpus,
        per_hour=price * num_gpus,
        per_million_tokens=per_s / tokens_per_s * 1e6 if tokens_per_s else None,
        per_million_samples=per_s / samples_per_s * 1e6 if samples_per_s else None,
    )


def _other_phases(
    phases: Iterable[one_phase.OtherPhase], ledger: Ledger, machine: Machine, replayed: Replay
) -> tuple[OtherPhase, ...]:
    """Return phases, each kind once."""
    found: dict[str, list[one_phase.OtherPhase]] = {}
    for one in phases:
        found.setdefault(one.kind, []).append(one)
    num_ops = Counter(op.segment for op in ledger.ops)
    return tuple(
        _other_phase(
            ones,
            max(ones, key=lambda one: sum(num_ops[n] for n in one.segments)),
            ledger,
            machine,
            replayed,
        )
        for ones in found.values()
    )


def _other_phase(
    ones: list[one_phase.OtherPhase],
    longest: one_phase.OtherPhase,
    ledger: Ledger,
    machine: Machine,
    replayed: Replay,
) -> OtherPhase:
    # The segments of the longest one as those of a step, which is then timed as a step is.
    alone = replace(
        ledger,
        segments=[
            Segment(
                "steady" if n in longest.segments else "rest", "between" if s.phase == "data" else s.phase
            )
            for n, s in enumerate(ledger.segments)
        ],
    )
    time = roofline(alone, machine)
    copied_s = max(one.saved_bytes for one in ones) / copy_bytes_per_s(machine.gpu)
    return OtherPhase.model_validate(
        {
            "name": longest.kind,
            "num_times": len(ones),
            "after_steps": tuple(one.step for one in ones),
            "num_forwards": longest.num_forwards,
            "peak_allocated_bytes": max(replayed.segment_peaks[n] for one in ones for n in one.segments),
            "seconds": None if time is None else time.expected.total + copied_s,
            "flops": alone.steady_sum("causal_flops"),
            "saved_bytes": max(one.saved_bytes for one in ones),
        }
    )


def _peak_phase(replayed: Replay, phases: Phases) -> str:
    """Where the peak is; ``steady`` where that step comes to the same height as the first that reached it."""
    step, phase = replayed.peak_phase.split(".")
    if step in OTHER_KINDS:
        return step
    if step != "first" and getattr(phases.steady, phase, 0) == replayed.peak_allocated_bytes:
        return f"steady.{phase}"
    return step if step == "setup" else replayed.peak_phase


def _replay_on(gpu: Gpu, ledger: Ledger, expandable: bool) -> tuple[Replay, bool]:
    """As ``estimate.replay_on``, with the allocator as the code sets it."""
    capacity = gpu.usable_bytes - overhead_bytes(gpu, ledger)
    free = replay(ledger, CachingAllocator(None, expandable))
    if free.peak_reserved_bytes <= capacity or free.peak_allocated_bytes > capacity:
        return free, free.peak_reserved_bytes <= capacity
    try:
        return replay(ledger, CachingAllocator(capacity, expandable)), True
    except OutOfMemory:
        return free, False


def _holders(ledger: Ledger, replayed: Replay) -> tuple[PeakHolder, ...]:
    totals: Counter[tuple[str, str, str]] = Counter()
    for index, num_bytes in replayed.at_peak:
        storage, module, name = ledger.storages[index], "", ""
        if storage.op >= 0 and storage.category not in ("weights", "gradients", "optimizer"):
            op = ledger.ops[storage.op]
            module, name = op.module, op.name.removeprefix("aten.").partition(".")[0]
        totals[storage.category, module, name] += num_bytes
    return tuple(
        PeakHolder(num_bytes=size, category=category, module=module, operation=name)
        for (category, module, name), size in totals.most_common(NUM_HOLDERS)
        if size
    )


def _assumptions(ledger: Ledger, virtual: UserGpu, whole: int) -> tuple[str, ...]:
    notes = [
        "values on the device are not computed: code that reads them sees zeros",
    ]
    if whole == 0:
        notes.append("no backward ran" if not virtual.steps.has_trained else "no whole step ran")
    elif whole == 1:
        notes.append("only one optimizer step ran: the steady step is assumed to equal the first")
    tokens, samples = virtual.steps.step_inputs()
    if tokens or samples:
        what = f"{tokens:,} tokens, the integers that the model's first embedding looks up"
        notes.append(
            f"a step of a GPU has {what if tokens else f'{samples:,} samples, the length of its first input'}"
        )
    if virtual.buckets is not None:
        notes.append(
            "memory, FLOPs and time are those of rank 0; what other ranks would send is not known"
            if ledger.collectives
            else "no collective ran: the ranks train independently"
        )
    notes += [line for kind, line in NOT_MODELLED.items() if any(kind in op.name for op in ledger.ops)]
    traits = virtual.tracer.gpu
    return (*(traits.assumptions if traits else ()), *notes, *sorted(virtual.tracer.notes))
