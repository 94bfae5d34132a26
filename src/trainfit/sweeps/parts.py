"""Request and result of one part of a trial (predict, measure or train), run in its own process.

A part always has a PartResult: out of memory, a crash, a time limit and a signal are outcomes. Nothing here
imports torch; the process that it starts does.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainfit.measurement.environment import host_environment
from trainfit.measurement.process import LOG, TRIAL, TrialStorageError, last_lines, run_in, run_to_end
from trainfit.measurement.run import with_utilisation
from trainfit.measurement.trial_files import ERROR, REQUEST, RESULT, TrialRequest
from trainfit.rl.estimate.names import body_of
from trainfit.spec.errors import InputError
from trainfit.spec.files import one_line, storage_failure, write_text
from trainfit.spec.parsing.parse import parse
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Measurement, Outcome
from trainfit.spec.sweep import MeasurePart, Part, TrainPart
from trainfit.spec.value import Value, short_hash

PART_TRIAL = "trainfit.sweeps.trial"  # The module that predicts or trains in a process of its own
MAX_OUTPUT_CHARS = 20_000

Starter = Callable[[Path, str], int]
"""Starts the process of a folder, which a module runs, in a group of its own; returns its process id."""


class PartRequest(Value):
    """The task of one process of a sweep."""

    part: Part
    variant: str
    recipe: Recipe
    device: str
    timeout_s: float
    memory_limit_bytes: int | None = None
    measure: MeasurePart | None = None
    train: TrainPart | None = None
    shared: bool = False  # Other processes use the device: neither times nor device memory are kept
    model_flops: float | None = None
    hardware_flops: float | None = None
    gpu_peak_flops_per_s: float | None = None
    """The dense peak of the recipe's GPU; not used where the trial runs on a CPU."""
    own_peak_flops_per_s: float | None = None  # The user's --peak-flops
    planned: Recipe | None = None
    """The recipe with its open fields planned by the prediction; measured and trained in its place."""

    @property
    def built(self) -> Recipe:
        """The recipe that a step is assembled from."""
        return self.planned or self.recipe

    @property
    def num_gpus(self) -> int:
        """GPUs that the trial takes where there are some: those of the recipe; a prediction takes none."""
        return 0 if self.part == "predict" else self.built.hardware.count

    def peak_flops_per_s(self, on_cuda: bool) -> float | None:
        """Return the peak that MFU and HFU refer to."""
        return self.own_peak_flops_per_s or (self.gpu_peak_flops_per_s if on_cuda else None)

    @property
    def id(self) -> str:
        """Hash of what decides the result, without names, the time limit and the FLOPs for utilisation."""
        return self.id_with({})

    def id_with(self, ids: Mapping[str, str]) -> str:
        """Return the request's id in older records; ``ids``: a recipe's id of today -> its id there."""
        how: dict[str, Any] = {"part": self.part, "recipe": ids.get(self.recipe.id, self.recipe.id)}
        settings = {"measure": self.measure, "train": self.train}.get(self.part)
        if settings is not None:
            how |= {"planned": ids.get(self.planned.id, self.planned.id)} if self.planned else {}
            how |= {"shared": True} if self.shared else {}
            how |= {"settings": settings.model_dump(mode="json"), "device": self.device}
            how |= {"limit": self.memory_limit_bytes}
        return short_hash(how)


class PartResult(Value):
    """Outcome and result of a part."""

    outcome: Outcome
    estimate: Estimate | None = None
    measurement: Measurement | None = None
    train: dict[str, Any] | None = None
    planned: Recipe | None = None
    output: str = ""  # The end of what the process printed, if it failed
    storage_error: str = ""  # Why the disk refused a file of the part; nothing is recorded then


Stop = Callable[[], bool]
OnStart = Callable[[PartRequest], None]


def ended(
    request: PartRequest, status: Any, message: str = "", seconds: float = 0.0, **found: Any
) -> PartResult:
    """Return a result of ``request`` with this outcome."""
    outcome = Outcome(status=status, message=message.strip(), seconds=seconds, request_id=request.id)
    return PartResult(outcome=outcome, **found)


