"""``torch.load``, ``torch.save`` and safetensors' files in user code.

Files are read on the host, mapped into memory; tensors of the device are moved there. Nothing is written: an
object that the code saves is kept by its path, without unknown values, until the code loads it. Functions
that ask for a saved path, move, copy or remove it find the kept object: a checkpoint may be written to
another name first.
"""

import io
import os
import pickle
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, _utils, _weights_only_unpickler, serialization
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

from trainfit.spec.errors import InputError
from trainfit.user.placement import CUDA, device_of, names_cuda
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_tensors import carried_values, on_host

TO_DEVICE = "_trainfit_to_device"
"""Set on a host storage whose tensors are to be rebuilt on the device."""
NEWER_REBUILD = "_rebuild_tensor_v3"
"""Rebuilds tensors of dtypes without a storage class, such as float8."""
NOT_KEPT = (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError)
"""Raised for objects that cannot be pickled, such as DTensors; loading them is refused."""
WROTE_NOTHING = "torch.save wrote nothing: there are no values to keep"
SAFETENSORS = "safetensors wrote nothing: there are no values to keep"


@contextmanager
def files(notes: set[str], on_saved: Callable[[Any], None]) -> Iterator[None]:
    """Replace ``torch.load`` and ``torch.save``; ``on_saved`` is called with each saved object."""
    loader = _Loader()
    saved = _Saved(loader, notes, on_saved)
    rebuild = loader.rebuilding(_utils._rebuild_tensor)
    newer = loader.rebuilding_newer(getattr(_utils, NEWER_REBUILD))
    allowed = _weights_only_unpickler._get_allowed_globals
    with ExitStack() as stack:
        for owner, name, function in (
            *((owner, "save", saved.saving(torch.save)) for owner in (torch, serialization)),
            *((owner, "load", saved.loading(torch.load)) for owner in (torch, serialization)),
            (serialization, "default_restore_location", _restoring(serialization.default_restore_location)),
            (torch.storage._StorageBase, "cuda", _moved_later),
            (_utils, "_rebuild_tensor", rebuild),
            (_utils, NEWER_REBUILD, newer),
            (
                _weights_only_unpickler,
                "_get_allowed_globals",
                lambda: {**allowed(), f"torch._utils.{NEWER_REBUILD}": newer},
            ),
        ):
            stack.enter_context(replaced(owner, name, function))
        stack.enter_context(replaced(torch.UntypedStorage, "data_ptr", _addressed))
        for owner, name, function in saved.of_paths():
            stack.enter_context(replaced(owner, name, function))
        for name, function in saved.of_safetensors().items():
            if hasattr(safetensors.torch, name):  # Each release of safetensors has some of these names.
                stack.enter_context(replaced(safetensors.torch, name, function))
        yield


ADDRESS = torch.UntypedStorage.data_ptr


def _addressed(storage: Any) -> int:
    """Return a storage's address; for a fake one, a number that no other storage has."""
    if storage.device.type == "meta":  # Of a fake tensor on the host: 0, with a warning.
        return storage._cdata
    try:
        return ADDRESS(storage)
    except RuntimeError:
        return storage._cdata


def _restoring(original: Callable[..., Any]) -> Callable[..., Any]:
    def restore(storage: Any, location: Any) -> Any:
        return _moved_later(storage) if names_cuda(location) else original(storage, location)

    return restore


def _moved_later(storage: Any, *_: Any, **__: Any) -> Any:
    """Note that a storage belongs on the device, in place of ``storage.cuda()``."""
    setattr(_untyped(storage), TO_DEVICE, True)
    return storage


def _untyped(storage: Any) -> Any:
    """Return a storage without its type, whose queries warn."""
    return getattr(storage, "_untyped_storage", storage)


