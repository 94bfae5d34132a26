"""Copies between the GPU and pinned host memory, beside the computation, and what they are on a virtual GPU.

On CUDA a ``CopyStream`` is a stream of its own: it waits for the computation where it must, never the other way round unless
asked. On a CPU, real or virtual, copies run at once. On the virtual GPU the host's side is a fake tensor on ``meta``,
which costs nothing and counts as no device memory, and a copy is the operation ``trainfit::copy_to_host_`` or
``trainfit::copy_to_device_``, so that the ledger knows its bytes and their direction.

Nothing here records streams with the allocator: who frees a device tensor has first made the computation wait for its
copies (``wait``). So which memory is free when never depends on how fast a copy was.
"""

from __future__ import annotations

import math
import mmap
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.kernels.custom_op import declare

Event = Any
"""A ``torch.cuda.Event``; None where nothing need be waited for (a CPU)."""


def host_empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, *, like: Tensor) -> Tensor:
    """Memory on the host: pinned where ``like`` is on CUDA, ``meta`` where it is fake. Its values mean nothing."""
    if isinstance(like, FakeTensor):
        return torch.empty(shape, dtype=dtype, device="meta")
    if like.is_cuda:
        return _pinned(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device="cpu")


def _pinned(num_bytes: int) -> Tensor:
    """Bytes in whole pages of the host, pinned by themselves until they are freed.

    PyTorch's own pinned allocator takes the next power of two of every size, which of a 70B model is 30 GB more.

    Raises:
        RuntimeError: the system does not pin as much.
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
    """``target`` takes ``source``'s values, one of them on the host; asynchronous between CUDA and pinned memory."""
    with torch.no_grad():
        if isinstance(target, FakeTensor) or isinstance(source, FakeTensor):
            _virtual_copy("copy_to_host_" if target.is_meta else "copy_to_device_")(target, source)
        else:
            target.copy_(source, non_blocking=True)


@cache
def _virtual_copy(name: str) -> Any:
    """The virtual GPU's copy in one direction: it has a name and bytes, and computes nothing."""

    def run(target: Tensor, source: Tensor) -> None:
        raise RuntimeError(f"trainfit::{name} copies fake tensors only; real ones copy with Tensor.copy_")

    declare(name, run, lambda target, source: None, mutates=("target",))
    return getattr(torch.ops.trainfit, name).default


class CopyStream:
    """One direction of copying."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor, *after: Event) -> Event:
        """Copy once all of ``after`` has happened; the event of its end."""
        if self._stream is None:
            copy(target, source)
            return None
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            copy(target, source)
            return self._stream.record_event()

    def settle(self) -> None:
        """Wait, on the host, until all copies asked for so far are done."""
        if self._stream is not None:
            self._stream.synchronize()


class CopyStreams:
    """Both directions between one device and its host. All that moves shares them: what is asked for first comes first."""

    def __init__(self, device: torch.device):
        self.device = device
        self.to_device, self.to_host = CopyStream(device), CopyStream(device)
        self._like = torch.empty(0, device=device)

    def host_empty(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that this device copies from and to."""
        return host_empty(shape, dtype, like=self._like)

    def now(self) -> Event:
        """The event that everything the computation has issued so far is done."""
        return now(self.device)

    def settle(self) -> None:
        """Wait, on the host, until what was sent so far has arrived: the host's memory may be read and written."""
        self.to_host.settle()
        self.to_device.settle()


def now(device: torch.device) -> Event:
    """The event that everything the computation has issued so far is done."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait(event: Event) -> None:
    """What the computation issues from now on comes after ``event``."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
