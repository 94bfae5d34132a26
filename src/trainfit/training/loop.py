"""``train``: a recipe trained on data, watched, saved and resumed.

Enters: a Recipe, TrainOptions, and who listens. Leaves: a TrainSummary, and the run's folder (folder.py).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trainfit.kernels.determinism import deterministic_kernels
from trainfit.measurement.environment import cpu_name
from trainfit.measurement.meter import is_out_of_memory
from trainfit.models.layers import num_quantized
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.storage import REMEDIES, StorageError, storage_failure
from trainfit.step import Step, assemble, vocabulary
from trainfit.techniques import registry
from trainfit.training import checkpoint, folder
from trainfit.training.checkpoint import Progress
from trainfit.training.corpus import Corpora, open_corpora
from trainfit.training.layout import how_to_go_on
from trainfit.training.observer import Observer, RunStart, StepFlops, TrainSummary
from trainfit.training.options import TrainOptions
from trainfit.training.session import Session
from trainfit.training.stop import StopSignal


def train(
    recipe: Recipe,
    options: TrainOptions,
    *,
    flops: StepFlops | None = None,
    observers: Sequence[Observer] = (),
) -> TrainSummary:
    """Train ``recipe`` for ``options.steps`` steps, from the start or from the newest checkpoint.

    SIGTERM and SIGINT (in the main thread) save after the step that is running and end with status "stopped". A loss
    that is not finite ends with status "diverged", no memory with "out-of-memory"; earlier checkpoints stay.

    Args:
        flops: what one step computes, for MFU and HFU; None leaves them out.
        observers: hear of every step, evaluation and checkpoint, in this order; all are closed at the end.

    Raises:
        InputError: bad data, a damaged checkpoint, a resumed run that differs, a used folder, a missing device.
        StorageError: the disk does not take a file; it names the checkpoint that is whole.
    """
    device = _device(options)
    registry.check(recipe)
    registry.check_device(recipe, device.type)
    with _naming_what_is_whole(options), ExitStack() as stack:
        for observer in observers:
            stack.callback(observer.close)
        stack.enter_context(folder.locked(options.folder))
        stack.enter_context(_repeatable(device, options))
        saved = folder.open_run(recipe, options)
        session = _session(recipe, options, device, saved, flops, observers)
        for observer in observers:
            observer.on_start(session.run)
        with StopSignal() as stop:
            return session.go(stop)


def _session(
    recipe: Recipe,
    options: TrainOptions,
    device: torch.device,
    saved: folder.Saved | None,
    flops: StepFlops | None,
    observers: Sequence[Observer],
) -> Session:
    step = _assemble(recipe, device)
    corpora = open_corpora(
        options.folder / folder.DATA, options, vocabulary=vocabulary(step.model), seq=recipe.batch.seq
    )
    newest = saved.checkpoint if saved else None
    progress = checkpoint.load(newest, step) if newest else Progress(0, None)
    if progress.step > options.steps:
        raise InputError(
            f"the run already has {progress.step} steps",
            "ask for at least as many",
            field="steps",
            value=options.steps,
        )
    described = folder.describe(recipe, options) | {"environment": _environment(device)}
    folder.write_run(options.folder, described)
    notes = (*_changes(saved, described), *corpora.notes, *_about_the_loss(recipe))
    run = _run_start(step, options, corpora, progress, newest and str(newest), notes)
    return Session(step, corpora, options, run, described, flops, observers, progress, newest)


def _run_start(
    step: Step,
    options: TrainOptions,
    corpora: Corpora,
    progress: Progress,
    resumed: str | None,
    notes: tuple[str, ...],
) -> RunStart:
    parameters = list(step.model.parameters())
    return RunStart(
        out=options.out,
        model=step.recipe.model.display_name,
        device=_device_name(step.device),
        device_type="cuda" if step.device.type == "cuda" else "cpu",
        params=sum(parameter.numel() for parameter in parameters) + num_quantized(step.model),
        trainable_params=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        steps=options.steps,
        first_step=progress.step,
        tokens_per_step=step.recipe.batch.tokens,
        train_tokens=len(corpora.train.tokens),
        eval_tokens=len(corpora.eval.tokens),
        tokenizer_tokens=corpora.index["tokenizer_tokens"],
        resumed_from=resumed,
        notes=notes,
    )


def _about_the_loss(recipe: Recipe) -> tuple[str, ...]:
    terms = [f"{name} {value:g}" for name, value in recipe.loss_terms.model_dump().items() if value]
    if not terms:
        return ()
    return (f"the training loss has {' and '.join(terms)} in it; evaluation's is the cross-entropy alone",)


def _device(options: TrainOptions) -> torch.device:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA GPU in this machine", "use cpu or auto", field="device", value="cuda")
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(options.device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def _assemble(recipe: Recipe, device: torch.device) -> Step:
    try:
        return assemble(recipe, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            "out of memory while the model was built",
            "use a smaller model, or a device with more memory",
            field="model.config",
            value=recipe.model.display_name,
        ) from error


@contextmanager
def _naming_what_is_whole(options: TrainOptions) -> Iterator[None]:
    """A full or failed disk ends the run with what to do, and with the checkpoint that goes on once that is done."""
    try:
        yield
    except Exception as error:
        failure = storage_failure(error)
        if failure is None or isinstance(error, InputError):
            raise
        remedy = f"{REMEDIES[failure.errno or 0]}; {how_to_go_on(options.folder)}"
        raise StorageError(failure, remedy) from error


@contextmanager
def _repeatable(device: torch.device, options: TrainOptions) -> Iterator[None]:
    """On CUDA, kernels whose sums run in one order: flash attention's backward, for one, otherwise adds atomically."""
    if device.type != "cuda" or not options.deterministic:
        yield
        return
    # cuBLAS asks for it (docs.nvidia.com/cuda/cublas, "Results reproducibility"); read when its handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        with deterministic_kernels():
            yield
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        raise InputError(
            str(error).splitlines()[0].split(". ")[0],
            "set deterministic to false: faster, and a resumed run's losses may differ in the last bits",
            field="deterministic",
            value=True,
        ) from error


def _environment(device: torch.device) -> dict[str, Any]:
    """What the bits of a loss depend on besides the recipe."""
    return {"torch": torch.__version__, "device": _device_name(device), "threads": torch.get_num_threads()}


def _changes(saved: folder.Saved | None, described: dict[str, Any]) -> tuple[str, ...]:
    if saved is None:
        return ()
    before, now = saved.run["environment"], described["environment"]
    return tuple(
        f"{name} was {before.get(name)} and is {now[name]}: losses may differ in the last bits from an unbroken run"
        for name in now
        if before.get(name) != now[name]
    )
