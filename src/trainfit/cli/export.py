"""``trainfit export``: write a run's weights as a folder that transformers or PEFT loads."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from trainfit.cli import options
from trainfit.cli.options import Json, at_most

RUN_HELP = "The folder that trainfit train --out wrote, or one of its checkpoints."
FOLDER_HELP = "A new folder: weights, config, tokenizer and model card."
MERGE_HELP = (
    "Of an adapter's run: the whole model with the adapter in its weights, or the adapter in PEFT's layout."
)


def run(
    run: Annotated[Path, Argument(metavar="RUN", help=RUN_HELP)],
    folder: Annotated[Path, Argument(metavar="DIR", help=FOLDER_HELP)],
    step: Annotated[
        int | None,
        Option(
            min=0,
            callback=at_most,
            metavar="N",
            help="Of the checkpoint. Default: the best if kept, else the newest.",
        ),
    ] = None,
    merge: Annotated[bool, Option("--merge/--adapter-only", help=MERGE_HELP)] = False,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, Option(help="Of the weights. Default: as the run has them.")
    ] = None,
    max_shard_size: Annotated[str, Option(metavar="SIZE", help="Largest file of weights.")] = "5GB",
    json: Json = False,
) -> None:
    """Write a run's weights as a folder that transformers or PEFT loads."""
    from trainfit.api.exports import export

    with options.only_json(json):
        found = export(run, folder, step=step, merge=merge, dtype=dtype, max_shard_size=max_shard_size)
    if json:
        options.print_json(found)
    else:
        from trainfit.report.results import show_export

        show_export(found)
