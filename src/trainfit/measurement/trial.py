"""Run one trial of a measurement in its own process: ``python -m trainfit.measurement.trial FOLDER``.

The task is read from FOLDER/request.json. FOLDER/result.json is always a valid Measurement: until the
trial ends its status is "crashed" and its message names the last stage reached, so a killed process keeps its
results. Bad input goes to FOLDER/error.json.

Order: build; warm-up steps that read the memory at each phase's start (the first step, then steady steps);
timed steps without any instrumentation; on CUDA one more step for the breakdown of the peak.
"""

import importlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from trainfit.measurement.environment import host_environment
from trainfit.spec.errors import EXIT_BAD_INPUT, EXIT_IO, InputError
from trainfit.spec.files import one_line, storage_failure, write_text
from trainfit.spec.printable import say
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import PHASES, Environment, Measurement, MemoryBreakdown, PhasePeaks, Phases, Spread
from trainfit.spec.value import Count, Value, parse

REQUEST, RESULT, ERROR = "request.json", "result.json", "error.json"
MIN_UNTIMED = 2
"""The first step, and one steady step whose phases are measured."""


class TrialRequest(Value):
    """The task of a trial."""

    recipe: Recipe
    steps: Count
    warmup: Count
    device: str
    memory_limit_bytes: Annotated[int, Field(gt=0)] | None = None
    environment: Environment | None = None
    """The host's environment, if the caller has read it."""


class ResultFile:
    """The trial's result file. It is replaced atomically, so a reader never sees part of it."""

    def __init__(self, path: Path, measurement: Measurement):
        self._path = path
        self.measurement = measurement
        self.update()

    def update(self, **known: Any) -> None:
        """Set fields of the Measurement and write the file."""
        self.measurement = self.measurement.model_copy(update=known)
        draft = self._path.with_suffix(".tmp")
        write_text(draft, self.measurement.model_dump_json())
        os.replace(draft, self._path)


def main(folder: Path) -> int:
    """Run the trial of ``folder`` and return the exit code."""
    return ended_by_storage(lambda: _run(folder))


def _run(folder: Path) -> int:
    request = parse(TrialRequest, json.loads((folder / REQUEST).read_text()))
    host = request.environment or host_environment(request.device)
    start = Measurement(
        recipe_id=request.recipe.id,
        status="crashed",
        message="ended before the model was built",
        environment=host,
    )
    result = ResultFile(folder / RESULT, start)
    try:
        run_trial(request, result)
    except InputError as error:
        fields = {name: getattr(error, name) for name in ("problem", "remedy", "field", "file")}
        write_text(folder / ERROR, json.dumps(fields | {"value": error.value}, default=repr))
        return EXIT_BAD_INPUT
    return 0


def ended_by_storage(run: Callable[[], int]) -> int:
    """Return ``run``'s exit code, or 74 and one line on standard error if a file cannot be written.

    A storage failure is not a result of the recipe: the command that started the trial ends with it too.
    """
    try:
        return run()
    except Exception as error:
        failure = storage_failure(error)
        if failure is None:
            raise
        say(one_line(OSError(failure.errno, failure.strerror, failure.filename)), err=True)
        return EXIT_IO


def run_trial(request: TrialRequest, result: ResultFile) -> None:
    """Measure in this process and update ``result`` after each stage. Out of memory ends it with that status.

    Raises:
        InputError: the recipe asks for what this machine or this version does not have.
    """
    from trainfit.measurement.meter import is_out_of_memory

    meter = _meter(request)
    environment = meter.environment(result.measurement.environment)
    result.update(environment=environment, device_bytes=environment.device_bytes)
    if request.memory_limit_bytes is not None:
        import_for_steps()  # On a CPU a module imported under the limit would count.
        meter.limit(request.memory_limit_bytes)
    try:
        _steps(request, meter, result)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        so_far = result.measurement
        last = meter.take()
        reached = max(so_far.peak_allocated_bytes or 0, last[0]) if last else so_far.peak_allocated_bytes
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else "no memory left"  # Python's own MemoryError has no message.
        message = f"{so_far.message.replace('ended', 'out of memory')}: {reason}"
        totals = meter.totals() | {"peak_allocated_bytes": reached}
        result.update(status="out-of-memory", message=message, **totals)


def import_for_steps() -> None:
    """Import the modules that a first model and its first steps need: transformers and every technique."""
    from trainfit.techniques.registry import techniques

    for module in (
        "trainfit.measurement.meter",
        "trainfit.models.hf",
        "transformers.models.llama.modeling_llama",
    ):
        importlib.import_module(module)
    techniques()
    with suppress(
        ImportError
    ):  # Adapters need it; a recipe with one is refused where it is missing or broken.
        importlib.import_module("peft")


def _meter(request: TrialRequest) -> Any:
    import torch

    from trainfit.measurement.meter import CpuMeter, CudaMeter

    if request.recipe.hardware.count != 1:
        raise InputError(
            "one device is measured at a time", "set hardware.count=1 and parallel to 1",
            field="hardware.count", value=request.recipe.hardware.count,
        )  # fmt: skip
    wants_cuda = request.device.startswith("cuda")
    if wants_cuda and torch.version.cuda is None and torch.version.hip is None:
        raise InputError(
            "this torch is built for the CPU", "use device cpu", field="device", value=request.device
        )
    if request.device == "cpu":
        return CpuMeter(torch.device("cpu"), tracked=request.recipe.compile is False)
    # The baseline is read before anything here makes a CUDA context.
    index = int(request.device.partition(":")[2] or 0)
    meter = CudaMeter(torch.device("cuda", index))
    if torch.cuda.is_available() and index < torch.cuda.device_count():
        return meter
    if wants_cuda:
        raise InputError(
            "no such CUDA GPU in this machine", "use device cpu", field="device", value=request.device
        )
    return CpuMeter(torch.device("cpu"), tracked=request.recipe.compile is False)


