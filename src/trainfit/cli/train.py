"""``trainfit train``: train a recipe on data, with progress, evaluation, logs, checkpoints and resume."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import BadParameter, Context, Option

from trainfit.cli import options
from trainfit.cli.options import Json, PeakFlops, RecipeArgument, RecordFile, Settings, at_most, finite, share
from trainfit.spec.errors import InputError
from trainfit.spec.files import REMEDIES, StorageError
from trainfit.spec.optional import is_installed
from trainfit.spec.printable import printable, say
from trainfit.spec.stop import resumable

if TYPE_CHECKING:
    from trainfit.api.results import TrainingRun
    from trainfit.spec.recipe import Recipe

OUT_HELP = "The run's folder: checkpoints, logs, tokenizer."
DATA_HELP = (
    "stories, stories:N (synthetic text), hub:NAME, a text, JSONL or Parquet file, or a folder. Default: the "
    "recipe's data.train, else stories."
)
TOKENIZER_HELP = "A tokenizer.json, a folder or a name on the Hub; default: the recipe's, else train one."
FRACTION_HELP = "Share of documents held out; default: the recipe's data.eval_share, 5%."
EVAL_BATCH_HELP = "Sequences per forward of an evaluation; default: batch.micro."
BEST_HELP = "Save after each best evaluation, and keep that checkpoint too."
PATIENCE_HELP = "End after N evaluations that were no better."
SCHEDULE_HELP = (
    "constant, constant_with_warmup, linear, cosine, cosine_with_min_lr, polynomial, inverse_sqrt or "
    "warmup_stable_decay (wsd)."
)
DRY_HELP = "Print what the data comes to, its time and cost; train nothing."
DETERMINISTIC_HELP = "On CUDA: kernels that repeat bit by bit, as resume needs."
TENSORBOARD_HELP = "Write event files; default: if TensorBoard is installed."
STEPS_HELP = "Optimizer steps of the whole run; default: 100, or those of --epochs."
EPOCHS_HELP = "Passes over the data, in place of --steps."
SAVE_HELP = "Default: at the end, or when stopped."
NO_EVENT_FILES = (
    "no event files: TensorBoard is not installed; pip install 'trainfit[tensorboard]', or --no-tensorboard"
)


GPUS_HELP = "Train on N GPUs of this host, one process each; sets hardware.count."
HANG_HELP = "Several GPUs: end the run after this time without progress."


@options.takes_recipe
def run(
    context: Context,
    recipe: RecipeArgument,
    out: Annotated[Path | None, Option(metavar="FOLDER", help=OUT_HELP)] = None,
    settings: Settings = None,
    gpus: Annotated[
        int | None, Option("--gpus", "--count", min=1, callback=at_most, metavar="N", help=GPUS_HELP)
    ] = None,
    steps: Annotated[
        int | None,
        Option("--steps", "--max-steps", min=1, callback=at_most, metavar="N", help=STEPS_HELP),
    ] = None,
    epochs: Annotated[
        float | None,
        Option("--epochs", "--num-train-epochs", min=1e-6, callback=finite, metavar="N", help=EPOCHS_HELP),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help=DRY_HELP)] = False,
    resume: Annotated[bool, Option("--resume", help="Continue from the folder's newest checkpoint.")] = False,
    data: Annotated[str | None, Option("--data", metavar="DATA", help=DATA_HELP)] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], Option(help="Where to train.")] = "auto",
    tokenizer: Annotated[str | None, Option(metavar="NAME", help=TOKENIZER_HELP)] = None,
    eval_fraction: Annotated[float | None, Option(parser=share, metavar="SHARE", help=FRACTION_HELP)] = None,
    eval_every: Annotated[
        int | None, Option(min=1, callback=at_most, metavar="STEPS", help="Default: only at the end.")
    ] = None,
    eval_batch: Annotated[
        int | None, Option(min=1, callback=at_most, metavar="B", help=EVAL_BATCH_HELP)
    ] = None,
    save_every: Annotated[
        int | None, Option(min=1, callback=at_most, metavar="STEPS", help=SAVE_HELP)
    ] = None,
    keep_last: Annotated[
        int, Option("--keep", min=1, callback=at_most, metavar="N", help="Checkpoints kept.")
    ] = 2,
    keep_best: Annotated[bool, Option("--keep-best", help=BEST_HELP)] = False,
    patience: Annotated[int | None, Option(min=1, callback=at_most, metavar="N", help=PATIENCE_HELP)] = None,
    schedule: Annotated[
        str, Option("--schedule", "--lr-scheduler-type", metavar="NAME", help=SCHEDULE_HELP)
    ] = "constant",
    warmup_steps: Annotated[
        int, Option(min=0, callback=at_most, metavar="N", help="Steps of linear warm-up.")
    ] = 0,
    warmup_ratio: Annotated[
        float, Option(parser=share, metavar="SHARE", help="Warm-up as a share of the steps.")
    ] = 0.0,
    min_lr_share: Annotated[
        float | None,
        Option(parser=share, metavar="SHARE", help="Last rate of a decay; default: the schedule's."),
    ] = None,
    decay_steps: Annotated[
        int | None, Option(min=1, callback=at_most, metavar="N", help="Of warmup_stable_decay.")
    ] = None,
    clip_norm: Annotated[float | None, Option(metavar="NORM", help="Sets optimizer.clip_norm.")] = None,
    deterministic: Annotated[bool, Option(help=DETERMINISTIC_HELP)] = True,
    tensorboard: Annotated[
        bool | None, Option("--tensorboard/--no-tensorboard", help=TENSORBOARD_HELP)
    ] = None,
    hang_timeout: Annotated[float, Option(min=1, callback=finite, metavar="SECONDS", help=HANG_HELP)] = 600.0,
    peak_flops: PeakFlops = None,
    json: Json = False,
    record: RecordFile = None,
    force: options.Force = False,
) -> int:
    """Train a recipe on data; stop it any time and --resume."""
    from trainfit.training.ranks.launch import end_with_launcher, is_launched

    end_with_launcher()
    if out is None and not dry_run:
        raise BadParameter("--out is missing: name a folder for the run, or add --dry-run")
    out = out or Path("(none)")
    if clip_norm is not None:
        settings = [*(settings or []), f"optimizer.clip_norm={clip_norm}"]
    if gpus is not None:
        settings = _with_count(recipe, settings, gpus)
        if gpus > 1 and not is_launched() and not dry_run:
            check = None if force else lambda: _check_memory(recipe, settings, device, deterministic)
            return _launch(context.obj, gpus, device, out, check)
    given: dict[str, Any] = {
        "out": str(out), "steps": steps, "epochs": epochs, "resume": resume, "device": device,
        "tokenizer": tokenizer, "eval_fraction": eval_fraction, "eval_every": eval_every,
        "eval_batch": eval_batch, "save_every": save_every, "keep": keep_last, "keep_best": keep_best,
        "patience": patience, "schedule": schedule, "warmup_steps": warmup_steps,
        "warmup_ratio": warmup_ratio, "min_lr_share": min_lr_share, "decay_steps": decay_steps,
        "deterministic": deterministic, "tensorboard": tensorboard, "hang_timeout_s": hang_timeout,
    }  # fmt: skip
    if dry_run:
        return _dry_run(recipe, settings, data, given, json=json)
    return _train(recipe, settings, data, given, peak_flops, record, json=json, force=force)


def _train(
    recipe: str,
    settings: list[str] | None,
    data: str | None,
    given: dict[str, Any],
    peak_flops: float | None,
    record: Path | None,
    *,
    json: bool,
    force: bool,
) -> int:
    """Train in this process, which may be one of several ranks, and return the exit code.

    Args:
        given: arguments of ``train_options``.
    """
    from trainfit.api.calls import train_built
    from trainfit.api.planned import planned
    from trainfit.api.recipes import read, unread_weights
    from trainfit.catalog.config_notes import random_base_note
    from trainfit.training import documents
    from trainfit.training.folder import how_to_resume, refuse_unusable
    from trainfit.training.options import train_options
    from trainfit.training.ranks.launch import launched_rank, one_report, started_by_us

    first = launched_rank() == 0
    if given["tensorboard"] is None:
        given["tensorboard"] = is_installed("tensorboard")
        options.print_notes((NO_EVENT_FILES,) if first and not given["tensorboard"] else ())
    with one_report():
        requested, recipe_notes = read(recipe, settings or [])
        options.print_notes(f"note: {note}" for note in recipe_notes if first)
        wanted = train_options(data, requested.data, weights=requested.model.weights, **given)
        if first:
            refuse_unusable(wanted)
            if not wanted.resume:  # A resumed run has its own copy.
                documents.require_first(wanted.data, wanted.eval_data, pairs=requested.has_pairs)
    record = record if first else None
    out = Path(given["out"])
    with resumable(lambda: how_to_resume(out)), options.work(recipe, settings, json=json, record=record):
        with one_report():
            built, notes = planned(requested, given["device"], deterministic=given["deterministic"])
        notes += (*random_base_note(requested), *unread_weights(recipe, requested))
        options.print_notes(notes if first else ())
        summary = train_built(
            built, notes, wanted, peak_flops, progress=first, force=force or started_by_us()
        )
        if not first:
            return summary.exit_code
    _print(built, summary, record, json=json)
    return summary.exit_code


def _dry_run(
    recipe: str, settings: list[str] | None, data: str | None, given: dict[str, Any], *, json: bool
) -> int:
    """Print what the data comes to, and what an epoch and the run take as predicted."""
    from trainfit.api.data_plan import data_plan
    from trainfit.api.planned import planned
    from trainfit.report.console import progress
    from trainfit.training.options import train_options

    given = given | {"tensorboard": False}
    with options.work(recipe, settings, json=json, record=None):
        requested = options.read_recipe(recipe, settings)
        wanted = train_options(data, requested.data, weights=requested.model.weights, **given)
        built, notes = planned(requested, given["device"], deterministic=given["deterministic"])
        options.print_notes(notes)
        with progress(f"reading the data, and predicting a step of {requested.model.display_name}"):
            found = data_plan(built, wanted)
    if json:
        options.print_json(found)
    else:
        say(found.text())
    return 0


def _print(recipe: "Recipe", summary: "TrainingRun", record: Path | None, *, json: bool) -> None:
    """Append the record and print the summary, also where the record cannot be written."""
    failure = options.attempt(lambda: options.keep(record, "train", recipe, train=summary.content()))
    if json:
        options.print_json(summary)
    else:
        from trainfit.report.results import show_training

        show_training(recipe, summary)
    if failure is not None:
        saved = "the run is saved; --resume with --record adds its record"
        remedy = REMEDIES.get(failure.errno or 0, "name another file with --record")
        raise StorageError(failure, f"{remedy}; {saved}") from failure


def _with_count(recipe: str, settings: list[str] | None, gpus: int) -> list[str]:
    """Return the values of ``--set`` with ``hardware.count``, where the recipe leaves it at 1."""
    from trainfit.api.recipes import read
    from trainfit.training.ranks.launch import one_report

    with one_report():
        count = read(recipe, settings or [])[0].hardware.count
        if count not in (1, gpus):
            remedy = f"use --gpus {count}, or --set hardware.count={gpus}"
            raise InputError(f"--gpus {gpus} disagrees", remedy, field="hardware.count", value=count)
    return [*(settings or []), f"hardware.count={gpus}"]


def _check_memory(recipe: str, settings: list[str] | None, device: str, deterministic: bool) -> None:
    """Refuse, before ranks are started, a recipe that this machine's memory does not hold."""
    from trainfit.api.planned import planned
    from trainfit.report.console import progress
    from trainfit.verification.this_machine import check_memory

    with options.work(recipe, settings, json=False, record=None):
        requested = options.read_recipe(recipe, settings)
        with progress(f"predicting whether {requested.model.display_name} fits here"):
            built, _ = planned(requested, device, deterministic=deterministic)
            check_memory(built, device, deterministic=deterministic)


def _launch(words: list[str], gpus: int, device: str, out: Path, check: Callable[[], None] | None) -> int:
    """Run this command line as ``gpus`` ranks; report a rank that a signal ended.

    Args:
        check: called before ranks are started; None: nothing to check.
    """
    from trainfit.measurement.machine import check_ranks
    from trainfit.training.folder import how_to_resume
    from trainfit.training.ranks.launch import RankKilledError, exit_code_of, launch

    check_ranks(gpus, device, "--gpus")
    if check is not None:
        check()
    try:
        return launch(words, gpus)
    except RankKilledError as error:
        say(printable(f"trainfit: error: {error}; all ranks end; {how_to_resume(out)}"), err=True)
        return exit_code_of(error)
