"""The process of a sweep's prediction or training run: ``main(folder)``.

Reads FOLDER/request.json; writes a PartResult to FOLDER/result.json, or bad input to FOLDER/error.json.
(A measurement's process is ``trainfit.measurement.run``.)
"""

import json
import os
from pathlib import Path
from typing import Any

from trainfit.measurement.environment import runs_on_cuda
from trainfit.measurement.trial_files import REQUEST, RESULT, ended_by_storage, refused
from trainfit.spec.errors import InputError
from trainfit.spec.files import write_text
from trainfit.spec.parsing.parse import parse
from trainfit.spec.sweep import LATE_FROM_STEP
from trainfit.sweeps.parts import PartRequest, PartResult, ended
from trainfit.sweeps.read import options_of
from trainfit.training.observer import Observer, RolloutMetrics, StepFlops, StepMetrics


def main(folder: Path) -> int:
    """Run the part of ``folder`` and return the exit code."""
    return ended_by_storage(lambda: _run(folder))


def _run(folder: Path) -> int:
    request = parse(PartRequest, json.loads((folder / REQUEST).read_text()))
    try:
        found = _predict(request) if request.part == "predict" else _train(request, folder)
    except InputError as error:
        from trainfit.measurement.meter import is_out_of_memory

        if error.__cause__ is not None and is_out_of_memory(error.__cause__):
            found = ended(request, "out-of-memory", error.problem)
        else:
            return refused(folder, error)
    draft = folder / f"{RESULT}.tmp"
    write_text(draft, found.model_dump_json())
    os.replace(draft, folder / RESULT)
    return 0


def _predict(request: PartRequest) -> PartResult:
    # Autograd's engine would make a CUDA context, half a GiB, on the card that is being measured.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from trainfit.rl.estimate.estimate import predict

    if not request.recipe.has_open_fields:
        return ended(request, "done", estimate=predict(request.recipe))
    recipe, notes = request.recipe, ()
    if recipe.attention == "best":
        from trainfit.planning.attention import choose

        recipe, note = choose(recipe, device_type="cpu" if request.device == "cpu" else "cuda")
        notes = (note,)
    from trainfit.planning.recompute import resolve

    recipe = resolve(recipe)
    estimate = predict(recipe)  # What a budget's plan was traced for is kept.
    estimate = estimate.model_copy(update={"assumptions": (*estimate.assumptions, *notes)})
    return ended(request, "done", estimate=estimate, planned=recipe)


def _train(request: PartRequest, folder: Path) -> PartResult:
    from trainfit.rl.loop import rollouts_of
    from trainfit.training.loop import train

    assert request.train is not None, "a training part has its number of steps"
    flops = _flops(request)
    _limit(request)  # Of the steps: what counting took is there already.
    options = options_of(request.train, request.built, out=str(folder / "run"), device=request.device)
    batch = request.recipe.batch
    # Speed's other methods do nothing.
    speed = Speed(batch.micro * batch.accumulate)  # pyright: ignore[reportAbstractUsage]
    rollouts = rollouts_of(request.built)
    summary = train(request.built, options, flops=flops, observers=[speed], rollouts=rollouts)
    status = "killed" if summary.status == "stopped" else summary.status
    content = summary.content()
    content["run"]["out"] = "run"  # The trial's folder is removed.
    content["speed"] = speed.content()
    if rollouts is not None:
        content["rollouts"] = [one.model_dump(mode="json") for one in speed.rollouts]
    return ended(request, status, summary.message, train=content)


def _flops(request: PartRequest) -> StepFlops | None:
    """Return the FLOPs of a training step, for the kernels that it runs; None: it was not predicted."""
    if request.model_flops is None or request.hardware_flops is None:
        return None
    model_flops, hardware_flops = request.model_flops, request.hardware_flops
    if request.train is not None and request.train.deterministic:
        from trainfit.prediction.predict import predict

        # The prediction's own part is of the kernels that ``measure`` runs.
        estimate = predict(request.built, deterministic=True)
        model_flops, hardware_flops = estimate.model_flops, estimate.hardware_flops
    peak = request.peak_flops_per_s(runs_on_cuda(request.device))
    return StepFlops(model_flops=model_flops, hardware_flops=hardware_flops, peak_flops_per_s=peak)


def _limit(request: PartRequest) -> None:
    if request.memory_limit_bytes is None:
        return
    import torch

    from trainfit.measurement.meter import CpuMeter, CudaMeter

    on_cuda = runs_on_cuda(request.device)
    meter = CudaMeter(torch.device("cuda", 0)) if on_cuda else CpuMeter(torch.device("cpu"), False)
    meter.limit(request.memory_limit_bytes)


class Speed(Observer):
    """Samples a second of a run, overall and after the first steps; without evaluation.

    Data loading counts, and so do a policy's rollouts, with their rewards and log-probabilities.
    """

    def __init__(self, samples_per_step: int):
        self._samples = samples_per_step
        self._seconds: list[float] = []
        self._before_s = 0.0  # Of a rollout, before the step that begins to train on it
        self.rollouts: list[RolloutMetrics] = []

    def content(self) -> dict[str, Any]:
        """Return ``samples_per_s``, ``late_samples_per_s`` (None if the run is too short) and ``step_s``."""
        late = self._seconds[LATE_FROM_STEP:]
        return {
            "samples_per_s": self._per_s(self._seconds),
            "late_samples_per_s": self._per_s(late),
            "late_from_step": LATE_FROM_STEP,
            "step_s": self._seconds,
        }

    def _per_s(self, seconds: list[float]) -> float | None:
        return self._samples * len(seconds) / sum(seconds) if seconds else None

    def on_step(self, metrics: StepMetrics) -> None:
        if not metrics.held_back:
            self._seconds.append(self._before_s + metrics.step_s)
        self._before_s = 0.0

    def on_rollout(self, metrics: RolloutMetrics) -> None:
        self.rollouts.append(metrics)
        self._before_s = metrics.rollout_s + metrics.reward_s + metrics.scoring_s
