"""Tensors of several ranks in files of ``torch.distributed.checkpoint`` (DCP), read by any number of ranks.

Each rank writes one file; a tensor that several ranks hold is written once. DCP's index is a pickle: it is
read with a list of the classes that it may hold, and after the folder's checksums were verified.
"""

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from trainfit.spec.errors import InputError
from trainfit.spec.files import writing

INDEX = ".metadata"
INDEX_HOLDS = {
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}  # fmt: skip
"""Module -> names that DCP's index refers to; also torch's dtypes."""


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out_as(target: Tensor, full: Tensor) -> Tensor:
    """Return a whole tensor sharded as ``target``, without communication; unchanged for a plain target."""
    if not isinstance(target, DTensor):
        return full
    # Without a source rank each rank cuts its own copy.
    return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)


def write(work: Path, tensors: Mapping[str, Tensor], group: Any) -> list[Path]:
    """Write the tensors of all ranks into ``work``, and return the files of this rank. A collective.

    Raises:
        OSError: the disk of this rank is full or failed.
        ShardsError: another rank failed.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False)
    writer = dcp.FileSystemWriter(work, sync_files=True)
    writer.fs = files = _Files()
    try:
        dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:  # It is a BaseException, which handlers of Exception would miss.
        if files.failure is not None:
            raise files.failure from None
        causes = [f"rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items())]
        raise ShardsError(f"shards could not be written; {causes[0]}") from error
    return sorted(work.glob(f"__{torch.distributed.get_rank(group)}_*.distcp"))


class ShardsError(RuntimeError):
    """Another rank could not write its shards."""


class _Files(FileSystem):
    """Keeps the OSError of a write, which torch's file format replaces by an error of its own."""

    failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        try:
            with writing(path), super().create_stream(path, mode) as stream:
                plain = stream.write

                def write(data: Any) -> int:
                    try:
                        return plain(data)
                    except OSError as error:
                        self.failure = OSError(error.errno, error.strerror, str(path))
                        raise

                yield _Stream(stream, write)
        except OSError as error:
            self.failure = self.failure or error
            raise


class _Stream:
    """A file whose ``write`` is another function."""

    def __init__(self, file: Any, write: Callable[[Any], int]):
        self._file, self.write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Shards:
    """Tensors of a checkpoint's folder whose bytes were verified."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._reader = _Reader(folder)
        index = self._reader.read_metadata().state_dict_metadata
        self.index = {name: one for name, one in index.items() if isinstance(one, TensorStorageMetadata)}
        """Name -> size, dtype and chunks."""

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill ``targets``, plain or sharded, in place; each rank reads its own parts.

        Raises:
            InputError: the files differ from the index.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        try:
            with warnings.catch_warnings(action="ignore"):  # DCP warns that there is no process group.
                dcp.load(dict(targets), storage_reader=self._reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise _damaged(self._folder, f"{type(cause).__name__}: {cause}") from error


class _Reader(dcp.FileSystemReader):
    """DCP's reader, with an index that can only hold descriptions of tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / INDEX
        try:
            with path.open("rb") as file:
                metadata = _Index(file).load()
            _check(metadata)
        except InputError:
            raise
        except OSError:
            raise
        except Exception as error:
            raise _damaged(path.parent, f"{type(error).__name__}: {error}") from None
        return metadata


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in INDEX_HOLDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"an index does not hold {module}.{name}")


def _check(metadata: Any) -> None:
    """Require tensors only, each covered by its chunks, in files of the folder itself."""
    assert isinstance(metadata, Metadata)
    for name, one in metadata.state_dict_metadata.items():
        assert isinstance(name, str)
        assert isinstance(one, TensorStorageMetadata)
        assert isinstance(one.properties.dtype, torch.dtype)
        covered = sum(torch.Size(chunk.sizes).numel() for chunk in one.chunks)
        assert covered == torch.Size(one.size).numel(), f"{name} is not whole"
    for info in metadata.storage_data.values():
        assert Path(info.relative_path).name == info.relative_path
        assert not info.transform_descriptors


def _damaged(folder: Path, problem: str) -> InputError:
    line = " ".join(problem.split())[:200]
    return InputError(
        f"not shards that trainfit wrote ({line})", "restore it from a copy", file=str(folder / INDEX)
    )
