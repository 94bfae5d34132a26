"""LiveBytes: bytes of the tensors alive on one device, by following their real storages.

Each storage counts once, rounded up to 512 bytes as CUDA's allocator does, so that a run on a CPU compares
with a prediction. Not seen: memory that a kernel allocates and frees inside itself (below the dispatcher),
scratch that libraries keep, and code that torch.compile generated (a dispatch mode disables Dynamo, so
compiled recipes must not be measured with it).
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from trainfit.spec.result import CATEGORIES, MemoryBreakdown

ROUND_BYTES = 512
"""Smallest block of the CUDA caching allocator (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)."""


@dataclass
class _Held:
    """A storage: its rounded size, its category, and the callback when it is freed."""

    num_bytes: int
    category: str
    ends: Any = None


class LiveBytes(TorchDispatchMode):
    """Follow every storage that an operation returns until it is freed.

    ``category`` names the content of new storages (one of CATEGORIES); ``assign`` renames known tensors'.
    An operation that would exceed ``limit_bytes`` raises torch.OutOfMemoryError and is not counted.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.category = "temporary"
        self.live_bytes = 0
        self.limit_bytes: int | None = None
        self._held: dict[int, _Held] = {}
        self._by_category: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self._peak_bytes = 0
        self._at_peak = dict(self._by_category)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper subclass: its own __torch_dispatch__ runs first, and its inner operations come here.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for item in (result,) if isinstance(result, torch.Tensor) else tree_iter(result):
            if isinstance(item, torch.Tensor):
                self._follow(item, self.category)
        return result

    def enter_phase(self, phase: str) -> None:
        """Name the content of new storages by the phase of a step."""
        self.category = "activations" if phase == "forward" else "temporary"

    def assign(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Set the category of these tensors, and follow those not yet followed."""
        for tensor in tensors:
            for storage in self._storages(tensor):
                held = self._held.get(storage._cdata)
                if held is None:
                    self._add(storage, category)
                elif held.category != category:
                    self._by_category[held.category] -= held.num_bytes
                    self._by_category[category] += held.num_bytes
                    held.category = category

    def take_peak(self) -> tuple[int, MemoryBreakdown]:
        """Return the highest live bytes since the last call (or the start) and their breakdown."""
        taken = self._peak_bytes, MemoryBreakdown(**self._at_peak)
        self._peak_bytes, self._at_peak = self.live_bytes, dict(self._by_category)
        return taken

    def _storages(self, tensor: torch.Tensor) -> list[torch.UntypedStorage]:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
            parts = [getattr(tensor, name) for name in names]
            inner = [self._storages(part) for part in parts if isinstance(part, torch.Tensor)]
            return [storage for storages in inner for storage in storages]
        return [tensor.untyped_storage()] if tensor.device == self.device else []

    def _follow(self, tensor: torch.Tensor, category: str) -> None:
        for storage in self._storages(tensor):
            held, size = self._held.get(storage._cdata), _rounded(storage.nbytes())
            if held is None:
                self._add(storage, category)
            elif held.num_bytes != size:  # resize_ and out= change a storage in place.
                self._must_fit(size - held.num_bytes)
                self._count(held.category, size - held.num_bytes)
                held.num_bytes = size

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        held = _Held(_rounded(storage.nbytes()), category)
        self._must_fit(held.num_bytes)
        # The storage's Python object lives as long as its C++ storage, with autograd's saved tensors.
        held.ends = weakref.finalize(storage, self._end, storage._cdata)
        held.ends.atexit = False
        self._held[storage._cdata] = held
        self._count(category, held.num_bytes)

    def _end(self, key: int) -> None:
        held = self._held.pop(key)
        self._count(held.category, -held.num_bytes)

    def _must_fit(self, num_bytes: int) -> None:
        if self.limit_bytes is not None and self.live_bytes + num_bytes > self.limit_bytes:
            need = f"{num_bytes:,} bytes more than the {self.live_bytes:,} alive"
            raise torch.OutOfMemoryError(f"{need} are over the limit of {self.limit_bytes:,}")

    def _count(self, category: str, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self._by_category[category] += num_bytes
        if self.live_bytes > self._peak_bytes:
            self._peak_bytes, self._at_peak = self.live_bytes, dict(self._by_category)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
