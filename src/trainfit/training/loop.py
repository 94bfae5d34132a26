"""``train``: open or resume a run, and train a recipe on data."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from trainfit.kernels.determinism import deterministic_kernels
from trainfit.measurement.environment import cpu_name
from trainfit.measurement.meter import is_out_of_memory
from trainfit.models.layers import num_weights
from trainfit.spec.errors import InputError
from trainfit.spec.files import REMEDIES, StorageError, storage_failure
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.spec.stop import StopSignal
from trainfit.step import Step, assemble, vocabulary
from trainfit.techniques import registry
from trainfit.training import checkpoint, folder
from trainfit.training.checkpoint import Progress
from trainfit.training.corpus import Corpora, open_corpora, opened
from trainfit.training.data.plan import RunData
from trainfit.training.observer import Observer, RunStart, StepFlops, TrainSummary
from trainfit.training.options import TrainOptions
from trainfit.training.ranks.exchange import Ranks, joined
from trainfit.training.ranks.launch import launched_world_size, one_report
from trainfit.training.rollouts import REWARDS, MakeRollouts, Rollouts
from trainfit.training.session import Session
from trainfit.training.state import first_not_finite

REWARDS_CHANGED = "the environment's file has changed: rewards are no longer those of the earlier steps"
OTHER_TOKENIZER = (
    "the tokenizer is trained on this data, and the weights know other tokens: name theirs by --tokenizer"
)


def train(
    recipe: Recipe,
    options: TrainOptions,
    *,
    flops: StepFlops | None = None,
    observers: Sequence[Observer] = (),
    rollouts: MakeRollouts | None = None,
) -> TrainSummary:
    """Train ``recipe`` for ``options.steps`` steps, from the start or from the newest checkpoint.

    SIGTERM and SIGINT (in the main thread) save a checkpoint after the running step and end with status
    "stopped". A loss that is not finite ends with "diverged", a lack of memory with "out-of-memory".

    Args:
        flops: FLOPs of one step, for MFU and HFU; None leaves them out.
        observers: called at every step, evaluation and checkpoint, in this order, and closed at the end.
        rollouts: makes what generates for an objective that trains on completions of its own model.

    Raises:
        InputError: bad data, a damaged checkpoint, another run's folder, a missing device.
        StorageError: the disk is full or failed; the message names the newest intact checkpoint.
    """
    with one_report():
        _refuse_rollouts(recipe, rollouts)
        _refuse_more_processes(recipe)
        device_type = _device_type(options.device)
        registry.check(recipe)
        registry.check_device(recipe, device_type)
        _refuse_unsavable(recipe)
    with ExitStack() as stack:
        stack.enter_context(_storage_errors(options))
        resume = partial(folder.how_to_resume, options.folder)
        ranks = stack.enter_context(joined(recipe, device_type, options.hang_timeout_s, resume))
        observers = observers if ranks.is_first else ()
        for observer in observers:
            stack.callback(observer.close)
        ranks.on_first(lambda: stack.enter_context(folder.locked(options.folder)) and None)
        stack.enter_context(_deterministic(ranks.device, options))
        session = _session(recipe, options, ranks, flops, observers, rollouts)
        if not isinstance(session.source, Corpora):
            stack.callback(session.source.close)
        for observer in observers:
            observer.on_start(session.run)
        with StopSignal() as stop:
            return session.train(stop)


def _refuse_rollouts(recipe: Recipe, rollouts: MakeRollouts | None) -> None:
    """Refuse objectives whose sequences the model generates where nothing generates; data has no rewards."""
    if isinstance(recipe.objective, Policy) and rollouts is None:
        problem = "the runs of this command train on data, which has no rewards"
        remedy, name = "use objective: pretrain", recipe.objective.name
        raise InputError(problem, remedy, field="objective.name", value=name)


def _refuse_more_processes(recipe: Recipe) -> None:
    """Refuse a recipe for one GPU in each of several processes."""
    found = launched_world_size()
    if recipe.hardware.count == 1 and found > 1:
        problem = f"torchrun started {found} processes, and the recipe is for one GPU"
        raise InputError(problem, f"add --gpus {found}", field="hardware.count", value=1)


def _session(
    recipe: Recipe, options: TrainOptions, ranks: Ranks, flops: StepFlops | None,
    observers: Sequence[Observer], rollouts: MakeRollouts | None,
) -> Session:  # fmt: skip
    """Open the run's folder and data, build the step, and restore the newest checkpoint."""
    device = ranks.device
    newest, before = ranks.on_first(lambda: folder.open_run(recipe, options)) or (None, None)
    step = _assemble(recipe, ranks, reads_weights=newest is None)
    plan: RunData | None = None
    if not isinstance(recipe.objective, Policy):
        source = _corpora(recipe, options, ranks, vocabulary(step.model))
        plan = RunData.of(recipe, source)
        if options.epochs is not None:
            options = options.over(plan.steps_of(options.epochs))
    else:
        assert rollouts is not None
        source = rollouts(recipe, options, step, ranks)
    progress = checkpoint.load(newest, step, ranks) if newest else Progress(0, None)
    if newest is not None and not isinstance(source, Corpora):
        source.restore(progress.step, checkpoint.queue_of(newest))
    if step.weights is not None and (name := first_not_finite(step)) is not None:
        remedy = "name weights that are finite"
        raise InputError(
            f"{name} holds NaN or infinity", remedy, field="model.weights", value=recipe.model.weights
        )
    if progress.step > options.steps:
        problem, remedy = f"the run already has {progress.step} steps", "use at least as many"
        raise InputError(problem, remedy, field="steps", value=options.steps)
    # Facts besides the recipe on which the last bits of a loss depend.
    environment = {"torch": torch.__version__, "device": _name(device), "threads": torch.get_num_threads()}
    if ranks.several:
        environment["ranks"] = ranks.world_size
    if not isinstance(source, Corpora):
        environment |= source.identity
    described = folder.describe(recipe, options) | {"environment": environment}
    ranks.on_first(lambda: folder.write_run(options.folder, described))
    parameters = list(step.model.parameters())
    run = RunStart(
        out=options.out,
        model=recipe.model.display_name,
        device=f"{ranks.world_size} x {_name(device)}" if ranks.several else _name(device),
        device_type="cuda" if device.type == "cuda" else "cpu",
        params=num_weights(step.model),
        trainable_params=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        steps=options.steps,
        first_step=progress.step,
        tokens_per_step=recipe.step_tokens,
        **_sizes(source, plan),
        predicted=flops and flops.predicted,
        resumed_from=newest and str(newest),
        notes=(
            *([step.weights.note()] if step.weights else ()),
            *((OTHER_TOKENIZER,) if step.weights and options.tokenizer is None and plan else ()),
            *_changes(before, environment),
            *_other_schedule(before, options),
            *(source.index.notes if isinstance(source, Corpora) else source.notes),
            *_loss_notes(recipe),
        ),
    )
    return Session(step, source, options, run, described, flops, observers, progress, newest, ranks)


