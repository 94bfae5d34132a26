"""Functions and classes of ``torch.cuda.memory``: statistics of the ledger so far, snapshots and pools."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainfit.ledger.ledger import NO_LAYER
from trainfit.ledger.segments import MIN_BLOCK
from trainfit.user.torch_cuda.memory_stats import KINDS, MemoryStats
from trainfit.user.torch_cuda.streams import NoContext, Stream, no_ops, nothing

Functions = dict[str, Any]
READINGS = {
    "memory_allocated": "allocated_bytes",
    "max_memory_allocated": "peak_allocated_bytes",
    "memory_reserved": "reserved_bytes",
    "memory_cached": "reserved_bytes",
    "max_memory_reserved": "peak_reserved_bytes",
    "max_memory_cached": "peak_reserved_bytes",
}
HOST_STATISTICS = "allocations allocated_bytes active_requests active_bytes".split()
RAW = 1 << 46
"""Blocks that the code allocates without a tensor have addresses above this."""
FRACTION = "torch.cuda.set_per_process_memory_fraction: the limit is not applied to the verdict"


def memory_functions(memory_stats: MemoryStats) -> Functions:
    """Return the functions that ``torch.cuda`` and ``torch.cuda.memory`` share."""
    now, capacity = memory_stats.now, memory_stats.capacity_bytes
    fraction = [1.0]

    def reading(field: str) -> Callable[..., int]:
        return lambda device=None: getattr(now(), field)

    def free_and_total(device: Any = None) -> tuple[int, int]:
        return max(0, capacity - now().reserved_bytes), capacity

    def limit(share: float, device: Any = None) -> None:
        memory_stats.tracer.notes.add(FRACTION)
        fraction[0] = share

    return {
        **no_ops("ipc_collect empty_host_cache caching_allocator_enable reset_peak_host_memory_stats"),
        **{name: reading(field) for name, field in READINGS.items()},
        **dict.fromkeys(
            "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached".split(),
            lambda device=None: now().reset_peaks(),
        ),
        **_raw(memory_stats),
        "is_initialized": lambda: True,
        "_get_nvml_device_index": lambda device=None: 0,  # Independent of CUDA_VISIBLE_DEVICES
        "mem_get_info": free_and_total,
        "get_memory_info": free_and_total,
        "empty_cache": lambda: memory_stats.empty_cache(),
        "reset_accumulated_memory_stats": lambda device=None: now().reset_accumulated(),
        "reset_accumulated_host_memory_stats": nothing,
        "set_per_process_memory_fraction": limit,
        "get_per_process_memory_fraction": lambda device=None: fraction[0],
        "get_allocator_backend": lambda: "native",
        "caching_allocator_disabled": NoContext,
        "MemPool": MemPool,
        "use_mem_pool": _pool_in_use,
        "_use_uvm": NoContext,
    }


def memory_calls(memory_stats: MemoryStats) -> Functions:
    """Return the functions of ``torch._C`` that PyTorch's own statistics and snapshots are made of."""

    def record(enabled: Any, *options: Any, **named: Any) -> None:
        # (enabled, context, stacks, max_entries, clear_history, ...)
        clear = named.get("clear_history", options[3] if len(options) > 3 else False)
        memory_stats.record(enabled is not None, bool(clear))

    return {
        "_cuda_memoryStats": lambda device=None: memory_stats.statistics(),
        "_cuda_memorySnapshot": lambda *_: memory_stats.snapshot(),
        "_cuda_record_memory_history": record,
        "_cuda_record_memory_history_legacy": lambda enabled, *_: memory_stats.record(bool(enabled)),
        "_cuda_hostMemoryStats": _host_statistics,
        "_host_emptyCache": nothing,
        "_cuda_getCurrentRawStream": lambda device=None: torch.cuda.current_stream().cuda_stream,
    }


def accelerator_statistics(memory_stats: MemoryStats) -> Callable[..., Any]:
    """Return ``torch.accelerator.memory_stats``, which flattens what ``torch.cuda`` returns nested."""

    def flat(device: Any = None) -> OrderedDict[str, Any]:
        return OrderedDict(sorted(torch.cuda.memory.memory_stats().items()))

    return flat


def _host_statistics() -> dict[str, Any]:
    """Return the statistics of pinned host memory, which is not modelled: zeros."""
    times = dict.fromkeys(("total", "max", "min", "count", "avg"), 0)
    return {
        **{name: dict.fromkeys(KINDS, 0) for name in HOST_STATISTICS},
        **dict.fromkeys(("num_host_alloc", "num_host_free"), 0),
        **{name: dict(times) for name in ("host_alloc_time", "host_free_time")},
    }


def _raw(memory_stats: MemoryStats) -> Functions:
    """Return the functions that allocate without a tensor."""
    live, held = memory_stats.tracer.live, dict[int, int]()
    addresses = itertools.count(RAW, MIN_BLOCK)

    def allocate(size: int, device: Any = None, stream: Any = None) -> int:
        address = next(addresses)
        held[address] = live.add(size, -1, "caching_allocator_alloc", NO_LAYER, "temporary")
        return address

    def delete(address: int) -> None:
        live.free(held.pop(address), NO_LAYER)

    return {"caching_allocator_alloc": allocate, "caching_allocator_delete": delete}


class MemPool:
    """A pool of the virtual GPU's memory: allocations in it share no block with others."""

    def __init__(self, *_: Any, **__: Any):
        self._stream = Stream()
        self.id = (0, self._stream.cuda_stream)
        self.allocator = None

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> Any:
        return torch.cuda.memory_snapshot()


@contextmanager
def _pool_in_use(pool: MemPool, device: Any = None) -> Iterator[None]:
    with torch.cuda.stream(pool._stream):  # pyright: ignore[reportArgumentType]
        yield
