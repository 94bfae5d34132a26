"""``torch.cuda``, ``torch.accelerator`` and ``torch.backends`` on the virtual GPU: one device of the catalog.

Functions that would call the driver and are not modelled raise InputError with their name.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor

from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.user.placement import CPU, CUDA
from trainfit.user.steps import StepFollower
from trainfit.user.torch_cuda.memory import accelerator_statistics, memory_calls, memory_functions
from trainfit.user.torch_cuda.memory_stats import MemoryStats
from trainfit.user.torch_cuda.monitoring import nvml_functions, profiler_functions
from trainfit.user.torch_cuda.streams import (
    Event,
    Generator,
    NoContext,
    Stream,
    Streams,
    graph_functions,
    no_ops,
    nothing,
    stream_functions,
)
from trainfit.user.tracer import UserTracer
from trainfit.virtual.compile.cuda_device import device_functions
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.cuda.scratch.libraries import cublas_workspace_bytes, cublaslt_workspace_bytes
from trainfit.virtual.trace.exclusive import chosen_by_thread, replaced

Functions = dict[str, Any]
CUDA_VERSION = "13.0"  # Of the builds that records were measured with
CUDNN_VERSION = 91002
NCCL_VERSION = (2, 28, 9)  # Of torch 2.13 for CUDA; logged only
BLAS_HANDLE = 1 << 44


@contextmanager
def cuda_module(
    gpu: Gpu,
    traits: GpuTraits,
    memory_stats: MemoryStats,
    steps: StepFollower,
    entered: Streams,
    num_devices: int = 1,
) -> Iterator[None]:
    """Replace the functions by which PyTorch and scripts query and control a GPU.

    Args:
        entered: the streams of this trace.
        num_devices: GPUs of the host, of which the code uses the first.
    """
    tracer: UserTracer = memory_stats.tracer
    counted = {"device_count": lambda: num_devices}
    streams, graphs = stream_functions(entered, tracer.count_read), graph_functions(tracer, steps)
    memory, random = memory_functions(memory_stats), _random()
    shared = {name: streams[name] for name in ("current_stream", "set_stream", "synchronize")}
    accelerator = _accelerator(traits) | counted | shared | memory
    accelerator |= {
        "memory_stats": accelerator_statistics(memory_stats),
        "Graph": _captured(graphs["CUDAGraph"]),
    }
    described = device_functions(traits, gpu.title, **_properties(gpu)) | counted
    state = _state(traits, gpu, num_devices)
    modules: tuple[tuple[Any, Functions], ...] = (
        (torch.cuda, described | memory | streams | graphs | random | state),
        (torch.cuda.memory, memory | {"_lazy_init": nothing}),
        (torch.cuda.random, random),
        (torch.cuda.graphs, graphs),
        (torch.cuda.streams, streams),
        (torch.cuda.tunable, _tuning()),
        (torch.cuda.graphs.graph, {"default_capture_stream": Stream()}),
        (torch.cuda.nvtx, no_ops("mark range_push range_pop range_start range_end") | {"range": NoContext}),
        (torch.cuda.profiler, no_ops("start stop") | {"profile": NoContext}),
        (importlib.import_module("torch.cuda.nccl"), {"version": lambda: NCCL_VERSION, "is_available": _yes}),
        (torch.accelerator, accelerator),
        (torch.accelerator.memory, accelerator),
        (torch, {"Generator": Generator, "Stream": Stream, "Event": Event}),
        # A CUDA build would call cuDNN. The allocated bytes are the same if each weight keeps its own
        # storage.
        (torch, {"_use_cudnn_rnn_flatten_weight": lambda: False}),
        # A fake tensor on "cuda", as DTensor makes to find a result's shape, would create a CUDA context.
        (fake_tensor, {"init_gpu_context": nothing}),
        # A string where a CPU build has None.
        (torch.version, {"cuda": torch.version.cuda or CUDA_VERSION}),
        *_backends(traits),
        *profiler_functions(tracer.notes),
        *_of_other_modules(gpu, memory_stats, num_devices),
    )
    with ExitStack() as stack:
        for module, functions in modules:
            for name, function in functions.items():
                if hasattr(module, name):
                    stack.enter_context(replaced(module, name, function))
        for name, function in memory_calls(memory_stats).items():
            stack.enter_context(_provided(name, function))
        yield


@contextmanager
def _provided(name: str, function: Any) -> Iterator[None]:
    """Replace a function of ``torch._C``, or add it where PyTorch was built without CUDA."""
    if hasattr(torch._C, name):
        with replaced(torch._C, name, function):
            yield
        return
    setattr(torch._C, name, chosen_by_thread(function))
    try:
        yield
    finally:
        delattr(torch._C, name)


def _is_pytorchs_own() -> bool:
    """Return whether the caller is PyTorch's own code, which must get the answer of its build."""
    caller = sys._getframe(3).f_globals.get("__name__", "")  # Above the function that chooses by thread
    return caller.partition(".")[0] == "torch"


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _properties(gpu: Gpu) -> dict[str, Any]:
    """Return the fields of a device's properties that do not concern the compiler."""
    shared = gpu.shared_memory_per_block_bytes
    return {
        "total_memory": gpu.usable_bytes, "uuid": "00000000-0000-0000-0000-000000000000",
        "L2_cache_size": gpu.l2_cache_bytes, "is_integrated": 0, "is_multi_gpu_board": 0,
        "shared_memory_per_block": 48 << 10, "shared_memory_per_multiprocessor": (shared or 0) + 1024,
        "pci_bus_id": 0, "pci_device_id": 0, "pci_domain_id": 0, "clock_rate": 0, "memory_clock_rate": 0,
    }  # fmt: skip


