"""Placement of a tensor in user code: host or device.

A real tensor is on the host, a fake one on the device unless its storage is marked: a host model's parameters
are fake too, which takes no memory and draws no random numbers.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
MARK = "_trainfit_on_host"
LARGEST_REAL_BYTES = 1 << 28  # Larger tensors stay fake when copied from the device to the host


def local_of(value: Any) -> Any:
    """Return this rank's part of a DTensor, any other value unchanged."""
    return value if isinstance(value, FakeTensor) else getattr(value, "_local_tensor", value)


def is_device(value: Any) -> bool:
    """Return whether a value is a tensor on the virtual GPU."""
    value = local_of(value)
    return isinstance(value, FakeTensor) and value.fake_device.type == "cpu" and not is_marked(value)


def is_marked(value: Any) -> bool:
    """Return whether a value is a fake tensor on the host."""
    if not isinstance(value, FakeTensor) or value.fake_device.type != "cpu":
        return False
    with torch._C.DisableTorchFunction():
        return hasattr(value.untyped_storage(), MARK)


def mark(value: Tensor) -> None:
    """Put a fake tensor's storage on the host."""
    with torch._C.DisableTorchFunction():
        setattr(value.untyped_storage(), MARK, True)


def device_of(value: Tensor) -> torch.device:
    """Return the device that user code sees."""
    value = local_of(value)
    if isinstance(value, FakeTensor):
        known = value.fake_device
        return CUDA if known.type == "cpu" and not is_marked(value) else known
    return value.device


def names_cuda(value: Any) -> bool:
    """Return whether a value is ``"cuda"``, ``"cuda:0"``, ``torch.device("cuda")`` or a device index."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, int) and not isinstance(value, bool)


def names_host(value: Any) -> bool:
    """Return whether a value is ``None``, ``"cpu"`` or ``torch.device("cpu")``."""
    return value is None or (isinstance(value, str | torch.device) and torch.device(value).type == "cpu")
