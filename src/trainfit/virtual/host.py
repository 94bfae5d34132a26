"""Which tensors a real run would keep on the host.

On the virtual GPU device and host tensors are both fake CPU tensors. What tells them apart is what the code says:
a factory called without a device makes a host tensor (AdamW's step counters, ``torch.tensor(0.0)``); one called
with the step's device makes a device tensor, and so does ``.to(device)``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "tensor scalar_tensor zeros ones empty full arange linspace logspace rand randn randint randperm eye "
        "tril_indices triu_indices as_tensor from_numpy empty_strided"
    ).split()
)
MOVES = frozenset({torch.Tensor.to, torch.Tensor.cuda})


class HostTensors(TorchFunctionMode):
    """Tells ``on_host`` before and after each factory call that names no device; a move to a device copies.

    Entered before ``with torch.device(...)`` blocks, so those have already filled in the device they name.
    """

    def __init__(self, enter_host: Callable[[], None], leave_host: Callable[[], None], is_host: Callable[[Any], bool]):
        super().__init__()
        self._enter, self._leave, self._is_host = enter_host, leave_host, is_host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES and kwargs.get("device") is None:
            self._enter()
            try:
                return func(*args, **kwargs)
            finally:
                self._leave()
        if func in MOVES and self._is_host(args[0]) and _names_device(args[1:], kwargs):
            return func(args[0], *args[1:], **{**kwargs, "copy": True}) if func is torch.Tensor.to else args[0].clone()
        return func(*args, **kwargs)


def _names_device(args: Any, kwargs: Any) -> bool:
    if kwargs.get("device") is not None:
        return True
    return any(isinstance(value, torch.device | str) for value in args)
