"""``torch.cuda`` and ``torch.accelerator`` on the virtual GPU: one device of the catalog, no waiting.

Other functions would call the driver and raise InputError.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.virtual.compile.cuda_device import device_functions
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.user.memory_stats import MemoryStats
from trainfit.virtual.user.placement import CPU, CUDA, names_cuda

Functions = dict[str, Any]


@contextmanager
def cuda_module(
    gpu: Gpu, traits: GpuTraits, memory_stats: MemoryStats, num_devices: int = 1
) -> Iterator[None]:
    """Patch ``torch.cuda``, ``torch.accelerator`` and ``torch.Generator`` for the virtual GPU.

    Args:
        num_devices: GPUs of the host, of which the code uses the first.
    """
    counted = {"device_count": lambda: num_devices}
    streams = _streams()
    cuda = _properties(gpu, traits) | counted | _memory(memory_stats) | streams | _random()
    shared = {name: streams[name] for name in ("current_stream", "set_stream")}
    accelerator = _accelerator(traits) | counted | shared
    nvtx = _no_ops("mark range_push range_pop range_start range_end")
    modules = (
        (torch.cuda, cuda | _state(traits)),
        (torch.cuda.memory, _memory(memory_stats)),
        (torch.cuda.random, _random()),
        (torch.cuda.nvtx, nvtx | {"range": _Context}),
        (torch.accelerator, accelerator | _memory(memory_stats)),
        (torch, {"Generator": _Generator}),
    )  # fmt: skip
    with ExitStack() as stack:
        for module, functions in modules:
            for name, function in functions.items():
                if hasattr(module, name):
                    stack.enter_context(replaced(module, name, function))
        yield


def _state(traits: GpuTraits) -> Functions:
    return {
        **_no_ops("_lazy_call init"),
        "_lazy_init": _refuse,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: traits.compute_capability >= (8, 0),
        "is_tf32_supported": lambda: traits.compute_capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda *_: False,
        "get_arch_list": lambda: [f"sm_{traits.compute_capability[0]}{traits.compute_capability[1]}"],
        "device": _Device,
        "device_of": _Device,
    }


def _properties(gpu: Gpu, traits: GpuTraits) -> Functions:
    functions = device_functions(traits, gpu.title, total_memory=gpu.usable_bytes)
    return functions | {"set_device": _nothing, "get_device_name": lambda device=None: gpu.title}


def _memory(memory_stats: MemoryStats) -> Functions:
    now = memory_stats.now
    capacity = memory_stats.capacity_bytes
    fields = {
        "memory_allocated": "allocated_bytes", "max_memory_allocated": "peak_allocated_bytes",
        "memory_reserved": "reserved_bytes", "memory_cached": "reserved_bytes",
        "max_memory_reserved": "peak_reserved_bytes", "max_memory_cached": "peak_reserved_bytes",
    }  # fmt: skip

    def reading(field: str) -> Callable[..., int]:
        return lambda device=None: getattr(now(), field)

    def statistics(device: Any = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": now().allocated_bytes,
            "allocated_bytes.all.peak": now().peak_allocated_bytes,
            "reserved_bytes.all.current": now().reserved_bytes,
            "reserved_bytes.all.peak": now().peak_reserved_bytes,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def free_and_total(device: Any = None) -> tuple[int, int]:
        return max(0, capacity - now().reserved_bytes), capacity

    resets = "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached".split()
    unused = _no_ops("reset_accumulated_memory_stats ipc_collect set_per_process_memory_fraction")
    return unused | {
        **{name: reading(field) for name, field in fields.items()},
        **dict.fromkeys(resets, lambda device=None: now().reset_peaks()),
        "memory_stats": statistics,
        "memory_summary": lambda *_, **__: str(statistics()),
        "mem_get_info": free_and_total,
        "get_memory_info": free_and_total,
        "empty_cache": lambda: memory_stats.empty_cache(),
        "get_per_process_memory_fraction": lambda device=None: 1.0,
    }


def _streams() -> Functions:
    entered = [_Stream()]

    class StreamContext(_Context):
        """``torch.cuda.stream(s)``; a type, for an isinstance check of PyTorch's compiler."""

        def __init__(self, stream: Any = None):
            self.stream = stream

        def __enter__(self) -> Any:
            entered.append(self.stream or entered[-1])
            return self

        def __exit__(self, *_: object) -> None:
            entered.pop()

    def enter(stream: Any) -> None:
        entered[-1] = stream or entered[-1]

    default = entered[0]
    return _no_ops("synchronize") | {
        "Stream": _Stream,
        "ExternalStream": _Stream,
        "Event": _Event,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "set_stream": enter,
        "current_stream": lambda device=None: entered[-1],
        "default_stream": lambda device=None: default,
    }


def _random() -> Functions:
    state: Callable[..., torch.Tensor] = lambda device=None: torch.zeros(16, dtype=torch.uint8)  # noqa: E731
    names = "manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all"
    return _no_ops(names) | {
        "initial_seed": lambda: 0,
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
    }


def _accelerator(traits: GpuTraits) -> Functions:
    return _no_ops("set_device_index set_device_idx synchronize") | {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "device_index": _Device,
        "get_device_capability": lambda device=None: {"supported_dtypes": set()},
    }


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _no_ops(names: str) -> Functions:
    return dict.fromkeys(names.split(), _nothing)


def _refuse(*_: Any, **__: Any) -> None:
    raise InputError(
        "the code calls a CUDA function that the virtual GPU does not support",
        "leave that call out of the traced callable (see the traceback)",
        field="step",
    )


class _Context:
    """A context manager without effect."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Device(_Context):
    """``torch.cuda.device(0)`` and ``torch.cuda.device_of(tensor)``."""

    idx = prev_idx = 0


class _Event(_Context):
    """An event of the virtual GPU; times are unknown, so 1 ms is between any two."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    record = wait = synchronize = _nothing


class _Stream(_Event):
    """A stream of the virtual GPU: what runs in it has a pool of memory of its own."""

    cuda_stream = 0
    device = CUDA

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    wait_event = wait_stream = _nothing


class _Generator(torch._C.Generator):
    """A CPU generator for "cuda", from which no random number is drawn."""

    def __new__(cls, device: Any = CPU) -> Any:
        new: Any = super().__new__
        return new(cls, CPU if names_cuda(device) else device)