def _steps(request: TrialRequest, meter: Any, result: ResultFile) -> None:
    from trainfit.measurement.feeding import feeding
    from trainfit.models.layers import num_quantized
    from trainfit.step import assemble
    from trainfit.techniques import registry

    recipe = request.recipe
    registry.check(recipe)
    registry.check_device(recipe, meter.device.type)
    result.update(message="ended while the model and optimizer were built")
    with ExitStack() as stack:
        with meter.watching():
            step = assemble(recipe, meter.device)
            after_init = meter.settle(step)
            parameters = list(step.model.parameters())
            result.update(
                params=sum(p.numel() for p in parameters) + num_quantized(step.model),
                trainable_params=sum(p.numel() for p in parameters if p.requires_grad),
                peak_allocated_bytes=after_init,
            )
            untimed = _num_untimed(request)
            following = stack.enter_context(feeding(step, untimed + request.steps + 1))
            measured_steps = [
                _measured_step(step, following(), meter, result, index) for index in range(untimed)
            ]
        if after_init is not None:
            result.update(**_memory(after_init, measured_steps))
        losses = [loss for _, _, loss in measured_steps]
        result.update(losses=tuple(losses), message="ended while steps were timed")
        seconds, more_losses = meter.times(lambda: step(following()), request.steps)
        _note_end(recipe, meter, result, seconds, losses + more_losses)
        _note_breakdown(recipe, meter, result, step, following())


def _num_untimed(request: TrialRequest) -> int:
    return max(request.warmup, MIN_UNTIMED)


def _measured_step(
    step: Any, batches: Any, meter: Any, result: ResultFile, index: int
) -> tuple[PhasePeaks, MemoryBreakdown | None, float]:
    """Run one step; return each phase's peak over its micro-batches, the peak's breakdown, and the loss."""
    peaks: dict[str, int] = dict.fromkeys(PHASES, 0)
    holders: dict[str, MemoryBreakdown | None] = {}
    running: list[str] = []

    def end_phase() -> None:
        taken = meter.take()
        if taken is None or not running:
            return
        if taken[0] > peaks[running[-1]]:
            peaks[running[-1]], holders[running[-1]] = taken
        reached = max(result.measurement.peak_allocated_bytes or 0, taken[0])
        result.update(peak_allocated_bytes=reached)

    def on_phase(phase: str) -> None:
        end_phase()
        running.append(phase)
        meter.enter_phase(phase)
        result.update(message=f"ended in step {index + 1}, {phase}")

    loss = step(batches, on_phase=on_phase)
    end_phase()
    meter.after_step(step)
    highest = max(peaks, key=lambda phase: peaks[phase])
    return PhasePeaks(**peaks), holders.get(highest), loss.item()


def _memory(
    after_init: int, measured_steps: list[tuple[PhasePeaks, MemoryBreakdown | None, float]]
) -> dict[str, Any]:
    """Return fields of the Measurement: phases of the first step, and the highest of the steady steps."""
    peaks = [step_peaks for step_peaks, _, _ in measured_steps]
    steady = PhasePeaks(
        **{phase: max(getattr(step_peaks, phase) for step_peaks in peaks[1:]) for phase in PHASES}
    )
    phases = Phases(after_init=after_init, first=peaks[0], steady=steady)
    highest = max(measured_steps, key=lambda item: item[0].peak)
    return {"phases": phases, "breakdown": highest[1], "peak_allocated_bytes": phases.peak}


def _note_end(
    recipe: Recipe, meter: Any, result: ResultFile, seconds: list[float], losses: list[float]
) -> None:
    so_far = result.measurement
    last = meter.take() if so_far.phases is not None else None
    known: dict[str, Any] = {"status": "done", "message": "", "losses": tuple(losses)} | meter.totals()
    if last is not None:
        known["peak_allocated_bytes"] = max(so_far.peak_allocated_bytes or 0, last[0])
    if seconds:
        times = Spread.of(seconds)
        known |= {
            "step_times": times,
            "step_s": times.median,
            "tokens_per_s": recipe.batch.tokens / times.median,
        }
    if so_far.phases is None:
        known["message"] = (
            "memory not measured: live tensors cannot be followed through compiled code on a CPU"
        )
    elif recipe.compile and compiled_before():
        known["message"] = (
            "an earlier process compiled it: nothing was tuned, which lowers the first step's peak"
        )
    result.update(**known)


def compiled_before() -> bool:
    """Return whether all compiled programs of this process come from the compiler's cache."""
    from torch._dynamo.utils import counters

    # A program that occurs twice is found there too, once it is compiled: that is a hit and a miss.
    found = counters["inductor"]
    return found["fxgraph_cache_hit"] > 0 and not found["fxgraph_cache_miss"]


def _note_breakdown(recipe: Recipe, meter: Any, result: ResultFile, step: Any, batches: Any) -> None:
    """Add the breakdown of the peak; running out of memory here costs only that."""
    from trainfit.measurement.meter import is_out_of_memory

    if result.measurement.breakdown is not None or recipe.compile:
        return
    try:
        result.update(breakdown=meter.breakdown(step, batches))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        result.update(message="no breakdown: the extra step for it ran out of memory")
