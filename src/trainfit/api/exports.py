"""``trainfit.export``: write a run's weights as a folder that transformers or PEFT loads."""

from pathlib import Path
from typing import TYPE_CHECKING

from trainfit.api.results import Exported
from trainfit.report.console import progress as show_progress
from trainfit.spec.errors import InputError
from trainfit.spec.units import format_bytes, read_bytes

if TYPE_CHECKING:
    from trainfit.training.export.result import Dtype


def export(
    run: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    merge: bool = False,
    dtype: "Dtype | None" = None,
    max_shard_size: int | str = "5GB",
) -> Exported:
    """Write a checkpoint of a training run into a new folder, in the layout of the Hugging Face Hub.

    A run that trained an adapter gives PEFT's layout, unless it is merged.

    Args:
        run: the folder that ``train`` wrote, or one of its checkpoints.
        folder: made by the call, and there only when it is complete.
        step: of the checkpoint; None: the one with the best evaluation if kept, else the newest.
        merge: add the adapter to the base's weights, and write the whole model.
        dtype: ``fp32``, ``bf16`` or ``fp16``; None: as the run has them.
        max_shard_size: largest file of weights, such as ``"5GB"``, or in bytes.

    Raises:
        InputError: ``folder`` exists, no such run or checkpoint, or a model that transformers does not have.
        OSError: the disk does not take a file; nothing is left of the folder.
    """
    from trainfit.training.export.export import DTYPES
    from trainfit.training.export.export import export as write

    try:
        limit = read_bytes(str(max_shard_size))
    except ValueError as error:
        raise InputError(
            "not a size", "write it as 5GB", field="max_shard_size", value=max_shard_size
        ) from error
    if dtype is not None and dtype not in DTYPES:
        raise InputError("unknown dtype", f"use {', '.join(DTYPES)}", field="dtype", value=dtype)
    with show_progress(f"reading {run}") as replace:

        def advance(done: int, of: int) -> None:
            replace(f"writing {folder}: {format_bytes(done)} of {format_bytes(of)}")

        found = write(
            Path(run),
            Path(folder),
            step=step,
            merge=merge,
            dtype=dtype,
            max_shard_bytes=limit,
            advance=advance,
        )
    return Exported.model_construct(**dict(found))
