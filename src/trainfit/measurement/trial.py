"""Run the trial of a folder on one device.

Order: build; warm-up steps that read the memory at each phase's start (the first step, then steady steps);
timed steps without any instrumentation; on CUDA one more step for the breakdown of the peak (one GPU).
Steps that take minutes (``LONG_STEP_S``) are fewer: the last steady step is the first of the timed ones.

A recipe for several GPUs is measured by as many processes (ranks.py), each of which runs this for one rank.
"""

import importlib
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from trainfit.measurement.trial_files import ResultFile, TrialRequest, opened, refused
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import PHASES, Environment, MemoryBreakdown, PhasePeaks, Phases, Spread
from trainfit.spec.units import format_seconds

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

MIN_UNTIMED = 2  # The first step, and one steady step whose phases are measured
LONG_STEP_S = 60.0
"""A steady step of one GPU that takes this long is timed although its phases are read, which on CUDA is a few
reads on the host, and no further step is run for a breakdown."""
MODULES = ("trainfit.measurement.meter", "trainfit.models.hf", "transformers.models.llama.modeling_llama")
FROM_CACHE = "compiled programs came from the cache: nothing was tuned, which lowers the first step's peak"
UNTRACKED = "memory not measured: live tensors cannot be followed through compiled code on a CPU"
UNTRACKED_RANKS = "memory not measured: on a CPU live tensors are followed in one process only"

StepMemory = tuple[PhasePeaks, MemoryBreakdown | None]
"""Peak of each phase of one step, and the breakdown of the highest peak."""


class Rank(Protocol):
    """This process as one of several ranks (ranks.py)."""

    def join(self, recipe: Recipe, device: "torch.device") -> "DeviceMesh":
        """Join the process group and return the mesh of the recipe's ranks."""
        ...

    def align(self, device: "torch.device") -> None:
        """Wait until every rank's device is idle."""
        ...


Body = Callable[[TrialRequest, Any, ResultFile, Rank | None], None]
"""(task, meter, result that it updates, this rank; None: one GPU) -> nothing."""


def run_trial(folder: Path, rank: Rank | None = None) -> int:
    """Run the trial of ``folder``, or its part of one rank, and return the exit code."""
    request, result = opened(folder)
    try:
        _measure(request, result, rank)
    except InputError as error:
        return refused(folder, error)
    return 0


def _measure(request: TrialRequest, result: ResultFile, rank: Rank | None) -> None:
    """Measure and update ``result`` after each stage. Running out of memory sets that status."""
    from trainfit.measurement.meter import is_out_of_memory, out_of_memory_reason

    meter = _meter(request)
    environment = meter.environment(result.measurement.environment)
    result.update(environment=environment, device_bytes=environment.device_bytes)
    if request.memory_limit_bytes is not None:
        import_for_steps()  # On a CPU a module imported under the limit would count.
        meter.limit(request.memory_limit_bytes)
    try:
        body = _named(request.body) if request.body else measure_steps
        body(request, meter, result, rank)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _raise_peak(result, meter.take())
        stage = result.measurement.message.replace("ended", "out of memory")
        message = f"{stage}: {out_of_memory_reason(error)}"
        result.update(status="out-of-memory", message=message, **meter.totals())


def import_for_steps(*, adapters: bool = True) -> None:
    """Import the modules that a first model and its first steps need: transformers and every technique.

    Args:
        adapters: also peft, which imports bitsandbytes where it is installed.
    """
    from trainfit.techniques.registry import techniques

    for module in MODULES:
        importlib.import_module(module)
    techniques()
    if adapters:
        with suppress(ImportError):  # A recipe with an adapter is refused if peft is missing or broken.
            importlib.import_module("peft")