class _Loader:
    """Reads files on the host, outside the dispatch modes, and moves tensors inside them."""

    def __init__(self) -> None:
        self._modes: list[Any] = []
        self._moved: dict[int, Tensor] = {}  # Storage of the load that runs -> its copy on the device

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Leave the dispatch modes during a load."""
        outer = self._modes, self._moved
        with _disable_current_modes() as modes:
            self._modes, self._moved = modes or outer[0], {}
            try:
                yield
            finally:
                self._modes, self._moved = outer

    def rebuilding(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Rebuild a tensor around a host storage as a real one, or on the device if it belongs there."""

        def rebuild(storage: Any, *layout: Any) -> Tensor:
            if _untyped(storage).device.type != "cpu":
                return original(storage, *layout)
            return self._placed(on_host(original, (storage, *layout), {}))

        return rebuild

    def rebuilding_newer(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """As ``rebuilding`` for the function that restores gradients and hooks too."""

        def rebuild(storage: Any, *rest: Any, **more: Any) -> Tensor:
            if _untyped(storage).device.type != "cpu":
                return original(storage, *rest, **more)
            host = on_host(original, (storage, *rest), more)
            return self._placed(host.detach()).requires_grad_(host.requires_grad)

        return rebuild

    def _placed(self, host: Tensor) -> Tensor:
        storage = host.untyped_storage()
        if not hasattr(storage, TO_DEVICE):
            return host
        if storage._cdata not in self._moved:
            length = storage.nbytes() // host.element_size()
            whole = torch.empty(0, dtype=host.dtype).set_(storage, 0, (length,), (1,))
            with self._in_modes():
                self._moved[storage._cdata] = whole.to(CUDA)
        with self._in_modes():
            return self._moved[storage._cdata].as_strided(host.shape, host.stride(), host.storage_offset())

    @contextmanager
    def _in_modes(self) -> Iterator[None]:
        """Enter the dispatch modes again that ``reading`` has left."""
        for mode in reversed(self._modes):
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in self._modes:
                _pop_mode()


class _SavedTensor(NamedTuple):
    storage: int  # Position among the saved storages
    layout: tuple[Any, ...]  # Storage offset, shape, strides
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool


class _Saved:
    """Objects that the code saved, pickled, with tensors kept as layouts and known values."""

    def __init__(self, loader: _Loader, notes: set[str], on_saved: Callable[[Any], None]):
        self._loader, self._notes, self._on_saved = loader, notes, on_saved
        self._files: dict[Any, _SavedFile | None] = {}
        """By path or buffer; None: the object could not be kept."""

    def saving(self, write: Callable[..., Any]) -> Callable[..., None]:
        """Return a function in place of ``torch.save``."""

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(obj, torch.UntypedStorage | torch.TypedStorage):  # pickle of a host tensor
                on_host(write, (obj, f, *args), kwargs)
                return
            self._notes.add(WROTE_NOTHING)
            self._keep(obj, _key(f))

        return save

    def _keep(self, obj: Any, key: Any) -> None:
        self._on_saved(obj)
        try:
            self._files[key] = _SavedFile(obj)
        except NOT_KEPT:
            self._files[key] = None
            self._notes.add(
                f"the object saved as {_named(key)} could not be kept: the code cannot load it again"
            )

    def _found(self, f: Any) -> "_SavedFile | None":
        """Return the object saved as a file; None: none was.

        Raises:
            InputError: the saved object could not be kept.
        """
        key = _key(f)
        found = self._files.get(key)
        if found is None and key in self._files:
            raise InputError(
                "it was saved in this trace, as an object that cannot be pickled on the virtual GPU",
                "save state dicts of plain tensors, or do not load it again",
                file=_named(key),
            )
        return found

    def of_paths(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Return functions in place of those that ask for, move, copy or remove a path.

        ``os.path`` and ``pathlib`` ask by ``os.stat``.
        """
        query: Any = os.stat

        def status(path: Any, *args: Any, **kwargs: Any) -> Any:
            key = _key(path) if self._files and kwargs.get("dir_fd") is None else None
            return _status(self._files[key]) if key in self._files else query(path, *args, **kwargs)

        def moving(original: Callable[..., Any]) -> Callable[..., Any]:
            def move(src: Any, dst: Any, **kwargs: Any) -> Any:
                if _key(src) in self._files:
                    self._files[_key(dst)] = self._files.pop(_key(src))
                    return
                original(src, dst, **kwargs)
                self._moved(_key(src), _key(dst))

            return move

        def removing(original: Callable[..., Any]) -> Callable[..., Any]:
            def remove(path: Any, **kwargs: Any) -> None:
                if _key(path) in self._files and kwargs.get("dir_fd") is None:
                    del self._files[_key(path)]
                else:
                    original(path, **kwargs)

            return remove

        def copying(original: Callable[..., Any]) -> Callable[..., Any]:
            def copy(src: Any, dst: Any, **kwargs: Any) -> Any:
                target = os.path.join(dst, os.path.basename(src)) if os.path.isdir(dst) else dst
                if _key(src) not in self._files:
                    self._files.pop(_key(target), None)
                    return original(src, dst, **kwargs)
                self._files[_key(target)] = self._files[_key(src)]
                return target

            return copy

        return [
            (os, "stat", status),
            *((os, name, moving(getattr(os, name))) for name in ("rename", "replace")),
            *((os, name, removing(getattr(os, name))) for name in ("remove", "unlink")),
            *((shutil, name, copying(getattr(shutil, name))) for name in ("copyfile", "copy", "copy2")),
        ]

    def _moved(self, source: Any, target: Any) -> None:
        """Follow the move of a real file, which replaces a saved object, or of a directory of them."""
        self._files.pop(target, None)
        for key in [key for key in self._files if isinstance(key, str)]:
            if key.startswith(f"{source}{os.sep}"):
                self._files[f"{target}{key.removeprefix(source)}"] = self._files.pop(key)

    def of_safetensors(self) -> dict[str, Callable[..., Any]]:
        """Return functions in place of those of ``safetensors.torch``."""
        opened: Any = safetensors.torch.safe_open

        def write(tensors: dict[str, Tensor], filename: Any, metadata: Any = None) -> None:
            self._notes.add(SAFETENSORS)
            self._keep(tensors, _key(filename))

        def serialize(tensors: dict[str, Tensor], metadata: Any = None) -> bytes:
            self._notes.add(SAFETENSORS)
            self._on_saved(tensors)
            return b""

        def open_file(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
            saved = self._found(filename)
            if saved is None:
                return opened(filename, framework, device, **options)
            with self._loader.reading():
                location = str(torch.device(device))
                return _OpenFile(saved.load(serialization._get_restore_location(location)))

        flatten = dict.fromkeys(("_flatten", "_flatten_as_ptr"), lambda tensors, kept=None: tensors)
        return {**flatten, "serialize_file": write, "serialize": serialize, "safe_open": open_file}

    def loading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function in place of ``torch.load``."""

        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            path = os.fspath(f) if isinstance(f, str | os.PathLike) else None
            if path is not None and str(path).endswith(".safetensors"):
                return read(f, map_location, *args, **kwargs)
            saved = self._found(f)
            with self._loader.reading():
                if saved is not None:
                    return saved.load(serialization._get_restore_location(map_location))
                if path is not None and _is_zip(path):
                    kwargs["mmap"] = True
                return read(f, map_location, *args, **kwargs)

        return load


def _key(f: Any) -> Any:
    """Return the absolute path of a file; of a buffer in memory the buffer itself."""
    name = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
    return os.path.abspath(name) if isinstance(name, str | os.PathLike) else f


def _named(key: Any) -> str:
    return key if isinstance(key, str) else "a buffer in memory"


def _status(saved: "_SavedFile | None") -> os.stat_result:
    """Return the status of a file that the code saved, as of now."""
    num_bytes, now = 0 if saved is None else saved.num_bytes, int(time.time())
    return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, num_bytes, now, now, now))


