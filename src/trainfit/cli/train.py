"""``trainfit train``: train a recipe on data, with progress, evaluation, logs, checkpoints and resume."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from trainfit.cli.options import (
    Json,
    PeakFlops,
    RecipeArgument,
    RecordFile,
    Settings,
    keep,
    print_json,
    print_notes,
    read_recipe,
    work,
)
from trainfit.spec.files import REMEDIES, StorageError, storage_failure
from trainfit.spec.optional import is_installed
from trainfit.training.stop import resumable

OUT_HELP = "The run's folder: checkpoints, logs, tokenizer."
DATA_HELP = "stories, stories:N (synthetic text), hub:NAME, a text file or a folder of them."
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help=OUT_HELP)]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Optimizer steps of the whole run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the folder's newest checkpoint.")]
Data = Annotated[str, typer.Option(metavar="DATA", help=DATA_HELP)]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.")]
Tokenizer = Annotated[Path | None, typer.Option(metavar="FILE", help="A tokenizer.json; default: train one.")]
EvalFraction = Annotated[
    float, typer.Option(min=0, max=0.5, metavar="SHARE", help="Share of documents held out.")
]
EvalEvery = Annotated[int | None, typer.Option(min=1, metavar="STEPS", help="Default: only at the end.")]
SAVE_HELP = "Default: at the end, or when stopped."
SaveEvery = Annotated[int | None, typer.Option(min=1, metavar="STEPS", help=SAVE_HELP)]
Keep = Annotated[int, typer.Option("--keep", min=1, metavar="N", help="Checkpoints kept.")]
Schedule = Annotated[Literal["constant", "cosine"], typer.Option(help="Learning rate schedule.")]
Warmup = Annotated[int, typer.Option(min=0, metavar="N", help="Steps of linear warm-up.")]
ClipNorm = Annotated[float | None, typer.Option(metavar="NORM", help="Sets optimizer.clip_norm.")]
Deterministic = Annotated[
    bool, typer.Option(help="On CUDA: kernels that repeat bit by bit, as resume needs.")
]
TENSORBOARD_HELP = "Write event files; default: if TensorBoard is installed."
TensorBoardOption = Annotated[
    bool | None, typer.Option("--tensorboard/--no-tensorboard", help=TENSORBOARD_HELP)
]
NO_EVENT_FILES = (
    "no event files: TensorBoard is not installed; pip install 'trainfit[tensorboard]', or --no-tensorboard"
)


def register(app: typer.Typer) -> None:
    app.command("train")(run)


def run(
    recipe: RecipeArgument,
    out: Out,
    settings: Settings = None,
    steps: Steps = 100,
    resume: Resume = False,
    data: Data = "stories",
    device: Device = "auto",
    tokenizer: Tokenizer = None,
    eval_fraction: EvalFraction = 0.05,
    eval_every: EvalEvery = None,
    save_every: SaveEvery = None,
    keep_last: Keep = 2,
    schedule: Schedule = "constant",
    warmup_steps: Warmup = 0,
    clip_norm: ClipNorm = None,
    deterministic: Deterministic = True,
    tensorboard: TensorBoardOption = None,
    peak_flops: PeakFlops = None,
    json: Json = False,
    record: RecordFile = None,
) -> int:
    """Train a recipe on data; stop it any time and --resume."""
    if clip_norm is not None:
        settings = [*(settings or []), f"optimizer.clip_norm={clip_norm}"]
    if tensorboard is None:
        tensorboard = is_installed("tensorboard")
        print_notes(() if tensorboard else (NO_EVENT_FILES,))
    requested = read_recipe(recipe, settings)
    from trainfit.api.calls import train_options
    from trainfit.training.folder import how_to_resume

    options = train_options(
        data, out=str(out), steps=steps, resume=resume, device=device, tokenizer=tokenizer and str(tokenizer),
        eval_fraction=eval_fraction, eval_every=eval_every, save_every=save_every, keep=keep_last,
        schedule=schedule, warmup_steps=warmup_steps, deterministic=deterministic, tensorboard=tensorboard,
    )  # fmt: skip
    with resumable(lambda: how_to_resume(out)), work(recipe, settings, json=json, record=record):
        from trainfit.api.calls import train_built
        from trainfit.api.planned import planned

        built, notes = planned(requested, device)
        print_notes(notes)
        summary = train_built(built, notes, options, peak_flops, progress=True)
        try:
            keep(record, "train", built, train=summary.content())
        except OSError as error:
            failure = storage_failure(error)
            if failure is None:
                raise
            saved = "the run itself is saved, --resume --record adds its record"
            raise StorageError(failure, f"{REMEDIES[failure.errno or 0]}; {saved}") from error
    if json:
        print_json(summary)
    else:
        from trainfit.report.results import show_training

        show_training(built, summary)
    return summary.exit_code
