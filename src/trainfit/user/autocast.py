"""``torch.autocast("cuda")`` on fake CPU tensors: CPU autocast with CUDA's lists
(virtual/cuda/autocast.py)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trainfit.virtual.trace.exclusive import replaced


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Map the autocast state of "cuda" to the CPU's; user code's autocast for "cpu" has no effect."""
    autocast = torch.amp.autocast_mode.autocast
    original = autocast.__init__
    is_enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
    cuda_dtype, cpu_dtype = [torch.float16], dtype_of("cpu")

    def init(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:  # fmt: skip
        if device_type == "cpu":
            original(self, "cpu", dtype_of("cpu"), is_enabled("cpu"), cache_enabled)
        else:
            original(self, device_type, dtype, enabled, cache_enabled)

    def enabled(device_type: str = "cuda") -> bool:
        return is_enabled("cpu" if device_type == "cuda" else device_type)

    def get_dtype(device_type: str) -> torch.dtype:
        return cuda_dtype[0] if device_type == "cuda" else dtype_of(device_type)

    def choose(device_type: str, dtype: torch.dtype) -> None:
        if device_type == "cuda":
            cuda_dtype[0] = dtype
        set_dtype("cpu" if device_type == "cuda" else device_type, dtype)

    def switch(device_type: Any, on: bool | None = None) -> None:
        named, value = ("cuda", device_type) if on is None else (device_type, on)
        set_enabled("cpu" if named == "cuda" else named, value)

    functions = {
        "is_autocast_enabled": enabled,
        "get_autocast_dtype": get_dtype,
        "set_autocast_dtype": choose,
        "set_autocast_enabled": switch,
        "get_autocast_gpu_dtype": lambda: get_dtype("cuda"),
        "set_autocast_gpu_dtype": lambda dtype: choose("cuda", dtype),
    }
    with ExitStack() as stack:
        stack.callback(set_dtype, "cpu", cpu_dtype)
        set_dtype("cpu", cuda_dtype[0])
        stack.enter_context(replaced(autocast, "__init__", init))
        for name, function in functions.items():
            stack.enter_context(replaced(torch, name, function))
        yield