def _sizes(source: Corpora | Rollouts, plan: RunData | None) -> dict[str, Any]:
    """Return the fields of RunStart that say what a run trains on."""
    if plan is None:
        assert not isinstance(source, Corpora)
        sizes = {"train_tokens": 0, "eval_tokens": 0, "tokenizer_tokens": source.tokenizer_tokens}
        return {**sizes, "rollouts": source.title}
    return {
        "train_tokens": plan.tokens, "eval_tokens": plan.eval_tokens,
        "tokenizer_tokens": plan.tokenizer_tokens, "data": plan,
    }  # fmt: skip


def _refuse_unsavable(recipe: Recipe) -> None:
    """Refuse recipes whose state checkpoints cannot hold.

    Codes of FSDP2's shards are plain tensors that differ by rank under one name.
    """
    name, shards_weights = recipe.optimizer.name, recipe.hardware.count > 1 and recipe.mesh.shards_weights
    facts = registry.optimizer_facts(name)
    if facts is not None and not facts.states:
        problem = "checkpoints cannot hold its state, whose tensors consist of several"
        remedy = "use optimizer.name: adamw8bit or adamw4bit, whose moments are equal"
        raise InputError(problem, remedy, field="optimizer.name", value=name)
    if shards_weights and facts and any("codes" in state.values() for state in facts.states):
        problem = "checkpoints cannot hold the 8-bit or 4-bit moments of FSDP2's shards"
        remedy = "use optimizer.name: adamw, or parallel.strategy: zero1"
        raise InputError(problem, remedy, field="optimizer.name", value=name)


