"""Asynchronous copies between a device and pinned host memory, real and on the virtual GPU.

On CUDA a ``CopyStream`` is a CUDA stream; the computation waits for it only through ``wait``. On CPUs copies
are synchronous. On the virtual GPU the host side is a fake tensor on ``meta``, which is no device memory, and
a copy is the operator ``trainfit::copy_to_host_`` or ``trainfit::copy_to_device_``, which puts its bytes and
direction into the ledger.

Streams are not recorded with the allocator: before a device tensor is freed, the computation waits for its
copies. So free memory does not depend on the speed of copies.
"""

import math
import mmap
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.kernels.custom_op import declare

Event = Any  # A torch.cuda.Event, or None if there is nothing to wait for (on a CPU)


def host_empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, *, like: Tensor) -> Tensor:
    """Return uninitialised host memory: pinned if ``like`` is on CUDA, on ``meta`` if it is fake."""
    if like.is_cuda and not isinstance(like, FakeTensor):
        return _pinned(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device="meta" if isinstance(like, FakeTensor) else "cpu")


def _pinned(num_bytes: int) -> Tensor:
    """Allocate and pin whole pages of host memory, until they are freed.

    PyTorch's pinned allocator rounds every size up to a power of two: 30 GB more for a 70B model.

    Raises:
        RuntimeError: The system cannot pin that much.
    """
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    cudart: Any = torch.cuda.cudart()
    # 1: portable, pinned for every GPU (as torch/cuda/_pin_memory_utils.py).
    code = int(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 1))
    if code:
        raise RuntimeError(f"{num_bytes:,} bytes of host memory could not be pinned: CUDA error {code}")
    weakref.finalize(memory.untyped_storage(), cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def copy(target: Tensor, source: Tensor) -> None:
    """Copy between device and host; asynchronous between CUDA and pinned memory."""
    with torch.no_grad():
        if isinstance(target, FakeTensor) or isinstance(source, FakeTensor):
            _virtual_copy("copy_to_host_" if target.is_meta else "copy_to_device_")(target, source)
        else:
            target.copy_(source, non_blocking=True)


@cache
def _virtual_copy(name: str) -> Any:
    """Return the virtual GPU's operator of one direction, which computes nothing."""

    def run(target: Tensor, source: Tensor) -> None:
        raise RuntimeError(f"trainfit::{name} copies fake tensors only; real ones copy with Tensor.copy_")

    declare(name, run, lambda target, source: None, mutates=("target",))
    return getattr(torch.ops.trainfit, name).default


class CopyStream:
    """A stream of copies in one direction."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor, *after: Event) -> Event:
        """Copy after the events ``after``; return the event of its end."""
        if self._stream is None:
            copy(target, source)
            return None
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            copy(target, source)
            return self._stream.record_event()

    def synchronize(self) -> None:
        """Block the host until all copies so far have ended."""
        if self._stream is not None:
            self._stream.synchronize()


class CopyStreams:
    """Copy streams of one device in both directions, shared by all offloading; copies run in order."""

    def __init__(self, device: torch.device):
        self.device = device
        self.to_device, self.to_host = CopyStream(device), CopyStream(device)
        self._like = torch.empty(0, device=device)

    def host_empty(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised host memory for copies with this device."""
        return host_empty(shape, dtype, like=self._like)

    def now(self) -> Event:
        """Return ``now`` of this device."""
        return now(self.device)

    def synchronize(self) -> None:
        """Block the host until all copies so far have ended; host memory can then be read and written."""
        self.to_host.synchronize()
        self.to_device.synchronize()


def now(device: torch.device) -> Event:
    """Return the event that the computation has reached this point."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait(event: Event) -> None:
    """Make everything that the computation issues from here on wait for ``event``."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
