"""Export a run's checkpoint as a folder that transformers or PEFT loads."""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch

from trainfit.models.weights.folder import adapter_base
from trainfit.spec.errors import InputError
from trainfit.spec.files import REMEDIES, StorageError, write_text, writing
from trainfit.spec.recipe import RANDOM
from trainfit.spec.units import format_bytes
from trainfit.training import durable
from trainfit.training.export import hub_files
from trainfit.training.export.hub_config import hub_config
from trainfit.training.export.model_card import CARD, model_card
from trainfit.training.export.peft_layout import STEM, VIRTUAL, PeftLayout
from trainfit.training.export.result import MAX_SHARD_BYTES, Dtype, Export
from trainfit.training.export.safetensors_file import Entry, write_sharded
from trainfit.training.export.saved_run import SavedRun, open_saved
from trainfit.training.export.trained_model import TrainedWeights
from trainfit.training.export.whole_model import WholeModel
from trainfit.virtual.quiet_imports import quiet_imports

DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip


def export(
    run_folder: Path,
    folder: Path,
    *,
    step: int | None = None,
    merge: bool = False,
    dtype: Dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    advance: Callable[[int, int], None] = lambda done, of: None,
) -> Export:
    """Write a checkpoint of a run into ``folder``, which is made, and appears only when it is complete.

    Args:
        run_folder: of the run, or of one of its checkpoints.
        step: of the checkpoint; None: the one with the best evaluation if the run kept it, else the newest.
        merge: add the adapter to the base's weights, and write the whole model.
        dtype: of the weights; None: as the run has them.
        max_shard_bytes: largest file of weights.
        advance: called with the bytes of weights that are written, and of all.

    Raises:
        InputError: ``folder`` exists, no such run or checkpoint, or a model that transformers does not have.
        OSError: the disk is full or failed; nothing is left of the folder.
    """
    _check_new(folder)
    run = open_saved(run_folder, step)
    _check_outside(folder, run.checkpoint)
    _check_merge(run, merge=merge)
    with quiet_imports():
        content = _Content(run, merge=merge, dtype=dtype)
        num_bytes = sum(entry.nbytes for entry in content.entries.values())
        _check_space(folder, num_bytes)
        written = 0

        def count(more: int) -> None:
            nonlocal written
            written += more
            advance(written, num_bytes)

        with durable.new_folder(folder, sealed=False) as work:
            write_sharded(
                work, content.entries, content.limit(max_shard_bytes), stem=content.stem, advance=count
            )
            notes = content.write_rest(work, folder.resolve().name)
            files = tuple(sorted(path.name for path in work.iterdir()))
    return Export(
        folder=str(folder), kind=content.kind, step=run.step, dtype=content.dtype_name,
        parameters=content.num_parameters, weights_bytes=num_bytes, files=files, base=_base(run),
        merged=content.kind == "model" and run.recipe.adapter is not None, notes=notes,
    )  # fmt: skip