def _meter(request: TrialRequest) -> Any:
    import torch

    from trainfit.measurement.meter import CpuMeter, CudaMeter

    device, wants_cuda = request.device, request.device.startswith("cuda")
    if wants_cuda and torch.version.cuda is None and torch.version.hip is None:
        raise InputError("this torch is built for the CPU", "use device cpu", field="device", value=device)
    if device != "cpu":
        # The baseline is read before anything here makes a CUDA context.
        index = int(device.partition(":")[2] or 0)
        meter = CudaMeter(torch.device("cuda", index))
        if torch.cuda.is_available() and index < torch.cuda.device_count():
            return meter
    if wants_cuda:
        raise InputError("no such CUDA GPU in this machine", "use device cpu", field="device", value=device)
    recipe = request.recipe
    tracked = recipe.compile is False and recipe.hardware.count == 1
    return CpuMeter(torch.device("cpu"), tracked=tracked)


def _named(body: str) -> Body:
    module, _, function = body.partition(":")
    return getattr(importlib.import_module(module), function)


def measure_steps(request: TrialRequest, meter: Any, result: ResultFile, rank: Rank | None) -> None:
    """Build the step, measure its phases, and time it."""
    from trainfit.measurement.feed import measured_batches
    from trainfit.models.layers import num_weights
    from trainfit.step import assemble
    from trainfit.techniques import registry

    recipe = request.recipe
    registry.check(recipe)
    mesh = None if rank is None else rank.join(recipe, meter.device)
    registry.check_device(recipe, meter.device.type)
    result.update(message="ended while the model and optimizer were built")
    with ExitStack() as stack:
        with meter.watching():
            step = assemble(recipe, meter.device, mesh=mesh)
            after_init = meter.settle(step)
            parameters = list(step.model.parameters())
            result.update(
                params=num_weights(step.model),
                trainable_params=sum(p.numel() for p in parameters if p.requires_grad),
                peak_allocated_bytes=after_init,
            )
            untimed = max(request.warmup, MIN_UNTIMED)
            following = stack.enter_context(measured_batches(step, untimed + request.steps + 1))
            losses: list[float] = []
            memory: list[StepMemory] = []
            long: list[float] = []
            last_s = 0.0

            def with_phases() -> "torch.Tensor":
                loss, of_step = measured_step(step, following(), meter, result, len(losses) + 1)
                memory.append(of_step)
                return loss

            for number in range(untimed):
                if rank is not None:
                    rank.align(meter.device)
                begin = time.perf_counter()
                if rank is None and meter.reads_at_no_cost and last_s >= LONG_STEP_S:
                    long, more_losses = meter.times(with_phases, 1)
                    losses += more_losses
                else:
                    losses.append(with_phases().item())
                last_s = time.perf_counter() - begin
                if rank is None and number == 0:
                    result.update(first_step_s=last_s)
        if after_init is not None:
            result.update(**memory_fields(after_init, memory))
        result.update(losses=tuple(losses), message="ended while steps were timed")
        if rank is not None:
            rank.align(meter.device)
        # A first step that only compiled for long is followed by a short one.
        seconds = [one for one in long if one >= LONG_STEP_S][: request.steps]
        if not seconds or len(seconds) < request.steps:
            more, more_losses = meter.times(
                lambda: step(following()), request.steps - len(seconds), continues=bool(seconds)
            )
            seconds, losses = seconds + more, losses + more_losses
        result.update(losses=tuple(losses))
        note_end(recipe, meter, result, seconds)
        if rank is None:
            note_breakdown(recipe, meter, result, step, following(), step_s=last_s if long else 0.0)


def measured_step(
    step: Any, batches: Any, meter: Any, result: ResultFile, number: int
) -> tuple["torch.Tensor", StepMemory]:
    """Run one step; return its loss, and each phase's peak over its micro-batches.

    Args:
        number: of the step, from 1, for the message of a trial that ends in it.
    """
    peaks: dict[str, int] = dict.fromkeys(PHASES, 0)
    holders: dict[str, MemoryBreakdown | None] = {}
    running: list[str] = []

    def end_phase() -> None:
        taken = meter.take()
        if taken is None or not running:
            return
        if taken[0] > peaks[running[-1]]:
            peaks[running[-1]], holders[running[-1]] = taken
        _raise_peak(result, taken)

    def on_phase(phase: str) -> None:
        end_phase()
        running.append(phase)
        meter.enter_phase(phase)
        result.update(message=f"ended in step {number}, {phase}")

    loss = step(batches, on_phase=on_phase)
    end_phase()
    meter.after_step(step)
    return loss, (PhasePeaks(**peaks), holders.get(max(PHASES, key=lambda phase: peaks[phase])))