def too_few_gpus(
    requests: Sequence[PartRequest], num_gpus: int, where: str
) -> list[tuple[PartRequest, PartResult]]:
    """Return the requests for more than ``num_gpus`` GPUs, refused; none where there is no GPU.

    Args:
        where: begins the sentence that says how many there are, such as ``this machine shows``.
    """
    found: list[tuple[PartRequest, PartResult]] = []
    for request in requests:
        if num_gpus and request.num_gpus > num_gpus:
            problem = f"{where} {num_gpus} GPU{'s' * (num_gpus > 1)}"
            remedy = f"use a machine with {request.num_gpus}, or at most {num_gpus}"
            error = InputError(problem, remedy, field="hardware.count", value=request.num_gpus)
            found.append((request, ended(request, "refused", str(error))))
    return found


def largest_first(
    requests: Sequence[PartRequest], refused: Sequence[tuple[PartRequest, PartResult]]
) -> list[PartRequest]:
    """Return the requests that are not refused, those for the most GPUs first, else in their order."""
    without = {id(request) for request, _ in refused}
    kept = [request for request in requests if id(request) not in without]
    return sorted(kept, key=lambda one: -one.num_gpus)


def run_part(request: PartRequest, start: Starter) -> PartResult:
    """Run one part in a process of its own and wait for its end."""
    began_s = time.monotonic()
    try:
        result = _run_part(request, start)
    except InputError as error:
        result = ended(request, "refused", str(error))
    except OSError as error:
        failure = storage_failure(error)
        if failure is None and not isinstance(error, TrialStorageError):
            raise
        why = one_line(failure or error)
        result = ended(request, "lost", why, storage_error=why)
    outcome = result.outcome.model_copy(update={"seconds": time.monotonic() - began_s})
    return result.model_copy(update={"outcome": outcome})


def _run_part(request: PartRequest, start: Starter) -> PartResult:
    with tempfile.TemporaryDirectory(prefix="trainfit-sweep-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        result = (_measure if request.part == "measure" else _find)(request, folder, start)
        if result.outcome.status == "done" or not (log := folder / LOG).is_file():
            return result
        return result.model_copy(update={"output": log.read_text(errors="replace")[-MAX_OUTPUT_CHARS:]})


def _measure(request: PartRequest, folder: Path, start: Starter) -> PartResult:
    assert request.measure is not None, "a measuring part has its number of steps"
    trial = TrialRequest(
        recipe=request.built, steps=0 if request.shared else request.measure.steps,
        warmup=request.measure.warmup, device=request.device,
        memory_limit_bytes=request.memory_limit_bytes, environment=host_environment(request.device),
        body=body_of(request.built),
    )  # fmt: skip
    measured, ending = run_in(folder, trial, lambda place: start(place, TRIAL), request.timeout_s)
    peak = request.peak_flops_per_s(measured.environment.cuda is not None)
    measured = with_utilisation(measured, request.model_flops, request.hardware_flops, peak)
    if request.shared:
        measured = measured.model_copy(update={"peak_device_bytes": None})
    status = "killed" if measured.status == "crashed" and ending.killed else measured.status
    return ended(request, status, measured.message, measurement=measured)


def _find(request: PartRequest, folder: Path, start: Starter) -> PartResult:
    """Predict or train."""
    write_text(folder / REQUEST, request.model_dump_json())
    ending = run_to_end(folder, lambda place: start(place, PART_TRIAL), request.timeout_s)
    if (folder / ERROR).is_file():
        raise InputError(**json.loads((folder / ERROR).read_text()))
    if (folder / RESULT).is_file():
        return parse(PartResult, json.loads((folder / RESULT).read_text()))
    if ending.timed_out:
        status, why = "timeout", f"ended after {request.timeout_s:g} s"
    elif ending.system_out_of_memory and ending.signal is not None:
        status = host_out_of_memory(request.part)
        why = f"killed by {ending.words} as the system ran out of memory"
    else:
        status, why = ("killed" if ending.killed else "crashed"), f"ended with {ending.words}"
    return ended(request, status, f"{why}: {last_lines(folder)}".rstrip(": "))


def host_out_of_memory(part: Part) -> str:
    """Return the status where the host ran out of memory; a prediction's says nothing about the recipe."""
    return "crashed" if part == "predict" else "out-of-memory"
