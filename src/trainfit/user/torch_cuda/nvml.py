"""NVIDIA's management library (``pynvml``) on the virtual GPU: what ``nvidia-smi`` shows.

Memory is that of the ledger so far. Utilisation, temperature, power and clock are placeholders.
"""

from types import SimpleNamespace
from typing import Any

from trainfit.spec.hardware import Gpu
from trainfit.user.torch_cuda.memory_stats import MemoryStats
from trainfit.user.torch_cuda.streams import nothing

Functions = dict[str, Any]
DRIVER = "580.159.04"  # Of the GPUs that calibrations were measured on
UTILISATION_PERCENT, TEMPERATURE_C, POWER_MW, CLOCK_MHZ = 100, 60, 400_000, 1_500
NOTE = "utilisation, temperature, power and clock that the code reads are placeholders"


def nvml_functions(gpu: Gpu, memory_stats: MemoryStats, num_devices: int) -> Functions:
    """Return the functions of ``pynvml`` that scripts and PyTorch call."""

    def memory(handle: Any, version: Any = None) -> Any:
        used = memory_stats.now().reserved_bytes
        return SimpleNamespace(
            total=gpu.usable_bytes, used=used, free=max(0, gpu.usable_bytes - used), reserved=0
        )

    def placeholder(value: Any) -> Any:
        def read(*_: Any) -> Any:
            memory_stats.tracer.notes.add(NOTE)
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