def _raise_peak(result: ResultFile, taken: tuple[int, Any] | None) -> None:
    """Note the peak reached so far; ``taken``: a reading of the meter."""
    if taken is not None:
        result.update(peak_allocated_bytes=max(result.measurement.peak_allocated_bytes or 0, taken[0]))


def memory_fields(after_init: int, measured_steps: list[StepMemory]) -> dict[str, Any]:
    """Return fields of the Measurement: phases of the first step, and the highest of the steady steps."""
    first, *later = [peaks for peaks, _ in measured_steps]
    steady = PhasePeaks(**{phase: max(getattr(peaks, phase) for peaks in later) for phase in PHASES})
    phases = Phases(after_init=after_init, first=first, steady=steady)
    _, breakdown = max(measured_steps, key=lambda item: item[0].peak)
    return {"phases": phases, "breakdown": breakdown, "peak_allocated_bytes": phases.peak}


def note_end(recipe: Recipe, meter: Any, result: ResultFile, seconds: list[float]) -> None:
    """Set the result's status, its totals and, unless the GPU was throttled, its times."""
    known: dict[str, Any] = {"status": "done", "message": ""}
    if result.measurement.phases is None:
        known["message"] = UNTRACKED if recipe.hardware.count == 1 else UNTRACKED_RANKS
    else:
        _raise_peak(result, meter.take())
        if recipe.compile and compiled_before():
            known["message"] = FROM_CACHE
    totals = meter.totals()
    environment = totals.get("environment", result.measurement.environment)
    if seconds and environment.held_back:
        known["message"] = joined(no_time(environment, median(seconds)), known["message"])
    elif seconds:
        times = Spread.of(seconds)
        rate = recipe.rank_tokens / times.median
        known |= {"step_times": times, "step_s": times.median, "tokens_per_s": rate}
    result.update(**known, **totals)


def no_time(environment: Environment, step_s: float) -> str:
    """Return why a measurement has no step time: the driver throttled the GPU during its steps."""
    clocks = environment.clocks_mhz
    at = f" to {clocks['sm']} of {clocks['sm_max']} MHz" if {"sm", "sm_max"} <= clocks.keys() else ""
    why = ", ".join(environment.held_back)
    return (
        f"no step time: the driver throttled the GPU{at} ({why}), and a step took {format_seconds(step_s)}; "
        "the memory figures are valid; measure again once the GPU is cool"
    )


def joined(*messages: str) -> str:
    """Return the messages that are not empty as one."""
    return "; ".join(message for message in messages if message)


def compiled_before() -> bool:
    """Return whether all compiled programs of this process come from the compiler's cache."""
    from torch._dynamo.utils import counters

    # A program that occurs twice counts as a miss, then as a hit of the cache that the first one filled.
    found = counters["inductor"]
    return found["fxgraph_cache_hit"] > 0 and not found["fxgraph_cache_miss"]


def note_breakdown(
    recipe: Recipe, meter: Any, result: ResultFile, step: Any, batches: Any, *, step_s: float = 0.0
) -> None:
    """Add the breakdown of the peak; running out of memory here costs only that.

    Args:
        step_s: of a step. It is not run once more for this if it takes ``LONG_STEP_S``.
    """
    from trainfit.measurement.meter import is_out_of_memory

    if result.measurement.breakdown is not None or recipe.compile:
        return
    if step_s >= LONG_STEP_S:
        lacking = f"no breakdown: the extra step for it would take {format_seconds(step_s)}"
        result.update(message=joined(result.measurement.message, lacking))
        return
    try:
        result.update(breakdown=meter.breakdown(step, batches))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        lacking = "no breakdown: the extra step for it ran out of memory"
        result.update(message=joined(result.measurement.message, lacking))