def _state(traits: GpuTraits, gpu: Gpu, num_devices: int) -> Functions:
    major, minor = traits.compute_capability
    debug_mode = [0]

    def set_debug_mode(mode: int | str) -> None:
        named = {"default": 0, "warn": 1, "error": 2}
        debug_mode[0] = named[mode] if isinstance(mode, str) else mode

    return {
        **no_ops("_lazy_call init set_device"),
        "_lazy_init": _refuse,
        "get_device_name": lambda device=None: gpu.title,
        "is_available": _yes,
        "is_initialized": _yes,
        "_is_compiled": _yes,
        "is_bf16_supported": lambda including_emulation=True: traits.compute_capability >= (8, 0),
        "is_tf32_supported": lambda: traits.compute_capability >= (8, 0),
        "can_device_access_peer": lambda device, peer_device: device != peer_device and num_devices > 1,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "get_gencode_flags": lambda: f"-gencode compute=compute_{major}{minor},code=sm_{major}{minor}",
        "current_blas_handle": lambda: BLAS_HANDLE,
        "current_solver_handle": lambda: BLAS_HANDLE,
        "set_sync_debug_mode": set_debug_mode,
        "get_sync_debug_mode": lambda: debug_mode[0],
        "cudart": _Runtime,
        "check_error": nothing,
        "device": _Device,
        "device_of": _Device,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }


def _random() -> Functions:
    seeds = [0]

    def state(device: Any = None) -> torch.Tensor:
        with torch.device(CPU):
            return torch.tensor([seeds[0], 0], dtype=torch.int64, device="cpu").view(torch.uint8)

    def set_state(new_state: torch.Tensor, device: Any = None) -> None:
        seeds[0] = int(new_state[:8].view(torch.int64).item())

    def seed(value: int = 0) -> None:
        seeds[0] = int(value)

    return {
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), seed),
        "initial_seed": lambda: seeds[0],
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
        "set_rng_state": set_state,
        "set_rng_state_all": lambda new_states: [set_state(one) for one in new_states][:0] or None,
        "default_generators": (Generator(CUDA),),
    }


def _accelerator(traits: GpuTraits) -> Functions:
    return no_ops("set_device_index set_device_idx") | {
        "is_available": _yes,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "device_index": _Device,
        "get_device_capability": lambda device=None: {"supported_dtypes": set()},
    }


def _captured(graph: Any) -> Any:
    """Return ``torch.accelerator.Graph``: a graph that is captured in a ``with`` block."""

    class Captured(graph):
        def __enter__(self) -> Any:
            self.capture_begin()
            return self

        def __exit__(self, *_: object) -> None:
            self.capture_end()

    return Captured


def _backends(traits: GpuTraits) -> list[tuple[Any, Functions]]:
    supports = lambda params, debug=False: traits.compute_capability >= (8, 0)  # noqa: E731
    kernels = ("can_use_flash_attention", "can_use_efficient_attention", "can_use_cudnn_attention")
    blas_bytes = lambda size=None: cublas_workspace_bytes(traits)  # noqa: E731
    plans = SimpleNamespace(size=0, max_size=4096, clear=nothing)
    return [
        (
            torch.backends.cuda,
            {
                **dict.fromkeys(kernels, supports),
                "is_built": lambda: torch._C._has_cuda or not _is_pytorchs_own(),
                "is_flash_attention_available": _yes,
                "SDPAParams": SimpleNamespace,
                "cufft_plan_cache": plans,
                **dict.fromkeys(("blas_workspace_size", "cublas_workspace_size"), blas_bytes),
                "cublaslt_workspace_size": lambda size=None: cublaslt_workspace_bytes(traits),
            },
        ),
        (
            torch.backends.cudnn,
            {"version": lambda: CUDNN_VERSION, "is_available": _yes, "is_acceptable": _yes},
        ),
    ]


def _tuning() -> Functions:
    """Return the queries of TunableOp, which is off."""
    queries = ("is_enabled", "tuning_is_enabled", "record_untuned_is_enabled")
    return dict.fromkeys(queries, lambda: False)


def _of_other_modules(
    gpu: Gpu, memory_stats: MemoryStats, num_devices: int
) -> Iterator[tuple[Any, Functions]]:
    """Return replacements in modules that are not always there."""
    pynvml = sys.modules.get("pynvml")  # PyTorch imports it if it is installed.
    if pynvml is not None:
        yield pynvml, nvml_functions(gpu, memory_stats, num_devices)
    if torch.distributed.is_available():
        has_nccl: Any = torch.distributed.is_nccl_available
        yield torch.distributed, {"is_nccl_available": lambda: has_nccl() or not _is_pytorchs_own()}


def _refuse(*_: Any, **__: Any) -> None:
    raise InputError(
        f"{_calling_function()} is not modelled by the virtual GPU",
        "leave that call out of the traced code (see the traceback)",
        field="step",
    )


def _calling_function() -> str:
    """Return the outermost function of ``torch.cuda`` that is running."""
    frame, name = sys._getframe(1), "a function of the CUDA driver"
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.cuda"):
            name = f"{module}.{frame.f_code.co_name}"
        elif name.startswith("torch.cuda"):
            break
        frame = frame.f_back
    return name


class _Device(NoContext):
    """``torch.cuda.device(0)`` and ``torch.cuda.device_of(tensor)``."""

    idx = prev_idx = 0


class _Runtime:
    """The CUDA runtime (``torch.cuda.cudart()``): every call succeeds."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815

    def cudaMemGetInfo(self, device: Any = None) -> tuple[int, int]:  # noqa: N802
        return torch.cuda.mem_get_info()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *_: 0