class _Content:
    """The part of a run that is written: its whole model, or its adapter alone."""

    def __init__(self, run: SavedRun, *, merge: bool, dtype: Dtype | None):
        self._run, self._config, self._dtype = run, hub_config(run.recipe.model), dtype
        hub_files.check_loads(self._config)
        self._weights = weights = TrainedWeights(run)
        wanted = None if dtype is None else DTYPES[dtype]
        self._adapter: PeftLayout | None = None
        self._is_untied = False
        if run.recipe.adapter is not None and not merge:
            self._adapter = PeftLayout(weights)
            self.entries = self._adapter.entries(wanted)
        else:
            whole = WholeModel(weights)
            self._is_untied, self.entries = whole.is_untied, whole.entries(wanted)

    @property
    def kind(self) -> Literal["model", "adapter"]:
        return "model" if self._adapter is None else "adapter"

    @property
    def stem(self) -> str:
        """Name of the weights' files without suffix."""
        return "model" if self._adapter is None else STEM

    @property
    def num_parameters(self) -> int:
        return sum(entry.shape.numel() for entry in self.entries.values())

    @property
    def dtype_name(self) -> str:
        return str(_of_most(self.entries)).removeprefix("torch.")

    def limit(self, max_shard_bytes: int) -> int:
        """Return the largest size of a file; PEFT reads a single one."""
        return max_shard_bytes if self._adapter is None else 2**62

    def write_rest(self, work: Path, name: str) -> tuple[str, ...]:
        """Write config, tokenizer and model card; return the notes."""
        special = hub_files.special_tokens(self._run, self._config)
        if self._adapter is None:
            most = _of_most(self.entries)
            hub_files.write_config(work, self._config, most, special, is_untied=self._is_untied)
            hub_files.write_generation_config(work, special, _base(self._run))
        else:
            with writing(work):
                self._adapter.config(_base(self._run)).save_pretrained(work)
        hub_files.write_tokenizer(work, self._run, special, hub_files.max_length(self._config))
        notes = tuple(filter(None, (*self._notes(), hub_files.tokenizer_note(work, self._run))))
        card = model_card(
            self._run, name=name, kind=self.kind, base=_base(self._run), notes=notes,
            num_parameters=self.num_parameters, dtype=self.dtype_name,
        )  # fmt: skip
        write_text(work / CARD, card)
        return notes

    def _notes(self) -> Iterator[str]:
        """Yield notes for users of the weights."""
        recipe, is_whole = self._run.recipe, self._adapter is None
        if (newer := self._run.newer) is not None:
            yield f"step {self._run.step:,} is not the newest checkpoint, which is of step {newer:,}"
        if _base(self._run) is None and not is_whole:
            yield (
                "the adapter was trained on random weights, which only the run's checkpoint has: --merge "
                "writes base and adapter as one model"
            )
        if recipe.base is not None and is_whole:
            yield f"the base was {recipe.base} while it was trained; its weights here are dequantised"
        elif recipe.base is not None:
            yield f"the base was {recipe.base} while the adapter was trained: load it quantised alike"
        if is_whole and self._weights.has_masters:
            if self._dtype == "fp32":
                yield "weights are the optimizer's fp32 master weights"
            else:
                yield "weights are those that the model computed with; --dtype fp32 writes the master weights"
        if self._is_untied:
            yield "the adapter changed one of two tied weights: tie_word_embeddings is false"


def _check_new(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        problem = "already there, and nothing is ever overwritten"
        raise InputError(problem, "name a new folder", field="DIR", value=str(folder))


def _check_outside(folder: Path, checkpoint: Path) -> None:
    if checkpoint.resolve() in folder.resolve().parents:
        problem = "lies in a checkpoint, which is never changed"
        raise InputError(problem, "name another folder", field="DIR", value=str(folder))


def _check_merge(run: SavedRun, *, merge: bool) -> None:
    adapter = run.recipe.adapter
    if merge and adapter is None:
        problem, remedy = "the run trained whole weights and no adapter", "leave --merge out"
        raise InputError(problem, remedy, field="merge", value=True)
    if merge and adapter is not None and adapter.kind in VIRTUAL:
        problem = f"{adapter.kind} trains virtual tokens, which are in front of the text and in no weight"
        raise InputError(problem, "leave --merge out, and load it with PEFT", field="merge", value=True)


def _check_space(folder: Path, num_bytes: int) -> None:
    """Refuse, before long work, weights that the disk has no room for."""
    parent = next(path for path in folder.absolute().parents if path.is_dir())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        remedy = f"the weights need {format_bytes(num_bytes)}, and {format_bytes(free)} are free"
        raise StorageError(full, f"{remedy}; {REMEDIES[errno.ENOSPC]}")


def _of_most(entries: Mapping[str, Entry]) -> torch.dtype:
    """Return the floating dtype of most parameters."""
    sizes = Counter[torch.dtype]()
    for entry in entries.values():
        sizes[entry.dtype] += entry.shape.numel() if entry.dtype.is_floating_point else 0
    return sizes.most_common(1)[0][0]


def _base(run: SavedRun) -> str | None:
    """Return the weights that the run began with; None: random ones."""
    weights = run.recipe.model.weights
    if weights == RANDOM:
        return None
    # A run that went on from an adapter has that adapter's base.
    return (adapter_base(Path(weights)) if Path(weights).is_dir() else None) or weights
