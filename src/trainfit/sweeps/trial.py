"""The process of a sweep's prediction or training run: ``main(folder)``.

Reads FOLDER/request.json; writes FOLDER/result.json, a Finding, or bad input to FOLDER/error.json.
(A measurement's process is ``trainfit.measurement.trial``.)
"""

import json
import os
from pathlib import Path
from typing import Any

from trainfit.measurement.environment import runs_on_cuda
from trainfit.measurement.trial import ERROR, REQUEST, RESULT, ended_by_storage
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.files import write_text
from trainfit.spec.sweep import LATE_FROM_STEP
from trainfit.spec.value import parse
from trainfit.sweeps.parts import Finding, PartRequest
from trainfit.sweeps.read import train_options
from trainfit.training.observer import EvalMetrics, RunStart, StepMetrics, TrainSummary


def main(folder: Path) -> int:
    """Run the part of ``folder``; the process's exit code."""
    return ended_by_storage(lambda: _run(folder))


def _run(folder: Path) -> int:
    request = parse(PartRequest, json.loads((folder / REQUEST).read_text()))
    try:
        found = _predict(request) if request.part == "predict" else _train(request, folder)
    except InputError as error:
        if _is_out_of_memory(error.__cause__):
            found = Finding(status="out-of-memory", message=error.problem)
        else:
            fields = {name: getattr(error, name) for name in ("problem", "remedy", "field", "file")}
            write_text(folder / ERROR, json.dumps(fields | {"value": error.value}, default=repr))
            return EXIT_BAD_INPUT
    draft = folder / f"{RESULT}.tmp"
    write_text(draft, found.model_dump_json())
    os.replace(draft, folder / RESULT)
    return 0


def _predict(request: PartRequest) -> Finding:
    # Autograd's engine would make a CUDA context, half a GiB, on the card that is being measured.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from trainfit.prediction.estimate import predict

    if not request.recipe.has_open_fields:
        return Finding(status="done", estimate=predict(request.recipe))
    recipe, notes = request.recipe, ()
    if recipe.attention == "best":
        from trainfit.planning.attention import choose

        recipe, note = choose(recipe, device_type="cpu" if request.device == "cpu" else "cuda")
        notes = (note,)
    from trainfit.planning.recompute import resolve

    recipe = resolve(recipe)
    estimate = predict(recipe)  # What a budget's plan was traced for is kept.
    estimate = estimate.model_copy(update={"assumptions": (*estimate.assumptions, *notes)})
    return Finding(status="done", estimate=estimate, planned=recipe)


def _train(request: PartRequest, folder: Path) -> Finding:
    from trainfit.training.loop import train
    from trainfit.training.observer import StepFlops

    assert request.train is not None, "a training part says how many steps"
    flops = None
    if (counted := _counted(request)) is not None:
        flops = StepFlops(
            model_flops=counted[0],
            hardware_flops=counted[1],
            peak_flops_per_s=request.peak_flops_per_s(runs_on_cuda(request.device)),
        )
    _limit(request)  # Of the steps: what counting took is there already.
    options = train_options(request.train, out=str(folder / "run"), device=request.device)
    speed = Speed(request.recipe.batch.micro * request.recipe.batch.accumulate)
    summary = train(request.built, options, flops=flops, observers=[speed])
    status = "killed" if summary.status == "stopped" else summary.status
    content = summary.content()
    content["run"]["out"] = "run"  # The trial's folder is removed.
    return Finding(status=status, message=summary.message, train=content | {"speed": speed.content()})


def _counted(request: PartRequest) -> tuple[float, float] | None:
    """Return model and hardware FLOPs of a training step, for the kernels that it runs.

    None: it was not predicted.
    """
    if request.model_flops is None or request.hardware_flops is None:
        return None
    if request.train is None or not request.train.deterministic:
        return request.model_flops, request.hardware_flops
    from trainfit.prediction.estimate import predict

    # The prediction's own part is of the kernels that ``measure`` runs.
    estimate = predict(request.built, deterministic=True)
    return estimate.model_flops, estimate.hardware_flops


def _limit(request: PartRequest) -> None:
    if request.memory_limit_bytes is None:
        return
    import torch

    from trainfit.measurement.meter import CpuMeter, CudaMeter

    meter = (
        CudaMeter(torch.device("cuda", 0))
        if runs_on_cuda(request.device)
        else CpuMeter(torch.device("cpu"), False)
    )
    meter.limit(request.memory_limit_bytes)


def _is_out_of_memory(error: BaseException | None) -> bool:
    if error is None:
        return False
    from trainfit.measurement.meter import is_out_of_memory

    return is_out_of_memory(error)


class Speed:
    """Observer of a run: samples a second, overall and after the first steps.

    Data loading counts, evaluation not.
    """

    def __init__(self, samples_per_step: int):
        self._samples = samples_per_step
        self._seconds: list[float] = []

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
        self._seconds.append(metrics.step_s)

    def on_start(self, run: RunStart) -> None:
        """Nothing is known yet."""

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Not part of a step."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Not part of a step."""

    def on_end(self, summary: TrainSummary) -> None:
        """The steps hold everything."""

    def close(self) -> None:
        """Nothing is open."""
