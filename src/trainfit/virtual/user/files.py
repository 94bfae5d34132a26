"""``torch.load``, ``torch.save`` and safetensors' files in user code.

Files are read on the host, mapped into memory; what belongs on the device is moved there. Nothing is written:
what the code saves is kept by its path, without unknown values, until the code loads it.
"""

import io
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, _utils, _weights_only_unpickler, serialization
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_tensors import carried_values, on_host
from trainfit.virtual.user.placement import CUDA, device_of, names_cuda

TO_DEVICE = "_trainfit_to_device"
"""Set on a host storage whose tensors are to be rebuilt on the device."""
NEWER_REBUILD = "_rebuild_tensor_v3"
"""Rebuilds tensors of dtypes without a storage class, such as float8."""
NOT_KEPT = (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError)
"""Raised for objects that cannot be pickled, such as DTensors; loading them finds no file."""
WROTE_NOTHING = "torch.save wrote nothing: there are no values to keep"
SAFETENSORS = "safetensors wrote nothing: there are no values to keep"


@contextmanager
def files(notes: set[str], on_saved: Callable[[Any], None]) -> Iterator[None]:
    """Replace ``torch.load`` and ``torch.save``; ``on_saved`` is called with what is saved."""
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
        for name, function in saved.of_safetensors().items():
            if hasattr(safetensors.torch, name):  # Of their names for one step, a release has one.
                stack.enter_context(replaced(safetensors.torch, name, function))
        yield


ADDRESS = torch.UntypedStorage.data_ptr


def _addressed(storage: Any) -> int:
    """Return a storage's address; of a fake one a number that is no other's."""
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
    """What the code saved: pickled objects whose tensors are kept as layouts and known values."""

    def __init__(self, loader: _Loader, notes: set[str], on_saved: Callable[[Any], None]):
        self._loader, self._notes, self._on_saved = loader, notes, on_saved
        self._files: dict[Any, _SavedFile] = {}

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
        self._files.pop(key, None)
        with suppress(*NOT_KEPT):
            self._files[key] = _SavedFile(obj)

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
            saved = self._files.get(_key(filename))
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
            saved = self._files.get(_key(f))
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
    """A safetensors file that the code saved: what ``safetensors.torch.load_file`` reads of one."""

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
