"""Read one GPU's state by NVIDIA's management library (NVML), without creating a CUDA context on it.

A measurement needs none of it: every function returns None or nothing if NVML or the GPU is missing.
"""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from trainfit.spec.bench import SLOWDOWNS

# nvml.h, nvmlClocksEventReasons: those that lower the clocks.
CLOCK_EVENTS = {
    0x4: "software power cap", 0x8: "hardware slowdown", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "hardware power brake",
}  # fmt: skip


SAMPLE_EVERY_S = 0.05


class Nvml:
    """NVML's view of the CUDA device ``index`` of this process (CUDA_VISIBLE_DEVICES is followed)."""

    def __init__(self, index: int = 0):
        self._nvml = _started()
        if self._nvml is None:
            return
        visible = visible_device(index)
        by_uuid = isinstance(visible, str)
        find = self._nvml.nvmlDeviceGetHandleByUUID if by_uuid else self._nvml.nvmlDeviceGetHandleByIndex
        try:
            self._handle = find(visible)
        except self._nvml.NVMLError:
            self._nvml = None

    def used_bytes(self) -> int | None:
        """Return the memory in use on the whole GPU: all processes' and the driver's own."""
        info = self._query("nvmlDeviceGetMemoryInfo")
        return None if info is None else int(info.used)

    def total_bytes(self) -> int | None:
        """Return the memory of the GPU."""
        info = self._query("nvmlDeviceGetMemoryInfo")
        return None if info is None else int(info.total)

    def name(self) -> str | None:
        """Return the GPU's name, such as ``NVIDIA H200``, as torch prints it."""
        name = self._query("nvmlDeviceGetName")
        return name.decode() if isinstance(name, bytes) else name

    def driver(self) -> str | None:
        """Return the driver's version, such as ``570.124.06``."""
        if self._nvml is None:
            return None
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except self._nvml.NVMLError:
            return None
        return version.decode() if isinstance(version, bytes) else version

    def utilisation(self) -> float | None:
        """Return the share of time in which a kernel ran, as nvidia-smi prints it."""
        rates = self._query("nvmlDeviceGetUtilizationRates")
        return None if rates is None else rates.gpu / 100

    def memory_access(self) -> float | None:
        """Return the share of time in which device memory was read or written, as nvidia-smi prints it."""
        rates = self._query("nvmlDeviceGetUtilizationRates")
        return None if rates is None else rates.memory / 100

    def clocks_mhz(self) -> dict[str, int]:
        """Return known clocks, now and at most: ``sm``, ``sm_max``, ``memory``, ``memory_max``."""
        if self._nvml is None:
            return {}
        domains = {"sm": self._nvml.NVML_CLOCK_SM, "memory": self._nvml.NVML_CLOCK_MEM}
        found: dict[str, int | None] = {}
        for name, domain in domains.items():
            found[name] = self._query("nvmlDeviceGetClockInfo", domain)
            found[f"{name}_max"] = self._query("nvmlDeviceGetMaxClockInfo", domain)
        return {name: int(clock) for name, clock in found.items() if clock is not None}

    def watts(self) -> float | None:
        """Return the power that the GPU draws now."""
        milliwatts = self._query("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def throttled(self) -> tuple[str, ...]:
        """Return the reasons for which the driver lowers the clocks; empty if none, or unknown."""
        reasons = self._query("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._query("nvmlDeviceGetCurrentClocksThrottleReasons")  # the name before driver 535
        return tuple(name for bit, name in CLOCK_EVENTS.items() if (reasons or 0) & bit)

    def _query(self, name: str, *arguments: Any) -> Any:
        if self._nvml is None or not hasattr(self._nvml, name):
            return None
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except self._nvml.NVMLError:  # Not supported on this GPU, or not allowed here.
            return None


class Utilisation(NamedTuple):
    """Readings of a GPU, whose driver averages both over the last 1/6 to 1 s (nvml.h, nvmlUtilization_t).

    Attributes:
        at_s: on the clock of ``time.perf_counter``.
        busy: share of time in which a kernel ran.
        memory_access: share of time in which device memory was read or written.
    """

    at_s: float
    busy: float
    memory_access: float


AVERAGED_S = 1.0
"""The longest time that a reading is of."""


def mean_utilisation(
    readings: Sequence[Utilisation], spans: Iterable[tuple[float, float]]
) -> tuple[float | None, float | None]:
    """Return the mean shares busy and accessing memory in spans of time; None: no reading is of them alone.

    A reading of less than ``AVERAGED_S`` after a span's begin is also of what was before.
    """
    inside = [one for begin, end in spans for one in readings if begin + AVERAGED_S <= one.at_s <= end]
    if not inside:
        return None, None
    num = len(inside)
    return sum(one.busy for one in inside) / num, sum(one.memory_access for one in inside) / num


class Watched:
    """Context manager that records a GPU's clocks and utilisation, and what lowers the clocks, meanwhile.

    A separate thread queries the driver, without delaying the thread that issues the steps.

    Args:
        after: the record of earlier timed steps, whose reasons, clocks and readings this one starts with.
    """

    def __init__(self, nvml: Any, after: "Watched | None" = None):
        self._nvml, self._done = nvml, threading.Event()
        self._thread = threading.Thread(target=self._run, name="clocks", daemon=True)
        self.reasons: set[str] = set()
        self.clocks_mhz: dict[str, int] = {}
        """Lowest clocks read while the driver throttled the GPU; if it never did, the last ones read."""
        self._lowest: int | None = None
        self.readings: list[Utilisation] = []
        if after is not None:
            self.reasons.update(after.reasons)
            self.clocks_mhz, self._lowest = after.clocks_mhz, after._lowest
            self.readings += after.readings

    def __enter__(self) -> "Watched":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def take(self) -> None:
        """Read the clocks now. Call it at the end of the timed steps, while the GPU is still busy."""
        reasons, clocks = self._nvml.throttled(), self._nvml.clocks_mhz()
        busy, memory_access = self._nvml.utilisation(), self._nvml.memory_access()
        if busy is not None and memory_access is not None:
            self.readings.append(Utilisation(time.perf_counter(), busy, memory_access))
        self.reasons.update(reasons)
        if set(reasons) & set(SLOWDOWNS):
            now = clocks.get("sm", 0)
            if self._lowest is not None and now >= self._lowest:
                return
            self._lowest = now
        elif self._lowest is not None:
            return
        self.clocks_mhz = clocks

    def _run(self) -> None:
        while not self._done.wait(SAMPLE_EVERY_S):
            self.take()


def visible_device(index: int) -> int | str:
    """Return NVML's name for CUDA device ``index``: its number on the host, or its UUID."""
    listed = _listed()
    if index >= len(listed):
        return index
    return int(listed[index]) if listed[index].isdigit() else listed[index]


def visible_gpus() -> list[str]:
    """Return values of CUDA_VISIBLE_DEVICES that select one GPU each; empty without GPUs or NVML."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return _listed()
    nvml = _started()
    if nvml is None:
        return []
    try:
        return [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


def _listed() -> list[str]:
    return [item.strip() for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item.strip()]


def _started() -> Any:
    """Return the NVML library; None without it, without a driver, or in a container that hides it."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml
    except pynvml.NVMLError:
        return None
