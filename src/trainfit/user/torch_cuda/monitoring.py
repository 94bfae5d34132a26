"""Tools that watch a GPU, on the virtual one: NVIDIA's management library and PyTorch's profilers.

``pynvml`` returns the figures of ``nvidia-smi``: memory is that of the ledger so far; utilisation,
temperature, power and clock are placeholders. The profilers keep their schedules, and profile nothing.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler_util import EventList

from trainfit.spec.hardware import Gpu
from trainfit.user.torch_cuda.memory_stats import MemoryStats
from trainfit.user.torch_cuda.streams import no_ops, nothing

Functions = dict[str, Any]
DRIVER = "580.159.04"  # Of the GPUs that calibrations were measured on
UTILISATION_PERCENT, TEMPERATURE_C, POWER_MW, CLOCK_MHZ = 100, 60, 400_000, 1_500
PLACEHOLDERS = "utilisation, temperature, power and clock that the code reads are placeholders"
NOTHING_PROFILED = "torch.profiler profiled nothing and wrote no trace: the code runs on no device"
STARTS = "prepare_trace start_trace stop_trace toggle_collection_dynamic"
EXPORTS = "export_chrome_trace export_stacks export_memory_timeline add_metadata add_metadata_json"
OTHERS = "preset_metadata_json set_custom_trace_id_callback"


def nvml_functions(gpu: Gpu, memory_stats: MemoryStats, num_devices: int) -> Functions:
    """Return the functions of ``pynvml`` that scripts and PyTorch call."""

    def memory(handle: Any, version: Any = None) -> Any:
        used = memory_stats.now().reserved_bytes
        return SimpleNamespace(
            total=gpu.usable_bytes, used=used, free=max(0, gpu.usable_bytes - used), reserved=0
        )

    def placeholder(value: Any) -> Any:
        def read(*_: Any) -> Any:
            memory_stats.tracer.notes.add(PLACEHOLDERS)
            return value

        return read

    utilisation = SimpleNamespace(gpu=UTILISATION_PERCENT, memory=UTILISATION_PERCENT // 2)
    return {
        "nvmlInit": nothing,
        "nvmlInitWithFlags": nothing,
        "nvmlShutdown": nothing,
        "nvmlSystemGetDriverVersion": lambda: DRIVER,
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
        "nvmlDeviceGetCount": lambda: num_devices,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: 0,
        "nvmlDeviceGetHandleByPciBusId": lambda bus: 0,
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetName": lambda handle: gpu.title,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle:08d}-0000-0000-0000-000000000000",
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: [],
        "nvmlDeviceGetCudaComputeCapability": lambda handle: gpu.compute_capability,
        "nvmlDeviceGetUtilizationRates": placeholder(utilisation),
        "nvmlDeviceGetTemperature": placeholder(TEMPERATURE_C),
        "nvmlDeviceGetPowerUsage": placeholder(POWER_MW),
        "nvmlDeviceGetEnforcedPowerLimit": placeholder(POWER_MW),
        "nvmlDeviceGetPowerManagementLimit": placeholder(POWER_MW),
        "nvmlDeviceGetTotalEnergyConsumption": placeholder(0),
        "nvmlDeviceGetClockInfo": placeholder(CLOCK_MHZ),
        "nvmlDeviceGetMaxClockInfo": placeholder(CLOCK_MHZ),
        "nvmlDeviceGetFanSpeed": placeholder(0),
    }


def profiler_functions(notes: set[str]) -> list[tuple[Any, dict[str, Any]]]:
    """Return replacements of the profilers' methods."""

    make = profiler.profile.__init__

    def started(self: Any, *_: Any, **__: Any) -> None:
        notes.add(NOTHING_PROFILED)

    def disabled(self: Any, *_: Any, **options: Any) -> None:
        notes.add(NOTHING_PROFILED)
        make(self, use_cpu=True)
        self.enabled = False
        self._function_events = EventList([])

    context = {"__enter__": lambda self: self, "__exit__": lambda self, *_: None}
    events = {"key_averages": lambda self, *_, **__: EventList([]), "events": lambda self: EventList([])}
    return [
        (
            torch.profiler._KinetoProfile,
            {**no_ops(f"{EXPORTS} {OTHERS}"), **dict.fromkeys(STARTS.split(), started), **events},
        ),
        (
            profiler.profile,
            {"__init__": disabled, **no_ops("export_chrome_trace export_stacks"), **context, **events},
        ),
        (profiler.emit_nvtx, context),
    ]
