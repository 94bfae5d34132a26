"""Checkpoints: written atomically, sealed with SHA-256, and verified before they are loaded.

A checkpoint is ``checkpoints/step-00000020/``: ``model-*.safetensors``, ``optimizer-*.safetensors``,
``random-*.safetensors``, ``state.json``, ``run.json`` (recipe and options), ``manifest.json``. Several ranks
write ``.metadata`` and ``__RANK_0.distcp`` instead of model and optimizer (shards.py). Any number of ranks
loads both.
"""

from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainfit.models.layers import code_names
from trainfit.parallel.tensor_parallel import fused_parts
from trainfit.spec.errors import InputError
from trainfit.spec.files import writing
from trainfit.spec.parsing.parse import parse
from trainfit.step import Step
from trainfit.training import durable, shards, state
from trainfit.training.folder import RUN, existing, name_of, write_best
from trainfit.training.fused_shards import in_model_order
from trainfit.training.ranks.exchange import Ranks
from trainfit.training.saved_state import Best, SavedState, check_scaler

SHARD_BYTES = 4 * 2**30
"""Largest file: safetensors copies the tensors of one file to host memory to write them."""
STATE = "state.json"


@dataclass(frozen=True)
class Progress:
    """Steps done, the last loss, and the best evaluation."""

    step: int
    loss: float | None
    best: Best | None = None


ALONE = Ranks(None, torch.device("cpu"))  # One process


