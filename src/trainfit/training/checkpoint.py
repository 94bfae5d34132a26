"""Checkpoints: written atomically, sealed with SHA-256, and verified before they are loaded.

A checkpoint is ``checkpoints/step-00000020/``: ``model-*.safetensors``, ``optimizer-*.safetensors``,
``random-*.safetensors``, ``state.json``, ``run.json`` (recipe and options), ``manifest.json``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainfit.spec.errors import InputError
from trainfit.spec.files import writing
from trainfit.spec.value import parse
from trainfit.step import Step
from trainfit.training import durable, state
from trainfit.training.folder import RUN, existing
from trainfit.training.saved_state import SavedState, check_scaler

SHARD_BYTES = 4 * 2**30
"""Largest file: safetensors copies the tensors of one file to host memory to write them."""
STATE = "state.json"


@dataclass(frozen=True)
class Progress:
    """Steps done, and the last loss."""

    step: int
    loss: float | None


def save(folder: Path, step: Step, progress: Progress, run: dict[str, Any], *, keep: int) -> Path:
    """Write the checkpoint of ``progress.step`` into ``folder``, then remove all but the newest ``keep``.

    Raises:
        FileExistsError: it exists; checkpoints are never overwritten.
        OSError: the disk is full or failed; nothing half-written remains.
    """
    path = folder / f"step-{progress.step:08d}"
    model, shared = state.model_tensors(step)
    optimizer, optimizer_plain = state.optimizer_state(step)
    generators, generators_plain = state.random_state(step.device)
    scaler = None if step.scaler is None else step.scaler.state_dict()
    plain = {"step": progress.step, "loss": progress.loss, "shared": shared, "scaler": scaler}
    with durable.new_folder(path) as work:
        _write(work, "model", model)
        _write(work, "optimizer", optimizer)
        _write(work, "random", generators)
        plain |= {"optimizer": optimizer_plain, "random": generators_plain}
        durable.write_json(work / STATE, plain)
        durable.write_json(work / RUN, run)
    for old in existing(folder)[:-keep]:
        durable.remove_folder(old)
    return path


def load(path: Path, step: Step) -> Progress:
    """Load model, optimizers and random generators from a checkpoint whose bytes have been verified.

    Raises:
        InputError: its values do not fit the step.
    """
    try:
        return _load(path, step)
    except InputError as error:
        raise error.in_file(str(path / STATE)) from None


def _load(path: Path, step: Step) -> Progress:
    plain = parse(SavedState, durable.read_json(path / STATE))
    if path.name != f"step-{plain.step:08d}":
        problem, remedy = "not the step of its folder", "restore it from a copy"
        raise InputError(problem, remedy, field="step", value=plain.step)
    optimizer = _LazyTensors(path, "optimizer", "cpu")
    state.check_optimizer(step, optimizer, plain.optimizer)
    if step.scaler is not None:
        check_scaler(step.scaler.state_dict(), plain.scaler)
    state.load_model(step, _LazyTensors(path, "model", str(step.device)), plain.shared)
    broken = state.first_not_finite(step)
    if broken is not None:
        remedy = "resume from an older checkpoint"
        raise InputError("not finite numbers", remedy, field=broken, file=str(path))
    state.load_optimizer(step, optimizer, plain.optimizer)
    if step.scaler is not None and plain.scaler is not None:
        step.scaler.load_state_dict(plain.scaler)
    state.load_random_state(step.device, _LazyTensors(path, "random", "cpu"), plain.random)
    return Progress(plain.step, plain.loss)


class _LazyTensors(Mapping[str, Tensor]):
    """Tensors of the files of one kind, each read on access."""

    def __init__(self, path: Path, kind: str, device: str):
        self._kind = path / kind
        self._file_of: dict[str, Any] = {}
        for file in sorted(path.glob(f"{kind}-*.safetensors")):
            with _readable(file):
                opened: Any = safe_open(file, framework="pt", device=device)
                self._file_of |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        with _readable(self._kind):
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, ValueError, TypeError) as error:
        problem = f"not safetensors: {error}".partition("\n")[0]
        raise InputError(problem, "restore it from a copy", file=str(file)) from None


def _write(work: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    for number, part in enumerate(_shards(tensors, SHARD_BYTES)):
        own = {name: _contiguous(tensor.detach()) for name, tensor in part.items()}
        file = work / f"{kind}-{number:05d}.safetensors"
        with writing(file):  # Names the file in safetensors' own exception for a full disk.
            save_file(own, file)


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in order, in parts of at most ``max_bytes`` (or one tensor)."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > max_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def _contiguous(tensor: Tensor) -> Tensor:
    """Copy a strided tensor or a view of a larger storage, which safetensors refuses."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
