"""Checkpoints: written beside their place, sealed with SHA-256, renamed; believed only after every byte is checked.

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
from trainfit.spec.storage import writing
from trainfit.spec.value import parse
from trainfit.step import Step
from trainfit.train import durable, state
from trainfit.train.layout import RUN, existing
from trainfit.train.saved_state import SavedState, check_scaler

SHARD_BYTES = 4 * 2**30
"""A file's most bytes: safetensors copies one file's tensors to host memory to write them."""
STATE = "state.json"


@dataclass(frozen=True)
class Progress:
    """How far a run is: steps done, and the last loss."""

    step: int
    loss: float | None


def save(folder: Path, step: Step, progress: Progress, run: dict[str, Any], *, keep: int) -> Path:
    """Write the checkpoint of ``progress.step`` into ``folder``, then remove all but the newest ``keep``.

    Raises:
        FileExistsError: it is already there; checkpoints are never overwritten.
        OSError: the disk does not take it; nothing half-written is left.
    """
    path = folder / f"step-{progress.step:08d}"
    model, shared = state.model_tensors(step)
    optimizer, optimizer_plain = state.optimizer_state(step)
    generators, generators_plain = state.random_state(step.device)
    with durable.new_folder(path) as work:
        _write(work, "model", model)
        _write(work, "optimizer", optimizer)
        _write(work, "random", generators)
        plain = {
            "step": progress.step,
            "loss": progress.loss,
            "shared": shared,
            "optimizer": optimizer_plain,
            "scaler": None if step.scaler is None else step.scaler.state_dict(),
            "random": generators_plain,
        }
        durable.write_json(work / STATE, plain)
        durable.write_json(work / RUN, run)
    for old in existing(folder)[:-keep]:
        durable.remove_folder(old)
    return path


def check(path: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint; what ``run.json`` says.

    Raises:
        InputError: naming the damaged file.
    """
    durable.check_folder(path)
    run = durable.read_json(path / RUN)
    if not isinstance(run, dict):
        raise InputError("not what trainfit wrote", "restore it from a copy", file=str(path / RUN))
    return run


def load(path: Path, step: Step) -> Progress:
    """Bring ``step`` and the random generators to where the checkpoint was saved. ``check`` it first.

    Raises:
        InputError: its values are not such a step's, whoever wrote them.
    """
    file = str(path / STATE)
    plain = parse(SavedState, durable.read_json(path / STATE), file=file)
    if path.name != f"step-{plain.step:08d}":
        raise InputError(
            "not the step of its folder", "restore it from a copy", field="step", value=plain.step, file=file
        )
    optimizer = _Lazy(path, "optimizer", "cpu")
    state.check_optimizer(step, optimizer, plain.optimizer, file)
    if step.scaler is not None:
        check_scaler(step.scaler.state_dict(), plain.scaler, file)
    state.load_model(step, _Lazy(path, "model", str(step.device)), plain.shared)
    broken = state.first_not_finite(step)
    if broken is not None:
        raise InputError(
            "not finite numbers", "resume from an older checkpoint", field=broken, file=str(path)
        )
    state.load_optimizer(step, optimizer, plain.optimizer)
    if step.scaler is not None and plain.scaler is not None:
        step.scaler.load_state_dict(plain.scaler)
    state.load_random_state(step.device, _Lazy(path, "random", "cpu"), plain.random, file)
    return Progress(plain.step, plain.loss)


class _Lazy(Mapping[str, Tensor]):
    """The tensors of one kind's files, each read when it is asked for."""

    def __init__(self, path: Path, kind: str, device: str):
        self._kind = path / kind
        self._file_of: dict[str, Any] = {}
        for file in sorted(path.glob(f"{kind}-*.safetensors")):
            with self._readable(file):
                opened: Any = safe_open(file, framework="pt", device=device)
                self._file_of |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        with self._readable(self._kind):
            return file.get_tensor(name)

    @staticmethod
    @contextmanager
    def _readable(file: Path) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, ValueError, TypeError) as error:
            problem = f"not safetensors: {error}".partition("\n")[0]
            raise InputError(problem, "restore it from a copy", file=str(file)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _write(work: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    for number, part in enumerate(state.shards(tensors, SHARD_BYTES)):
        own = {name: _on_its_own(tensor.detach()) for name, tensor in part.items()}
        file = work / f"{kind}-{number:05d}.safetensors"
        with writing(file):  # safetensors has an exception of its own for a full disk.
            save_file(own, file)


def _on_its_own(tensor: Tensor) -> Tensor:
    """safetensors takes no views of a larger storage and no strides; such a tensor is copied."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