def _corpora(recipe: Recipe, options: TrainOptions, ranks: Ranks, vocabulary: int) -> Corpora:
    """Return the run's data, which rank 0 makes or verifies."""
    place, seq, data = options.folder / folder.DATA, recipe.batch.seq, recipe.data
    pairs, made = recipe.has_pairs, list[Corpora]()
    ranks.on_first(
        lambda: made.append(
            open_corpora(place, options, vocabulary=vocabulary, seq=seq, data=data, pairs=pairs)
        )
    )
    return made[0] if made else opened(place, seq, False if pairs else data.pack, pairs=pairs)


def _other_schedule(before: dict[str, Any] | None, options: TrainOptions) -> tuple[str, ...]:
    """Return a note if a resumed run has another number of steps, on which its learning rate depends."""
    had = options.steps if before is None else before["options"].get("steps")
    if had == options.steps or not options.depends_on_steps:
        return ()
    return (f"the schedule {options.schedule} spanned {had} steps and now spans {options.steps}",)


def _loss_notes(recipe: Recipe) -> tuple[str, ...]:
    terms = " and ".join(
        f"{name} {value:g}" for name, value in recipe.loss_terms.model_dump().items() if value
    )
    note = f"the training loss includes {terms}; the evaluation loss is the cross-entropy alone"
    return (note,) if terms else ()


def _device_type(name: str) -> str:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InputError("no CUDA GPU in this machine", "use cpu or auto", field="device", value=name)
    if name == "auto":
        name = "cuda" if available else "cpu"
    return name


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def _assemble(recipe: Recipe, ranks: Ranks, *, reads_weights: bool) -> Step:
    try:
        return assemble(recipe, ranks.device, mesh=ranks.mesh, reads_weights=reads_weights)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = "out of memory while the model was built"
        remedy, name = "use a smaller model, or a device with more memory", recipe.model.display_name
        raise InputError(problem, remedy, field="model.config", value=name) from error


@contextmanager
def _storage_errors(options: TrainOptions) -> Iterator[None]:
    """Add the remedy and the newest intact checkpoint to the message of a full or failed disk."""
    try:
        yield
    except Exception as error:
        failure = storage_failure(error)
        if failure is None or isinstance(error, InputError):
            raise
        remedy = f"{REMEDIES[failure.errno or 0]}; {folder.how_to_resume(options.folder)}"
        raise StorageError(failure, remedy) from error


@contextmanager
def _deterministic(device: torch.device, options: TrainOptions) -> Iterator[None]:
    """Use CUDA kernels with a fixed order of sums; flash attention's backward adds atomically by default."""
    if device.type != "cuda" or not options.deterministic:
        yield
        return
    # Required by cuBLAS (docs.nvidia.com/cuda/cublas, "Results reproducibility") before its handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        with deterministic_kernels():
            yield
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        problem = str(error).splitlines()[0].split(". ")[0]
        remedy = "set deterministic to false: faster, and a resumed run's losses may differ in the last bits"
        raise InputError(problem, remedy, field="deterministic", value=True) from error


def _changes(run: dict[str, Any] | None, environment: dict[str, Any]) -> tuple[str, ...]:
    """Return a note for each part of the environment that differs from the resumed run's."""
    environment = {"ranks": 1} | environment
    before = {"ranks": 1} | run["environment"] if run else environment
    effect = "losses may differ in the last bits from an uninterrupted run"
    return tuple(
        REWARDS_CHANGED if name == REWARDS else f"{name} was {before.get(name)} and is {value}: {effect}"
        for name, value in environment.items()
        if before.get(name) != value
    )
