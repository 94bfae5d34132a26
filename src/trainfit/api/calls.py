"""``trainfit.predict``, ``measure``, ``train`` and ``trace``: the commands as Python functions.

Torch is imported by the function that needs it: ``predict`` only where the recipe's ledger is not cached yet.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from trainfit.api.planned import planned
from trainfit.api.recipes import FieldsButData, RecipeFields, Source, errors_name, unread_weights, wanted
from trainfit.api.results import Measured, Prediction, TrainingRun
from trainfit.catalog.config_notes import random_base_note
from trainfit.report.console import progress as show_progress
from trainfit.report.words import assumed
from trainfit.spec import DEFAULT_GPU
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Policy
from trainfit.spec.optional import is_installed
from trainfit.spec.recipe import Recipe
from trainfit.spec.schedule import ScheduleName

if TYPE_CHECKING:
    from trainfit.prediction.time.calibrated import OwnCalibration
    from trainfit.training.observer import Observer, StepFlops
    from trainfit.training.options import TrainOptions


def predict(
    recipe: Source,
    *,
    deterministic: bool = False,
    calibration: str | Path | None = None,
    use_cache: bool = True,
    mean_new: float | None = None,
    lengths: str | Path | None = None,
    **fields: Unpack[RecipeFields],
) -> Prediction:
    """Return what one training step takes on its GPU: memory, FLOPs, time and cost. Needs no GPU.

    Args:
        recipe: a model's or a recipe's name, a path, a mapping or a Recipe, as ``load_recipe`` takes them.
        deterministic: use kernels whose results are bitwise reproducible, as ``train`` does by default.
        calibration: file that ``trainfit calibrate`` wrote, for the step's time; None: the catalog's.
        use_cache: False traces anew, even where a ledger is cached.
        mean_new: tokens of a completion on average, of ``objective: grpo`` or ``ppo``, for the expected time
            of a loop; None: half of ``max_new``.
        lengths: folder of a policy's run, whose recorded lengths give the expected time in place of a mean.
        fields: fields of the recipe, such as ``gpu="h100-sxm", seq=8192``; see RecipeFields.

    Raises:
        InputError: an unknown name, a wrong value, or techniques that exclude each other.
    """
    chosen = wanted(recipe, fields, stacklevel=3)
    from trainfit.prediction.time.calibrated import own_calibration

    own = own_calibration(calibration)
    with errors_name(recipe, fields):
        return predict_recipe(
            chosen, own, deterministic=deterministic, use_cache=use_cache, mean_new=mean_new,
            lengths=None if lengths is None else Path(lengths),
        )  # fmt: skip


def check_lengths(recipe: Recipe, mean_new: float | None, lengths: Path | None) -> None:
    """Refuse lengths without completions, of two sources, or with a mean beyond the longest."""
    if mean_new is None and lengths is None:
        return
    field, value = ("mean_new", mean_new) if mean_new is not None else ("lengths", str(lengths))
    if not isinstance(recipe.objective, Policy):
        remedy = "use objective: grpo or ppo, or leave it out"
        raise InputError("nothing is generated", remedy, field=field, value=value)
    if mean_new is None:
        return
    if lengths is not None:
        raise InputError("a mean, and recorded lengths", "leave one out", field=field, value=value)
    if not 1 <= mean_new <= recipe.objective.max_new:
        remedy = f"write 1 to {recipe.objective.max_new}, which is objective.max_new"
        raise InputError("no mean of these completions", remedy, field="mean_new", value=mean_new)


def predict_recipe(
    recipe: Recipe,
    calibration: "OwnCalibration | None" = None,
    *,
    deterministic: bool = False,
    use_cache: bool = True,
    mean_new: float | None = None,
    lengths: Path | None = None,
) -> Prediction:
    """Return the prediction of a recipe, after planning its open fields (``attention: best``, budgets).

    Raises:
        InputError: ``mean_new`` or ``lengths`` without a policy, or lengths that are not the recipe's.
    """
    from trainfit.prediction import compilation
    from trainfit.prediction.machine import machine_of
    from trainfit.rl.estimate.estimate import predict as estimated
    from trainfit.rl.estimate.recorded import read

    check_lengths(recipe, mean_new, lengths)
    machine = machine_of(recipe.hardware, calibration)
    built, notes = planned(recipe, machine=machine, deterministic=deterministic)
    notes += random_base_note(recipe)
    recorded = None if lengths is None else read(lengths, built)
    estimate = estimated(
        built, machine, use_cache=use_cache, deterministic=deterministic, mean_new=mean_new, recorded=recorded
    )
    if estimate.compilation is not None and (eager := compilation.without(built)) is not None:
        found = estimated(eager, machine, use_cache=use_cache, deterministic=deterministic)
        estimate = compilation.compared(estimate, found)
    not_given = assumed(recipe)
    more = (*notes, *([f"assumed: {not_given}"] if not_given else []))
    estimate = estimate.model_copy(update={"assumptions": (*estimate.assumptions, *more)})
    made = Prediction.of(built, estimate, notes, not_given, calibration)
    made._deterministic = deterministic
    return made


def measure(
    recipe: Source,
    *,
    steps: int = 10,
    warmup: int = 3,
    device: str = "auto",
    timeout_s: float | None = None,
    peak_flops: float | None = None,
    force: bool = False,
    **fields: Unpack[RecipeFields],
) -> Measured:
    """Run the recipe's step on this machine, in a process of its own, and return its memory and time.

    Running out of memory is a result, in ``status``.

    Args:
        recipe, fields: as ``predict`` takes them.
        steps: timed steps, after ``warmup`` untimed ones.
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:1``.
        timeout_s: end the trial after so many seconds.
        peak_flops: the device's dense peak, FLOP/s, for MFU and HFU; None: the catalog's.
        force: on a CPU, measure even if the predicted step does not fit in this machine's memory.

    Raises:
        InputError: as ``predict``, or the recipe requires what this machine lacks.
    """
    chosen = wanted(recipe, fields, stacklevel=3)
    with errors_name(recipe, fields):
        built, notes = planned(chosen, device)
        return measure_built(
            built, notes, device, peak_flops, steps=steps, warmup=warmup, timeout_s=timeout_s, force=force
        )


def measure_built(
    built: Recipe,
    notes: tuple[str, ...],
    device: str,
    peak_flops: float | None,
    *,
    force: bool = False,
    **limits: Any,
) -> Measured:
    """Return the measurement of a recipe without open fields.

    Args:
        notes: how open fields were planned.
        force: skip the check of a CPU's memory. On a GPU, running out of memory is a result.
        limits: ``steps``, ``warmup`` and ``timeout_s`` as ``measure`` takes them.
    """
    from trainfit.api.flops import step_flops
    from trainfit.measurement.environment import runs_on_cuda
    from trainfit.measurement.machine import check_ranks
    from trainfit.measurement.run import measure as run
    from trainfit.rl.estimate.names import body_of
    from trainfit.verification.this_machine import check_memory

    if built.hardware.count > 1:
        check_ranks(built.hardware.count, device, "hardware.count")
    model, hardware, peak = step_flops(built, device, peak_flops)
    if not force and not runs_on_cuda(device):
        check_memory(built, device)
    flops = {"model_flops": model, "hardware_flops": hardware, "peak_flops_per_s": peak}
    return Measured.of(built, run(built, device=device, body=body_of(built), **flops, **limits), notes)


def train(
    recipe: Source,
    *,
    out: str | os.PathLike[str],
    steps: int | None = None,
    epochs: float | None = None,
    resume: bool = False,
    data: str | Mapping[str, Any] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    tokenizer: str | os.PathLike[str] | None = None,
    eval_fraction: float | None = None,
    eval_every: int | None = None,
    eval_batch: int | None = None,
    save_every: int | None = None,
    keep: int = 2,
    keep_best: bool = False,
    patience: int | None = None,
    schedule: ScheduleName = "constant",
    warmup_steps: int = 0,
    warmup_ratio: float = 0.0,
    min_lr_share: float | None = None,
    decay_steps: int | None = None,
    deterministic: bool = True,
    tensorboard: bool | None = None,
    peak_flops: float | None = None,
    progress: bool = False,
    observers: "Sequence[Observer]" = (),
    force: bool = False,
    **fields: Unpack[FieldsButData],
) -> TrainingRun:
    """Train a recipe on data in this process and return how the run went.

    SIGTERM and Ctrl-C save a checkpoint and return with ``status`` "stopped"; ``resume=True`` continues. For
    several GPUs start the script with torchrun: each process calls this function, and rank 0 alone writes.

    Args:
        recipe, fields: as ``predict`` takes them.
        out: the run's folder: checkpoints, logs, tokenizer.
        steps: optimizer steps of the whole run; None: 100, or those of ``epochs`` passes over the data.
        data: ``stories``, ``stories:N``, ``hub:NAME``, a file or a folder; None: the recipe's
            ``data.train``. A mapping is laid on the recipe's ``data``.
        tokenizer: a tokenizer.json, a folder or a name on the Hub; None: the recipe's, else one is trained.
        eval_fraction: share of documents kept for evaluation, every ``eval_every`` steps and at the end.
            None: the recipe's ``data.eval_share``.
        eval_batch: sequences of a forward of an evaluation; None: ``batch.micro``.
        keep: checkpoints kept, written every ``save_every`` steps and at the end; with ``keep_best`` also
            that of the best evaluation.
        patience: end after so many evaluations that were no better than the best.
        schedule: learning-rate schedule, by the Hugging Face Trainer's names, with a linear warm-up of
            ``warmup_steps`` or a ``warmup_ratio`` of the steps, down to ``min_lr_share`` of the rate;
            ``decay_steps``: of ``warmup_stable_decay``.
        tensorboard: write event files; None: where TensorBoard is installed.
        peak_flops: the device's dense peak, FLOP/s, for MFU and HFU; None: the catalog's.
        progress: draw a progress bar on standard error.
        observers: called at every step, evaluation and checkpoint (``training.observer.Observer``) of rank 0.
        force: also where the predicted step does not fit in this machine's memory.

    Raises:
        SystemExit: another of several processes failed; it reports why.
        InputError: as ``predict``, or bad data, a damaged checkpoint, a folder that holds another run.
        OSError: the disk does not take a file.
    """
    from trainfit.training import documents
    from trainfit.training.folder import refuse_unusable
    from trainfit.training.options import train_options
    from trainfit.training.ranks.launch import launched_rank

    section: RecipeFields = {**fields, "data": data} if isinstance(data, Mapping) else {**fields}
    chosen = wanted(recipe, section, stacklevel=3)
    options = train_options(
        data if isinstance(data, str) else None, chosen.data, weights=chosen.model.weights,
        out=os.fspath(out), steps=steps, epochs=epochs, resume=resume, device=device,
        eval_fraction=eval_fraction, tokenizer=None if tokenizer is None else os.fspath(tokenizer),
        eval_every=eval_every, eval_batch=eval_batch, save_every=save_every, keep=keep, keep_best=keep_best,
        patience=patience, schedule=schedule, warmup_steps=warmup_steps, warmup_ratio=warmup_ratio,
        min_lr_share=min_lr_share, decay_steps=decay_steps, deterministic=deterministic,
        tensorboard=is_installed("tensorboard") if tensorboard is None else tensorboard,
    )  # fmt: skip
    if launched_rank() == 0:
        refuse_unusable(options)
        if not resume:  # A resumed run has its own copy.
            documents.require_first(options.data, options.eval_data, pairs=chosen.has_pairs)
    with errors_name(recipe, section):
        built, notes = planned(chosen, device, deterministic=deterministic)
        notes += (*random_base_note(chosen), *unread_weights(recipe, chosen))
        return train_built(
            built, notes, options, peak_flops, progress=progress, observers=observers, force=force
        )


def train_built(
    built: Recipe,
    notes: tuple[str, ...],
    options: "TrainOptions",
    peak_flops: float | None,
    *,
    progress: bool,
    observers: "Sequence[Observer]" = (),
    force: bool = False,
) -> TrainingRun:
    """Train a recipe without open fields.

    Args:
        notes: how they were planned.
        force: do not check this machine's memory first.
    """
    from trainfit.rl.loop import rollouts_of
    from trainfit.training.log import JsonlLog, RolloutLog, TensorBoard
    from trainfit.training.loop import train as run
    from trainfit.training.progress import ProgressBar
    from trainfit.training.ranks.launch import launched_rank, one_report

    with one_report():
        rollouts = rollouts_of(built)
    if launched_rank():  # Rank 0 alone reports.
        return TrainingRun.of(built, run(built, options, rollouts=rollouts), notes)
    predicting = f"predicting a step of {built.model.display_name}: its FLOPs, and whether it fits here"
    with show_progress(predicting) if progress else nullcontext():
        flops = training_flops(built, options, peak_flops)
        if not force and flops is not None:  # The FLOPs are unknown in a process that already is a rank.
            from trainfit.verification.this_machine import check_memory

            sequences = options.eval_batch if options.evaluates else None
            check_memory(built, options.device, deterministic=options.deterministic, evaluates=sequences)
    bar = ProgressBar() if progress else None
    log = JsonlLog() if bar is None else JsonlLog(bar.note)
    boards = [TensorBoard()] if options.tensorboard else []
    more = [RolloutLog()] if rollouts is not None else []
    listening = [*([bar] if bar else []), log, *more, *boards, *observers]
    summary = run(built, options, flops=flops, observers=listening, rollouts=rollouts)
    return TrainingRun.of(built, summary, notes)


def training_flops(built: Recipe, options: "TrainOptions", peak_flops: float | None) -> "StepFlops | None":
    """Return a step's FLOPs for MFU and HFU; None in a process that already is a rank of a process group.

    The prediction needs a process group of its own, and a process has one default group.
    """
    import torch.distributed as dist

    from trainfit.api.data_plan import predicted_run
    from trainfit.api.flops import step_flops
    from trainfit.training.observer import StepFlops

    if dist.is_available() and dist.is_initialized():
        return None
    model, hardware, peak = step_flops(built, options.device, peak_flops, deterministic=options.deterministic)
    return StepFlops(
        model_flops=model,
        hardware_flops=hardware,
        peak_flops_per_s=peak,
        predicted=predicted_run(built, options),
    )


def trace(
    step: Callable[[], Any],
    *,
    gpu: str = DEFAULT_GPU,
    steps: int = 3,
    world_size: int | None = None,
    nodes: int | None = None,
    calibration: str | Path | None = None,
) -> Prediction:
    """Run ``step`` on a virtual GPU and return what it would take on a real one.

    PyTorch's random state, defaults and switches are restored afterwards, also those that ``step`` sets.

    Args:
        step: builds the model, the optimizer and the data, and trains, written for "cuda" as for a real run.
            It is called once without arguments. Values on the device are not computed.
        gpu: name of a GPU of the catalog that is measured or modelled.
        steps: the callable ends at the forward after so many optimizer steps; earlier if it returns.
        world_size: run it as rank 0 of this many ranks, one per GPU, with torchrun's environment; None: as
            one process.
        nodes: hosts that share the ranks equally; None: with the catalog's GPUs each.
        calibration: file that ``trainfit calibrate`` wrote, for the step's time; None: the catalog's.

    Raises:
        InputError: an unknown GPU, code that trains nothing or needs device values, or code of several ranks
            without ``world_size``.
        Exception: whatever the callable itself raises.
    """
    from trainfit.prediction.time.calibrated import own_calibration
    from trainfit.prediction.user_step import estimate_of, traced

    own = own_calibration(calibration)
    found = traced(step, gpu=gpu, steps=steps, world_size=world_size, nodes=nodes, calibration=own)
    made = Prediction.of(None, estimate_of(found))
    made._code = found.code
    return made
