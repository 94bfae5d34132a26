"""Read one GPU's state by NVIDIA's management library (NVML), without creating a CUDA context on it.

Every function answers None or nothing where NVML or the GPU is missing: it is evidence beside the
measurement, and a measurement stands without it.
"""

import os
from typing import Any

# nvml.h, nvmlClocksEventReasons: those that hold clocks below the requested ones.
CLOCK_EVENTS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class Nvml:
    """NVML's view of the CUDA device ``index`` of this process (CUDA_VISIBLE_DEVICES is followed)."""

    def __init__(self, index: int = 0):
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            visible = visible_device(index)
            by_uuid = isinstance(visible, str)
            find = pynvml.nvmlDeviceGetHandleByUUID if by_uuid else pynvml.nvmlDeviceGetHandleByIndex
            self._handle = find(visible)
            self._nvml = pynvml
        except pynvml.NVMLError:  # No driver, or a container that hides it.
            return

    def used_bytes(self) -> int | None:
        """Memory in use on the whole GPU, as nvidia-smi prints it (all processes and the driver's own)."""
        info = self._ask("nvmlDeviceGetMemoryInfo")
        return None if info is None else int(info.used)

    def name(self) -> str | None:
        """The GPU's name, such as ``NVIDIA H200``, as torch prints it."""
        name = self._ask("nvmlDeviceGetName")
        return name.decode() if isinstance(name, bytes) else name

    def driver(self) -> str | None:
        """The driver's version, such as ``570.124.06``."""
        if self._nvml is None:
            return None
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except self._nvml.NVMLError:
            return None
        return version.decode() if isinstance(version, bytes) else version

    def clocks_mhz(self) -> dict[str, int]:
        """Clocks now and their most: ``sm``, ``sm_max``, ``memory``, ``memory_max``, as far as known."""
        if self._nvml is None:
            return {}
        domains = {"sm": self._nvml.NVML_CLOCK_SM, "memory": self._nvml.NVML_CLOCK_MEM}
        found: dict[str, int | None] = {}
        for name, domain in domains.items():
            found[name] = self._ask("nvmlDeviceGetClockInfo", domain)
            found[f"{name}_max"] = self._ask("nvmlDeviceGetMaxClockInfo", domain)
        return {name: int(clock) for name, clock in found.items() if clock is not None}

    def watts(self) -> float | None:
        """The power that the GPU draws now."""
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def throttled(self) -> tuple[str, ...]:
        """Why clocks are held down now; empty when they are not, or when NVML does not tell."""
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")  # the name before driver 535
        return tuple(name for bit, name in CLOCK_EVENTS.items() if (reasons or 0) & bit)

    def _ask(self, question: str, *arguments: Any) -> Any:
        if self._nvml is None or not hasattr(self._nvml, question):
            return None
        try:
            return getattr(self._nvml, question)(self._handle, *arguments)
        except self._nvml.NVMLError:  # Not supported on this GPU, or not allowed here.
            return None


def visible_device(index: int) -> int | str:
    """NVML's name for CUDA device ``index``: its number on the host, or its UUID."""
    listed = [item.strip() for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item.strip()]
    if index >= len(listed):
        return index
    return int(listed[index]) if listed[index].isdigit() else listed[index]


def visible_gpus() -> list[str]:
    """Return values of CUDA_VISIBLE_DEVICES that select one GPU each; empty without GPUs or NVML."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [item.strip() for item in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if item.strip()]
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:  # No driver, or a container that hides it.
        return []
