"""Plan of a run's data before it starts: sequences, steps of an epoch, their predicted time and cost."""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainfit.api.results import Printed
from trainfit.catalog.load import model_config
from trainfit.spec.errors import InputError
from trainfit.spec.files import cache_folder
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.spec.value import Count
from trainfit.training.data.plan import RunData
from trainfit.training.observer import PredictedRun

if TYPE_CHECKING:
    from trainfit.training.options import TrainOptions


class DataPlan(Printed):
    """A run's data, its steps, and what was predicted of them."""

    data: RunData
    predicted: PredictedRun
    steps: Count
    epoch_steps: float
    epoch_s: float | None
    epoch_dollars: float | None
    run_s: float | None
    run_dollars: float | None
    notes: tuple[str, ...] = ()

    def _print(self, out: Console) -> None:
        from trainfit.training.progress import plan_lines

        for line in (*plan_lines(self.data, self.predicted, self.steps), *self.notes):
            out.print(line, markup=False, highlight=False, soft_wrap=True)


def data_plan(recipe: Recipe, options: "TrainOptions") -> DataPlan:
    """Return the plan of a recipe without open fields. The data is tokenized, and kept in the cache.

    Raises:
        InputError: bad data, or a recipe that cannot be predicted.
    """
    from trainfit.training.corpus import open_corpora

    if isinstance(recipe.objective, Policy):
        problem, remedy = (
            "it trains on its own completions, not on data",
            "leave --dry-run out, or use predict",
        )
        raise InputError(problem, remedy, field="objective.name", value=recipe.objective.name)
    vocabulary = vocabulary_of(recipe)
    parent = cache_folder()
    with suppress(OSError):
        parent.mkdir(parents=True, exist_ok=True)
    where = str(parent) if parent.is_dir() else None
    with tempfile.TemporaryDirectory(dir=where, prefix="dry-run-") as work:
        corpora = open_corpora(
            Path(work) / "data", options, vocabulary=vocabulary, seq=recipe.batch.seq, data=recipe.data,
            pairs=recipe.has_pairs,
        )  # fmt: skip
        found, notes = RunData.of(recipe, corpora), corpora.index.notes
    options = options if options.epochs is None else options.over(found.steps_of(options.epochs))
    predicted = predicted_run(recipe, options)
    step_s, price = predicted.step_s, predicted.price_per_gpu_hour
    per_s = None if price is None else price * predicted.num_gpus / 3600

    def takes(steps: float) -> tuple[float | None, float | None]:
        run_s = None if step_s is None else steps * step_s
        return run_s, None if run_s is None or per_s is None else run_s * per_s

    epoch_s, epoch_dollars = takes(found.epoch_steps)
    run_s, run_dollars = takes(options.steps)
    return DataPlan(
        data=found, predicted=predicted, steps=options.steps, epoch_steps=found.epoch_steps, epoch_s=epoch_s,
        epoch_dollars=epoch_dollars, run_s=run_s, run_dollars=run_dollars,
        notes=tuple(f"note: {note}" for note in notes),
    )  # fmt: skip


def predicted_run(recipe: Recipe, options: "TrainOptions") -> PredictedRun:
    """Return the predicted step of a recipe on its GPU, and of a larger evaluation the peak."""
    from trainfit.prediction.evaluation import evaluation_peak
    from trainfit.prediction.machine import machine_of
    from trainfit.prediction.predict import predict

    machine = machine_of(recipe.hardware)
    estimate = predict(recipe, machine, deterministic=options.deterministic)
    peaks: dict[str, Any] = {}
    if options.eval_batch is not None and options.eval_batch > recipe.batch.micro and options.evaluates:
        found = evaluation_peak(recipe, options.eval_batch, machine, deterministic=options.deterministic)
        if found.allocated_bytes > found.step_allocated_bytes:
            peaks = {"step_bytes": found.step_allocated_bytes, "eval_bytes": found.allocated_bytes}
    return PredictedRun(
        gpu=recipe.hardware.gpu, num_gpus=recipe.hardware.count, step_s=estimate.step_s,
        price_per_gpu_hour=machine.price_per_hour, **peaks,
    )  # fmt: skip


def vocabulary_of(recipe: Recipe) -> int:
    """Return the number of token ids that the recipe's model takes, without building it."""
    config = model_config(recipe.model.config)
    if recipe.model.implementation == "native":
        from trainfit.models.native.families import native_config

        return native_config(config).vocab_size
    from trainfit.models.hf import hf_config_from

    found = hf_config_from(config).get_text_config()
    size = getattr(found, "vocab_size", None)
    if not isinstance(size, int):
        raise InputError("states no vocab_size", "add it", field="model.config")
    return size
