"""``trainfit train``: train a recipe on data, with progress, evaluation, logs, checkpoints and resume."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from trainfit.cli import options
from trainfit.cli.options import Json, PeakFlops, RecipeArgument, RecordFile, Settings
from trainfit.spec.files import REMEDIES, StorageError, storage_failure
from trainfit.spec.optional import is_installed
from trainfit.spec.stop import resumable

OUT_HELP = "The run's folder: checkpoints, logs, tokenizer."
DATA_HELP = "stories, stories:N (synthetic text), hub:NAME, a text file or a folder of them."
DETERMINISTIC_HELP = "On CUDA: kernels that repeat bit by bit, as resume needs."
TENSORBOARD_HELP = "Write event files; default: if TensorBoard is installed."
SAVE_HELP = "Default: at the end, or when stopped."
NO_EVENT_FILES = (
    "no event files: TensorBoard is not installed; pip install 'trainfit[tensorboard]', or --no-tensorboard"
)


def run(
    recipe: RecipeArgument,
    out: Annotated[Path, Option(metavar="FOLDER", help=OUT_HELP)],
    settings: Settings = None,
    steps: Annotated[int, Option(min=1, metavar="N", help="Optimizer steps of the whole run.")] = 100,
    resume: Annotated[bool, Option("--resume", help="Continue from the folder's newest checkpoint.")] = False,
    data: Annotated[str, Option(metavar="DATA", help=DATA_HELP)] = "stories",
    device: Annotated[Literal["auto", "cpu", "cuda"], Option(help="Where to train.")] = "auto",
    tokenizer: Annotated[
        Path | None, Option(metavar="FILE", help="A tokenizer.json; default: train one.")
    ] = None,
    eval_fraction: Annotated[
        float, Option(min=0, max=0.5, metavar="SHARE", help="Share of documents held out.")
    ] = 0.05,
    eval_every: Annotated[
        int | None, Option(min=1, metavar="STEPS", help="Default: only at the end.")
    ] = None,
    save_every: Annotated[int | None, Option(min=1, metavar="STEPS", help=SAVE_HELP)] = None,
    keep_last: Annotated[int, Option("--keep", min=1, metavar="N", help="Checkpoints kept.")] = 2,
    schedule: Annotated[Literal["constant", "cosine"], Option(help="Learning rate schedule.")] = "constant",
    warmup_steps: Annotated[int, Option(min=0, metavar="N", help="Steps of linear warm-up.")] = 0,
    clip_norm: Annotated[float | None, Option(metavar="NORM", help="Sets optimizer.clip_norm.")] = None,
    deterministic: Annotated[bool, Option(help=DETERMINISTIC_HELP)] = True,
    tensorboard: Annotated[
        bool | None, Option("--tensorboard/--no-tensorboard", help=TENSORBOARD_HELP)
    ] = None,
    peak_flops: PeakFlops = None,
    json: Json = False,
    record: RecordFile = None,
) -> int:
    """Train a recipe on data; stop it any time and --resume."""
    if clip_norm is not None:
        settings = [*(settings or []), f"optimizer.clip_norm={clip_norm}"]
    if tensorboard is None:
        tensorboard = is_installed("tensorboard")
        options.print_notes(() if tensorboard else (NO_EVENT_FILES,))
    requested = options.read_recipe(recipe, settings)
    from trainfit.api.calls import train_built, train_options
    from trainfit.api.planned import planned
    from trainfit.training.folder import how_to_resume

    wanted = train_options(
        data, out=str(out), steps=steps, resume=resume, device=device, tokenizer=tokenizer and str(tokenizer),
        eval_fraction=eval_fraction, eval_every=eval_every, save_every=save_every, keep=keep_last,
        schedule=schedule, warmup_steps=warmup_steps, deterministic=deterministic, tensorboard=tensorboard,
    )  # fmt: skip
    with resumable(lambda: how_to_resume(out)), options.work(recipe, settings, json=json, record=record):
        built, notes = planned(requested, device)
        options.print_notes(notes)
        summary = train_built(built, notes, wanted, peak_flops, progress=True)
        try:
            options.keep(record, "train", built, train=summary.content())
        except OSError as error:
            failure = storage_failure(error)
            if failure is None:
                raise
            saved = "the run itself is saved, --resume --record adds its record"
            raise StorageError(failure, f"{REMEDIES[failure.errno or 0]}; {saved}") from error
    if json:
        options.print_json(summary)
    else:
        from trainfit.report.results import show_training

        show_training(built, summary)
    return summary.exit_code
