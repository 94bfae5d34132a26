"""Optimizers of bitsandbytes, by their own classes, with paged states on the virtual GPU.

They run on a CPU and on CUDA as bitsandbytes runs them. On the virtual GPU their ``step`` runs on fake
tensors: what it allocates is traced, and an update is one operator, as on CUDA. Paged states are managed
memory, which the native library allocates; on the virtual GPU they are host memory.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.offload.copies import host_empty

LEAST_PAGED = 100_000
"""bitsandbytes keeps states of fewer elements in ordinary device memory (``get_state_buffer``)."""

TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""Key of a state in 8 bits -> the table of bitsandbytes that it refers to."""


def made(kind: Any, parameters: Iterable[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    """Return an optimizer of bitsandbytes' class ``kind``."""
    return _with_host_memory(kind)(parameters, **settings)


@cache
def _with_host_memory(kind: Any) -> Any:
    """Return the class with host memory for managed memory of fake tensors, and tables of a loaded state."""

    def get_state_buffer(self: Any, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if not isinstance(p, FakeTensor):
            return kind.get_state_buffer(self, p, dtype)
        if not self.is_paged or p.numel() < LEAST_PAGED:
            return torch.zeros_like(p, dtype=dtype)
        buffer: Any = host_empty(p.shape, dtype, like=p)
        buffer.is_paged = True  # As bitsandbytes marks it: its kernels take it beside device tensors.
        return buffer

    def prefetch_state(self: Any, p: Tensor) -> None:  # Called before each update of a weight.
        state = self.state[p]
        for key, table in TABLES.items() if "absmax1" in state else ():
            self.name2qmap[table] = self.name2qmap[table].to(p.device)
            state.setdefault(key, self.name2qmap[table])  # A checkpoint has no tables.
        if not isinstance(p, FakeTensor):
            kind.prefetch_state(self, p)

    changed = {"get_state_buffer": get_state_buffer, "prefetch_state": prefetch_state}
    return type(kind.__name__, (kind,), changed)
