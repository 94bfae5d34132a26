"""Request and result of one part of a trial (predict, measure or train), run in its own process.

A part always has a PartResult: out of memory, a crash, a time limit
and a signal are outcomes. Nothing here imports torch; the process that it starts does.
"""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainfit.measurement.environment import host_environment
from trainfit.measurement.process import (
    LOG,
    TRIAL,
    Ending,
    TrialStorageError,
    last_lines,
    run_and_tell,
    run_to_end,
)
from trainfit.measurement.run import with_utilisation
from trainfit.measurement.trial import ERROR, REQUEST, RESULT, TrialRequest
from trainfit.spec.errors import InputError
from trainfit.spec.files import one_line, storage_failure, write_text
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Measurement, Outcome
from trainfit.spec.sweep import MeasurePart, Part, TrainPart
from trainfit.spec.value import Bytes, Value, canonical_json, parse

PART_TRIAL = "trainfit.sweeps.trial"
"""The module that predicts or trains in a process of its own."""
MAX_OUTPUT_CHARS = 20_000

Starter = Callable[[Path, str], int]
"""Starts the process of a folder, which a module runs, in a group of its own; its process id."""


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
    shared: bool = False
    """Other processes use the device: neither times nor device memory are kept."""
    model_flops: float | None = None
    hardware_flops: float | None = None
    gpu_peak_flops_per_s: float | None = None
    """The dense peak of the recipe's GPU; it does not count where the trial runs on a CPU."""
    own_peak_flops_per_s: float | None = None
    """The user's own figure (``--peak-flops``)."""
    planned: Recipe | None = None
    """The recipe with its open fields planned by the prediction; measured and trained in its place."""

    @property
    def built(self) -> Recipe:
        """Return the recipe that a step is built from."""
        return self.planned or self.recipe

    def peak_flops_per_s(self, on_cuda: bool) -> float | None:
        """Peak of which MFU and HFU are shares."""
        return self.own_peak_flops_per_s or (self.gpu_peak_flops_per_s if on_cuda else None)

    @property
    def id(self) -> str:
        """Hash of what decides the result.

        Names, the time limit and the FLOPs for utilisation are left out.
        """
        how: dict[str, Any] = {"part": self.part, "recipe": self.recipe.id}
        settings = {"measure": self.measure, "train": self.train}.get(self.part)
        if settings is not None:
            limit = self.memory_limit_bytes
            plan = {"planned": self.planned.id} if self.planned else {}
            plan |= {"shared": True} if self.shared else {}
            how |= plan | {
                "settings": settings.model_dump(mode="json"),
                "device": self.device,
                "limit": limit,
            }
        return hashlib.sha256(canonical_json(how).encode()).hexdigest()[:16]


class PartResult(Value):
    """Result of a part. ``output``: the end of the process's output, where it did not finish."""

    outcome: Outcome
    estimate: Estimate | None = None
    measurement: Measurement | None = None
    train: dict[str, Any] | None = None
    planned: Recipe | None = None
    output: str = ""
    storage_error: str = ""
    """Why the disk refused a file of the part; nothing is recorded then."""


class Finding(Value):
    """Status and, if there is one, result that the process itself leaves."""

    status: str
    message: str = ""
    estimate: Estimate | None = None
    train: dict[str, Any] | None = None
    planned: Recipe | None = None


def run_part(request: PartRequest, start: Starter) -> PartResult:
    """Run one part in a process of its own and wait for its end."""
    began_s = time.monotonic()
    try:
        return _run_part(request, start, began_s)
    except OSError as error:
        failure = storage_failure(error)
        if failure is None and not isinstance(error, TrialStorageError):
            raise
        why = one_line(failure or error)
        return ended(request, "lost", why, time.monotonic() - began_s, storage_error=why)


def _run_part(request: PartRequest, start: Starter, began_s: float) -> PartResult:
    with tempfile.TemporaryDirectory(prefix="trainfit-sweep-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            run = _measure if request.part == "measure" else _find
            status, message, found = run(request, folder, start)
        except InputError as error:
            status, message, found = "refused", str(error), {}
        output = "" if status in ("done", "refused") else _output(folder)
    return ended(request, status, message, time.monotonic() - began_s, output=output, **found)


def ended(
    request: PartRequest, status: Any, message: str = "", seconds: float = 0.0, **found: Any
) -> PartResult:
    """A result of ``request`` that ended as ``status`` says."""
    outcome = Outcome(status=status, message=message.strip(), seconds=seconds, request_id=request.id)
    return PartResult(outcome=outcome, **found)


def _measure(request: PartRequest, folder: Path, start: Starter) -> tuple[str, str, dict[str, Any]]:
    assert request.measure is not None, "a measuring part says how many steps"
    trial = TrialRequest(
        recipe=request.built, steps=0 if request.shared else request.measure.steps,
        warmup=request.measure.warmup, device=request.device,
        memory_limit_bytes=request.memory_limit_bytes, environment=host_environment(request.device),
    )  # fmt: skip
    measured, ending = run_and_tell(folder, trial, lambda place: start(place, TRIAL), request.timeout_s)
    on_cuda = measured.environment.cuda is not None
    peak = request.peak_flops_per_s(on_cuda)
    measured = with_utilisation(measured, request.model_flops, request.hardware_flops, peak)
    if request.shared:
        measured = measured.model_copy(update={"peak_device_bytes": None})
    status = "killed" if measured.status == "crashed" and ending.killed else measured.status
    return status, measured.message, {"measurement": measured}


def _find(request: PartRequest, folder: Path, start: Starter) -> tuple[str, str, dict[str, Any]]:
    write_text(folder / REQUEST, request.model_dump_json())
    ending = run_to_end(folder, lambda place: start(place, PART_TRIAL), request.timeout_s)
    if (folder / ERROR).is_file():
        raise InputError(**json.loads((folder / ERROR).read_text()))
    if (folder / RESULT).is_file():
        found = parse(Finding, json.loads((folder / RESULT).read_text()))
        results = {"estimate": found.estimate, "train": found.train, "planned": found.planned}
        return found.status, found.message, results
    status, why = _why(request, ending)
    return status, f"{why}: {last_lines(folder)}".rstrip(": "), {}


def _why(request: PartRequest, ending: Ending) -> tuple[str, str]:
    """Outcome of a process that left no result."""
    if ending.timed_out:
        return "timeout", f"ended after {request.timeout_s:g} s"
    if ending.system_out_of_memory and ending.signal is not None:
        return host_out_of_memory(request.part), f"killed by {ending.words} as the system ran out of memory"
    return ("killed" if ending.killed else "crashed"), f"ended with {ending.words}"


def host_out_of_memory(part: Part) -> str:
    """The status where the host ran out of memory: of a prediction that says nothing about the recipe."""
    return "crashed" if part == "predict" else "out-of-memory"


def _output(folder: Path) -> str:
    log = folder / LOG
    return log.read_text(errors="replace")[-MAX_OUTPUT_CHARS:] if log.is_file() else ""


def limit_bytes(gib: float | None) -> Bytes | None:
    """A limit in bytes; GiB is 2**30."""
    return None if gib is None else round(gib * 2**30)
