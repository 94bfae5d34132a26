"""``trainfit train``: a recipe trained on data, with progress, evaluation, logs, checkpoints and resume."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainfit.cli.options import (
    Json,
    PeakFlops,
    RecipeArgument,
    RecordFile,
    Settings,
    keep,
    planned,
    print_json,
    read_recipe,
    tell,
    work,
)
from trainfit.spec.optional import is_installed
from trainfit.spec.storage import REMEDIES, StorageError, storage_failure
from trainfit.training.layout import how_to_go_on
from trainfit.training.stop import resumable

if TYPE_CHECKING:
    from trainfit.spec.recipe import Recipe
    from trainfit.training.observer import TrainSummary
    from trainfit.training.options import TrainOptions

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
PEAK_IS = {"cuda-allocated": "allocated on the GPU", "live-tensors": "of live tensors"}


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
    options = _options(
        data, out=str(out), steps=steps, resume=resume, device=device, tokenizer=tokenizer and str(tokenizer),
        eval_fraction=eval_fraction, eval_every=eval_every, save_every=save_every, keep=keep_last, schedule=schedule,
        warmup_steps=warmup_steps, deterministic=deterministic, tensorboard=tensorboard,
    )  # fmt: skip
    with resumable(lambda: how_to_go_on(out)), work(recipe, settings, json=json, record=record):
        asked, said = planned(asked, device)
        tell(said)
        summary = _train(asked, options, peak_flops)
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
        show(asked, summary)
    return summary.exit_code


def _options(data: str, **fields: Any) -> "TrainOptions":
    from trainfit.spec.value import parse
    from trainfit.training.options import TrainOptions, data_from

    return parse(TrainOptions, {**fields, "data": data_from(data).model_dump()})


def _train(recipe: "Recipe", options: "TrainOptions", peak_flops: float | None) -> "TrainSummary":
    from trainfit.cli.flops import step_flops
    from trainfit.training.board import TensorBoard
    from trainfit.training.log import JsonlLog
    from trainfit.training.loop import train
    from trainfit.training.observer import StepFlops
    from trainfit.training.progress import ProgressBar

    model, hardware, peak = step_flops(
        recipe, options.device, peak_flops, deterministic=options.deterministic
    )
    flops = StepFlops(model_flops=model, hardware_flops=hardware, peak_flops_per_s=peak)
    bar = ProgressBar()
    observers = [bar, JsonlLog(bar.note), *([TensorBoard()] if options.tensorboard else [])]
    return train(recipe, options, flops=flops, observers=observers)


def show(recipe: "Recipe", summary: "TrainSummary") -> None:
    """The run for people: how it ended, losses, speed, memory, where it lies."""
    from trainfit.cli.show import console, heading, rows
    from trainfit.cli.words import describe, quantity
    from trainfit.spec.units import format_seconds

    out = console()
    heading(out, describe(recipe))
    good = summary.status in {"done", "stopped"}
    message = f": {summary.message}" if summary.message else ""
    out.print(f"{summary.status.upper()}{message}", style="bold green" if good else "bold red")
    lines = [
        [
            "steps",
            f"{summary.steps:,}",
            f"of {summary.run.steps:,}, {summary.steps - summary.first_step:,} of them now",
        ]
    ]
    if summary.losses:
        lines.append(["loss", f"{summary.losses[-1]:.4f}", f"from {summary.losses[0]:.4f}"])
    if summary.eval_perplexity is not None:
        lines.append(["perplexity", f"{summary.eval_perplexity:.4g}", "of documents kept from training"])
    if summary.step_s is not None:
        lines.append(
            [
                "time a step",
                format_seconds(summary.step_s),
                f"median; {format_seconds(summary.wall_s)} in all",
            ]
        )
    for name, words in (("tokens_per_s", "tokens a second"), ("mfu", "MFU"), ("hfu", "HFU")):
        if getattr(summary, name) is not None:
            lines.append([words, quantity(name, getattr(summary, name)), ""])
    if summary.peak_memory_bytes is not None:
        lines.append(
            [
                "peak memory",
                quantity("_bytes", summary.peak_memory_bytes),
                PEAK_IS.get(summary.peak_memory_is or "", ""),
            ]
        )
    rows(out, lines, "left", "right", "wrap")
    if summary.checkpoint:
        out.print(f"  checkpoint  {summary.checkpoint}", soft_wrap=True)
