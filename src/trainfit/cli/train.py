"""``trainfit train``: a recipe trained on data, with progress, evaluation, logs, checkpoints and resume."""

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
    read_recipe,
    tell,
    work,
)
from trainfit.spec.optional import is_installed
from trainfit.spec.storage import REMEDIES, StorageError, storage_failure
from trainfit.training.stop import resumable

Out = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="The run's folder: checkpoints, logs, tokenizer.")
]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Optimizer steps of the whole run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the folder's newest checkpoint.")]
Data = Annotated[
    str, typer.Option(metavar="DATA", help="stories, stories:N, hub:NAME, a text file or a folder of them.")
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.")]
Tokenizer = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A tokenizer.json; else one is trained.")
]
EvalFraction = Annotated[
    float, typer.Option(min=0, max=0.5, metavar="SHARE", help="Share of documents kept for evaluation.")
]
EvalEvery = Annotated[int | None, typer.Option(min=1, metavar="STEPS", help="Default: only at the end.")]
SaveEvery = Annotated[
    int | None, typer.Option(min=1, metavar="STEPS", help="Default: at the end, or when stopped.")
]
Schedule = Annotated[Literal["constant", "cosine"], typer.Option(help="Of the learning rate.")]
Warmup = Annotated[
    int, typer.Option("--warmup-steps", min=0, metavar="N", help="Steps of rising learning rate.")
]
ClipNorm = Annotated[
    float | None, typer.Option(metavar="NORM", help="Sets the recipe's optimizer.clip_norm.")
]
Deterministic = Annotated[
    bool, typer.Option(help="On CUDA: kernels that repeat bit by bit, as resume needs.")
]
TensorBoardOption = Annotated[
    bool | None,
    typer.Option("--tensorboard/--no-tensorboard", help="Write event files; default: where it is installed."),
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
    keep_last: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="Checkpoints kept.")] = 2,
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
        tell(() if tensorboard else (NO_EVENT_FILES,))
    asked = read_recipe(recipe, settings)
    from trainfit.api.calls import train_options
    from trainfit.training.folder import how_to_resume

    options = train_options(
        data, out=str(out), steps=steps, resume=resume, device=device, tokenizer=tokenizer and str(tokenizer),
        eval_fraction=eval_fraction, eval_every=eval_every, save_every=save_every, keep=keep_last, schedule=schedule,
        warmup_steps=warmup_steps, deterministic=deterministic, tensorboard=tensorboard,
    )  # fmt: skip
    with resumable(lambda: how_to_resume(out)), work(recipe, settings, json=json, record=record):
        from trainfit.api.calls import train_built
        from trainfit.api.planned import planned

        asked, said = planned(asked, device)
        tell(said)
        summary = train_built(asked, said, options, peak_flops, progress=True)
        try:
            keep(record, "train", asked, train=summary.content())
        except OSError as error:
            failure = storage_failure(error)
            if failure is None:
                raise
            remedy = (
                f"{REMEDIES[failure.errno or 0]}; the run itself is saved, --resume --record adds its record"
            )
            raise StorageError(failure, remedy) from error
    if json:
        print_json(summary)
    else:
        from trainfit.report.results import show_training

        show_training(asked, summary)
    return summary.exit_code
