"""Run a sweep: predict, measure and train every variant, as its file requests and as far as is missing.

Stages follow one another, so that predictions on the CPU do not slow down what is being measured.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from trainfit.spec.errors import InputError
from trainfit.spec.files import StorageError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Record
from trainfit.spec.sweep import RESULTS, WAITING, Part, Row, Variant
from trainfit.spec.units import GIB
from trainfit.sweeps.journal import Journal
from trainfit.sweeps.parts import OnStart, PartRequest, PartResult, Stop, ended
from trainfit.sweeps.read import Sweep, training_of
from trainfit.sweeps.rows import refused_before_it_ran, row_of
from trainfit.techniques import registry

GO_ON = "the same command goes on once the disk takes it"
NEEDED_BEFORE: dict[Part, Part] = {"train": "measure"}
"""A variant is not trained if its measurement did not finish: the training would end alike."""


class Executor(Protocol):
    """Where trials run: this machine (local.py), or a Ray cluster (ray_cluster.py)."""

    def run(
        self, requests: Sequence[PartRequest], *, stop: Stop, on_start: OnStart
    ) -> Iterator[tuple[PartRequest, PartResult]]: ...


class Run:
    """The state of a running sweep: ``rows`` is current at any time; ``changed`` is called at each change."""

    def __init__(
        self,
        sweep: Sweep,
        journal: Journal,
        *,
        device: str | None = None,
        peak_flops: float | None = None,
        retry: bool = False,
        again: bool = False,
        shared: bool = False,
        deadline_s: float = math.inf,
        changed: Callable[["Run", PartRequest, Record | None], None] = lambda run, request, record: None,
    ):
        self.sweep = sweep
        self._journal, self._retry, self._again, self._changed = journal, retry, again, changed
        self._device = device or sweep.file.device
        self._peak_flops, self._shared, self._deadline_s = peak_flops, shared, deadline_s
        self._records: dict[tuple[str, Part], Record] = {}
        self._running: set[tuple[str, Part]] = set()
        self._refused: set[str] = set()
        self.num_kept = 0  # Parts that were done before
        self.stopped = False

    def go(self, executor: Executor, stop: Stop) -> None:
        """Run what has no result yet; ``stop`` ends it early and drops the running trials.

        Raises:
            StorageError: the disk did not take a record or a trial's file; recorded results stay.
        """
        for variant in self.sweep.variants:
            self._refuse(variant)
        for part in self.sweep.file.parts():
            wanted = [
                self._request(variant, part)
                for variant in self.sweep.variants
                if variant.name not in self._refused and not self._pointless(variant, part)
            ]
            requests = [request for request in wanted if not self._kept(request)]
            for request, result in executor.run(requests, stop=stop, on_start=self._start):
                if result.storage_error:
                    raise StorageError(OSError(result.storage_error), GO_ON)
                self._note(request, result)
            self._running.clear()
            if stop() or time.monotonic() > self._deadline_s:
                self.stopped = any(row.status == WAITING for row in self.rows())
                return

    def rows(self) -> tuple[Row, ...]:
        """Return a row a variant, in the file's order."""
        return tuple(self._row(variant) for variant in self.sweep.variants)

    def row(self, request: PartRequest) -> Row:
        """Return the row of the request's variant."""
        return self._row(Variant(name=request.variant, recipe=request.recipe))

    def _refuse(self, variant: Variant) -> None:
        """Record a recipe that no step can be made of anywhere; no process is started for it."""
        try:  # What its open fields can be is found when they are planned.
            registry.check(variant.recipe.without_open_fields())
        except InputError as error:
            self._refused.add(variant.name)
            request = self._request(variant, self.sweep.file.parts()[0])
            if not self._kept(request):
                self._note(request, ended(request, "refused", str(error)))

    def _request(self, variant: Variant, part: Part) -> PartRequest:
        file = self.sweep.file
        predicted = self._records.get((variant.name, "predict"))
        estimate = predicted.estimate if predicted else None
        planned = predicted.planned if predicted and part != "predict" else None
        memory_gib = file.limits.memory_gib
        return PartRequest(
            part=part, variant=variant.name, recipe=variant.recipe, device=self._device,
            planned=parse(Recipe, planned) if planned else None,
            timeout_s=file.limits.seconds,
            memory_limit_bytes=None if memory_gib is None else round(memory_gib * GIB),
            measure=file.measure if part == "measure" else None,
            train=training_of(file.train, variant.recipe) if part == "train" and file.train else None,
            shared=self._shared and part == "measure",
            model_flops=estimate and estimate.model_flops,
            hardware_flops=estimate and estimate.hardware_flops,
            gpu_peak_flops_per_s=estimate and dense_peak(estimate), own_peak_flops_per_s=self._peak_flops,
        )  # fmt: skip

    def _kept(self, request: PartRequest) -> bool:
        """Return whether the journal has a result of the request, and use it."""
        record = None if self._again else self._journal.found(request)
        if record is None or record.outcome is None:
            return False
        held_back = record.measurement is not None and bool(record.measurement.environment.held_back)
        if self._retry and (record.outcome.status not in RESULTS or held_back):
            return False
        if refused_before_it_ran(record.outcome) and request.variant not in self._refused:
            return False  # What was missing then is there now.
        self._records[request.variant, request.part] = record
        self.num_kept += 1
        return True

    def _pointless(self, variant: Variant, part: Part) -> bool:
        if part != "predict" and variant.recipe.has_open_fields:
            predicted = self._records.get((variant.name, "predict"))
            if predicted is None or predicted.planned is None:
                return True
        needed = NEEDED_BEFORE.get(part)
        before = self._records.get((variant.name, needed)) if needed else None
        return before is not None and before.outcome is not None and before.outcome.status != "done"

    def _start(self, request: PartRequest) -> None:
        self._running.add((request.variant, request.part))
        self._changed(self, request, None)

    def _note(self, request: PartRequest, result: PartResult) -> None:
        key = (request.variant, request.part)
        self._records[key] = record = self._journal.append(request, result)
        self._running.discard(key)
        self._changed(self, request, record)

    def _row(self, variant: Variant) -> Row:
        parts = self.sweep.file.parts()
        records: dict[Part, Record] = {
            part: found for part in parts if (found := self._records.get((variant.name, part)))
        }
        running: Part | None = next((part for part in parts if (variant.name, part) in self._running), None)
        return row_of(variant, self.sweep.file, records, running=running)


def dense_peak(estimate: Estimate) -> float | None:
    """Return the GPU's dense peak in FLOP/s that the estimate's MFU refers to; None: not known."""
    if not estimate.mfu or not estimate.step_s:
        return None
    return estimate.model_flops / (estimate.mfu * estimate.step_s)
