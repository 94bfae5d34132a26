"""On which side a tensor is while a person's code runs: the host's or the device's.

A real tensor is on the host. A fake one is on the device, unless its storage carries a mark: parameters of a model
that is built on the host are fake too, so that no model's size of memory is taken or filled with random numbers.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
MARK = "_trainfit_on_host"
LARGEST_REAL_BYTES = 1 << 28
"""Larger tensors that come from the device to the host stay fake."""


def is_device(value: Any) -> bool:
    """Whether it is a tensor on the virtual GPU."""
    return isinstance(value, FakeTensor) and value.fake_device.type == "cpu" and not is_marked(value)


def is_marked(value: Any) -> bool:
    """Whether it is a fake tensor on the host."""
    if not isinstance(value, FakeTensor) or value.fake_device.type != "cpu":
        return False
    with torch._C.DisableTorchFunction():
        return hasattr(value.untyped_storage(), MARK)


def mark(value: Tensor) -> None:
    """Put a fake tensor's storage on the host."""
    with torch._C.DisableTorchFunction():
        setattr(value.untyped_storage(), MARK, True)


def device_of(value: Tensor) -> torch.device:
    """The device that a person's code is told."""
    if isinstance(value, FakeTensor):
        known = value.fake_device
        return CUDA if known.type == "cpu" and not is_marked(value) else known
    return value.device


def names_cuda(value: Any) -> bool:
    """``"cuda"``, ``"cuda:0"``, ``torch.device("cuda")`` or a device's number."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, int) and not isinstance(value, bool)


def names_host(value: Any) -> bool:
    """``None``, ``"cpu"`` or ``torch.device("cpu")``."""
    return value is None or (isinstance(value, str | torch.device) and torch.device(value).type == "cpu")