def save(
    folder: Path, step: Step, progress: Progress, run: dict[str, Any], *, keep: int, ranks: Ranks = ALONE,
    best: int | None = None, queue: Mapping[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    """Write the checkpoint of ``progress.step`` into ``folder``, then remove all but the newest ``keep``.

    Args:
        best: the step whose checkpoint is kept in addition.
        queue: completions that the next steps train on, equal on all ranks; None or empty: there are none.

    Raises:
        FileExistsError: it exists; checkpoints are never overwritten.
        OSError: the disk is full or failed; nothing half-written remains.
    """
    path = folder / name_of(progress.step)
    model, shared = state.model_shards(step) if ranks.several else state.model_tensors(step)
    optimizer, optimizer_plain = state.optimizer_state(step)
    generators, generators_plain = state.random_state(step.device)
    scaler = None if step.scaler is None else step.scaler.state_dict()
    plain = {"step": progress.step, "loss": progress.loss, "shared": shared, "scaler": scaler}
    plain |= {"best": progress.best and progress.best.model_dump()}
    if ranks.several:
        tensors = _prefixed("model", model) | _prefixed("optimizer", optimizer)
        tensors |= _prefixed("reference", _reference(step))
        tensors = in_model_order(tensors, fused_parts(step.model))
        random = (generators, generators_plain)
        _save_shards(path, tensors, optimizer_plain, random, dict(queue or {}), plain, run, ranks)
        ranks.on_first(lambda: _remove_old(folder, keep, best, progress))
        return path
    with durable.new_folder(path) as work:
        _write(work, "model", model)
        _write(work, "optimizer", optimizer)
        _write(work, "reference", _reference(step))
        _write(work, "carried", step.carried)
        plain |= {"optimizer": optimizer_plain, "random": generators_plain}
        _write_rest(work, generators, dict(queue or {}), plain, run)
    _remove_old(folder, keep, best, progress)
    return path


def _reference(step: Step) -> dict[str, Tensor]:
    return {} if step.reference is None else step.reference.tensors


def _write_rest(
    work: Path, generators: dict[str, Tensor], queue: dict[str, Tensor], plain: dict[str, Any],
    run: dict[str, Any],
) -> None:  # fmt: skip
    _write(work, "random", generators)
    _write(work, "queue", queue)
    durable.write_json(work / STATE, plain)
    durable.write_json(work / RUN, run)


def _remove_old(folder: Path, keep: int, best: int | None, progress: Progress) -> None:
    """Remove all but the newest and the best checkpoint, once ``best.json`` names the new best one."""
    if best is not None and progress.best is not None:
        write_best(folder.parent, progress.best.model_dump())
    for old in existing(folder)[:-keep]:
        if old.name != name_of(best):
            durable.remove_folder(old)


def _prefixed(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


def _save_shards(
    path: Path, tensors: dict[str, Tensor], optimizer: dict[str, Any], random: tuple[dict[str, Tensor], Any],
    queue: dict[str, Tensor], plain: dict[str, Any], run: dict[str, Any], ranks: Ranks,
) -> None:  # fmt: skip
    """Write a checkpoint of several ranks: each its shards, rank 0 the rest, once all have succeeded."""
    work = ranks.on_first(lambda: durable.begin_folder(path))
    every_random = ranks.gather(random)
    for scalars in ranks.gather(optimizer["scalars"]):
        optimizer["scalars"] |= scalars
    generators = {
        f"{rank}/{name}" if rank else name: tensor
        for rank, (tensors, _) in enumerate(every_random)
        for name, tensor in tensors.items()
    }
    first, *more = (random for _, random in every_random)
    plain |= {"optimizer": optimizer, "random": first, "more_random": more}
    failure: OSError | None = None
    other: shards.ShardsError | None = None
    sums: dict[str, str] = {}
    try:
        try:
            files = shards.write(work, tensors, ranks.group)
            sums = {file.name: durable.sha256(file) for file in files}
            if ranks.is_first:
                _write_rest(work, generators, queue, plain, run)
        except OSError as error:
            failure = error
        except shards.ShardsError as error:
            other = error
        ranks.check_all(failure)
        if other is not None:
            raise other
        known = dict(ChainMap(*ranks.gather(sums)))
        ranks.on_first(lambda: durable.finish_folder(work, path, known))
    except BaseException as error:
        if ranks.is_first:
            durable.abandon_folder(work, path, error)
        raise


def load(path: Path, step: Step, ranks: Ranks = ALONE) -> Progress:
    """Load model, optimizers and random generators from a checkpoint whose bytes have been verified.

    Raises:
        InputError: its values do not fit the step.
    """
    try:
        return _load(path, step, ranks)
    except InputError as error:
        raise error.in_file(str(path / STATE)) from None


def _load(path: Path, step: Step, ranks: Ranks) -> Progress:
    plain = parse(SavedState, durable.read_json(path / STATE))
    if path.name != f"step-{plain.step:08d}":
        problem, remedy = "not the step of its folder", "restore it from a copy"
        raise InputError(problem, remedy, field="step", value=plain.step)
    saved = shards.Shards(path) if (path / shards.INDEX).is_file() else None
    elsewhere = state.kept_by_others(step)
    scalars = {key: one for key, one in plain.optimizer.scalars.items() if _owner(key) not in elsewhere}
    optimizer_plain = plain.optimizer.model_copy(update={"scalars": scalars})
    if saved is None:
        optimizer = _LazyTensors(path, "optimizer", "cpu", without=elsewhere)
    else:
        optimizer = _optimizer_of(saved, step, elsewhere)
    state.check_optimizer(step, optimizer, optimizer_plain)
    if step.scaler is not None:
        check_scaler(step.scaler.state_dict(), plain.scaler)
    if saved is None:
        state.load_model(step, _LazyTensors(path, "model", str(step.device)), plain.shared)
    else:
        _load_model(saved, step, plain.shared)
    _load_reference(path, saved, step)
    _load_carried(path, step)
    broken = state.first_not_finite(step)
    if broken is not None:
        remedy = "resume from an older checkpoint"
        raise InputError("not finite numbers", remedy, field=broken, file=str(path))
    state.load_optimizer(step, optimizer, optimizer_plain)
    if step.scaler is not None and plain.scaler is not None:
        step.scaler.load_state_dict(plain.scaler)
    _load_random(path, plain, step, ranks)
    return Progress(plain.step, plain.loss, plain.best)


def queue_of(path: Path) -> Mapping[str, Tensor]:
    """Return the completions that a checkpoint holds for the next steps, read on access; empty: none."""
    return _LazyTensors(path, "queue", "cpu")


def _load_reference(path: Path, saved: shards.Shards | None, step: Step) -> None:
    """Fill the reference's copy; InputError unless names, shapes and dtypes are those of what trains."""
    own = _reference(step)
    if saved is None:
        lazy = _LazyTensors(path, "reference", str(step.device))
        state.check_names(set(own), set(lazy))
        for name, tensor in own.items():
            found = lazy[name]
            state.check_form(name, tensor, found.shape, found.dtype)
            shards.local(tensor).copy_(shards.local(shards.laid_out_as(tensor, found)))
    else:
        forms = {name: form for name, form in saved.index.items() if name.startswith("reference/")}
        state.check_names(set(own), {name.removeprefix("reference/") for name in forms})
        for name, tensor in own.items():
            form = forms[f"reference/{name}"]
            state.check_form(name, tensor, form.size, form.properties.dtype)
        if own:
            saved.read_into(in_model_order(_prefixed("reference", own), fused_parts(step.model)))
    for name, tensor in own.items():
        if not bool(torch.isfinite(shards.local(tensor)).all()):
            remedy = "resume from an older checkpoint"
            raise InputError("not finite numbers", remedy, field=f"reference {name}", file=str(path))


def _load_carried(path: Path, step: Step) -> None:
    """Fill what techniques carry from step to step; InputError unless names, shapes and dtypes agree."""
    lazy = _LazyTensors(path, "carried", str(step.device))
    state.check_names(set(step.carried), set(lazy))
    for name, tensor in step.carried.items():
        found = lazy[name]
        state.check_form(name, tensor, found.shape, found.dtype)
        if not bool((found.isfinite() & (found >= 0)).all()):
            remedy = "resume from an older checkpoint"
            raise InputError("negative, or no finite number", remedy, field=f"carried {name}", file=str(path))
        tensor.copy_(found)


def _load_random(path: Path, plain: SavedState, step: Step, ranks: Ranks) -> None:
    """Set this rank's random generators; with another number of ranks they start anew."""
    generators = _LazyTensors(path, "random", "cpu")
    if 1 + len(plain.more_random) != ranks.world_size:
        return
    if not ranks.rank:
        state.load_random_state(step.device, generators, plain.random)
        return
    prefix = f"{ranks.rank}/"
    own = {name.removeprefix(prefix): generators[name] for name in generators if name.startswith(prefix)}
    state.load_random_state(step.device, own, plain.more_random[ranks.rank - 1])


def _load_model(saved: shards.Shards, step: Step, shared: Mapping[str, str]) -> None:
    """Fill the model with the shards; InputError unless names, shapes and dtypes are the model's."""
    own = step.model.state_dict()
    names = {name.removeprefix("model/") for name in saved.index if name.startswith("model/")}
    state.check_names(set(own), names | set(shared))
    targets = {name: own[name] for name in names}
    codes = code_names(step.model)
    for name, tensor in targets.items():
        form = saved.index[f"model/{name}"]
        if name in codes and form.properties.dtype != tensor.dtype:
            # Codes have one dtype sharded and another whole. Whole targets can be filled from both kinds.
            if isinstance(tensor, DTensor):
                problem = "quantised codes that were saved whole cannot be read into shards"
                raise InputError(
                    problem, "resume with the earlier parallel.strategy", field="parallel.strategy"
                )
            targets[name] = tensor = tensor.view(form.properties.dtype)
        state.check_form(name, tensor, form.size, form.properties.dtype)
    saved.read_into(in_model_order(_prefixed("model", targets), fused_parts(step.model)))


def _owner(path: str) -> str:
    """Return the parameter of ``PARAMETER/KEY``."""
    return path.rpartition("/")[0]


def _optimizer_of(saved: shards.Shards, step: Step, elsewhere: Collection[str]) -> dict[str, Tensor]:
    """Return the state of the parameters that this rank keeps, sharded as they are."""
    parameters = dict(step.model.named_parameters())
    targets: dict[str, Tensor] = {}
    for path, form in saved.index.items():
        kind, _, name = path.partition("/")
        if kind == "optimizer" and _owner(name) not in elsewhere:
            parameter = parameters.get(_owner(name))
            like = torch.empty(form.size)
            if parameter is not None and form.size == parameter.shape:
                like = parameter.detach()
            targets[name] = torch.empty_like(like, dtype=form.properties.dtype)
    saved.read_into(in_model_order(_prefixed("optimizer", targets), fused_parts(step.model)))
    return targets


class _LazyTensors(Mapping[str, Tensor]):
    """Tensors of the files of one kind, each read on access."""

    def __init__(self, path: Path, kind: str, device: str, without: Collection[str] = ()):
        """Open the files; ``without``: parameters whose state is not wanted."""
        self._kind = path / kind
        self._file_of: dict[str, Any] = {}
        for file in sorted(path.glob(f"{kind}-*.safetensors")):
            with readable(file):
                opened: Any = safe_open(file, framework="pt", device=device)
                names = [name for name in opened.keys() if _owner(name) not in without]  # noqa: SIM118
                self._file_of |= dict.fromkeys(names, opened)

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        with readable(self._kind):
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Report the errors of the safetensors library as an InputError that names the file."""
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