def _is_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return serialization._is_zipfile(file)


class _SavedFile:
    """One object that the code saved."""

    def __init__(self, obj: Any):
        self._storages: list[tuple[Tensor | None, int, str]] = []  # Values if known, bytes, location
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # Their storages' addresses are not reused while the object is pickled.
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer)
        pickler.persistent_id = self._saved_tensor  # pyright: ignore[reportAttributeAccessIssue]
        pickler.dump(obj)
        self._kept.clear()
        self._pickled = buffer.getvalue()
        self.num_bytes = len(self._pickled) + sum(num_bytes for _, num_bytes, _ in self._storages)

    def _saved_tensor(self, obj: Any) -> _SavedTensor | None:
        is_parameter = isinstance(obj, torch.nn.Parameter)
        is_plain = is_parameter or isinstance(obj, FakeTensor) or type(obj) is Tensor
        if not is_plain or hasattr(obj, "__tensor_flatten__"):
            return None
        with torch._C.DisableTorchFunction():
            storage, known, layout = obj.untyped_storage(), carried_values(obj), obj.storage_offset()
            number = self._numbers.setdefault(storage._cdata, len(self._storages))
            if number == len(self._storages):
                self._kept.append(obj)
                is_same = known is not None and known.untyped_storage().nbytes() == storage.nbytes()
                values = on_host(_whole_storage, (known,), {}) if is_same else None
                self._storages.append((values, storage.nbytes(), str(device_of(obj))))
            shape, stride = tuple(obj.shape), obj.stride()
            return _SavedTensor(number, (layout, shape, stride), obj.dtype, obj.requires_grad, is_parameter)

    def load(self, restore_location: Callable[..., Any]) -> Any:
        """Rebuild the object; called outside the dispatch modes."""
        storages: dict[int, Any] = {}

        def rebuild(saved: _SavedTensor) -> Tensor:
            if saved.storage not in storages:
                values, num_bytes, location = self._storages[saved.storage]
                # NumPy's zeros take no memory before they are written.
                host = (
                    torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
                    if values is None
                    else values.clone()
                )
                storages[saved.storage] = restore_location(host.untyped_storage(), location)
            storage = torch.TypedStorage(
                wrap_storage=storages[saved.storage], dtype=saved.dtype, _internal=True
            )
            tensor = _utils._rebuild_tensor(storage, *saved.layout)
            if saved.is_parameter:
                return torch.nn.Parameter(tensor, saved.requires_grad)
            return tensor.requires_grad_(saved.requires_grad)

        unpickler = pickle.Unpickler(io.BytesIO(self._pickled))
        unpickler.persistent_load = rebuild  # pyright: ignore[reportAttributeAccessIssue]
        return unpickler.load()


class _OpenFile:
    """A safetensors file that the code saved, as ``safetensors.torch.load_file`` reads it."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors

    def __enter__(self) -> "_OpenFile":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def keys(self) -> list[str]:
        return [*self._tensors]

    offset_keys = keys

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors)


def _whole_storage(t: Tensor) -> Tensor:
    """Return a copy of the bytes of a tensor's storage."""
    storage = t.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).clone()
