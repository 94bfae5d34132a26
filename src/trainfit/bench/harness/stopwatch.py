"""Stopwatches: how a point in time, an empty cache and held clocks are had on one kind of device.

On CUDA a mark is an event in the stream, so what lies between two marks is the GPU's own time and not the time the host took to
ask for it; on a CPU it is ``perf_counter``.
"""

import re
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

import torch

from trainfit.measurement.environment import cpu_name
from trainfit.measurement.nvml import Nvml
from trainfit.spec.bench import Environment
from trainfit.spec.units import MIB

LEAST_FLUSH_BYTES = 256 * MIB
"""On a GPU; at least twice any L2 of the catalog's GPUs."""
CPU_CACHE_BYTES = 32 * MIB
"""Of a CPU that does not tell the size of its last cache."""
BUSY_S = 2e-4
"""The least: longer than a busy host needs to ask for an event, a few kernels and an event."""
HIGHEST_CLOCK_PER_S = 2e9
"""GPUs spin by their own cycles; at a lower clock it is longer."""
ASK_EACH_S = 0.01


class Stopwatch(ABC):
    """One device. ``flush`` and the marks are in the order of the device's own work; ``wait`` ends it."""

    flush_bytes: int

    @abstractmethod
    def flush(self) -> None:
        """Write over the last-level cache, so that what is timed next finds none of its data there."""

    @abstractmethod
    def mark(self) -> Any:
        """This point of the device's work."""

    @abstractmethod
    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to the next; after ``wait``."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the device has done all it was asked."""

    @abstractmethod
    def throttled(self) -> tuple[str, ...]:
        """Why the clocks are held down right now."""

    def held_until(self, end: Any) -> tuple[str, ...]:
        """Why the clocks were held down from now until the device came to ``end``."""
        return self.throttled()

    def state(self) -> dict[str, float]:
        """``sm_mhz``, the lowest clock seen since the last ``held_until`` began, and ``watts``, as far as the device tells them."""
        return {}

    def kept(self) -> None:  # noqa: B027
        """What was asked last was of a sample that counts; nothing where clocks are not looked at."""

    def busy(self, seconds: float) -> None:  # noqa: B027
        """Give the device so long to do, in which the host asks for what comes next; nothing where the host is the device."""

    def reached(self, mark: Any) -> bool:
        """Whether the device has come to ``mark`` and the host may be behind; never where the host is the device."""
        return False

    def host_now(self) -> float:
        """Seconds on the host's clock."""
        return time.perf_counter()

    @abstractmethod
    def environment(self, host: Environment) -> Environment:
        """``host`` completed with what is known of the device, and the lowest clocks of the samples that count."""

    def rest(self, seconds: float) -> None:
        """Let the device cool down."""
        time.sleep(seconds)


@final
class CpuStopwatch(Stopwatch):
    """A CPU; its clocks are not looked at."""

    def __init__(self) -> None:
        self.flush_bytes = 2 * last_cache_bytes()
        self._cold = torch.empty(self.flush_bytes, dtype=torch.uint8)

    def flush(self) -> None:
        self._cold.zero_()

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        pass

    def throttled(self) -> tuple[str, ...]:
        return ()

    def environment(self, host: Environment) -> Environment:
        return host.model_copy(update={"device": cpu_name()})


@final
class CudaStopwatch(Stopwatch):
    """One CUDA GPU and the current stream."""

    def __init__(self, device: torch.device):
        self.device = device
        torch.cuda.set_device(device)
        self._nvml = Nvml(device.index or 0)
        self.flush_bytes = max(LEAST_FLUSH_BYTES, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
        self._cold = torch.empty(self.flush_bytes, dtype=torch.uint8, device=device)
        self._device_bytes = torch.cuda.mem_get_info(device)[1]
        self._clocks: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def flush(self) -> None:
        self._cold.zero_()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def busy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * HIGHEST_CLOCK_PER_S))

    def reached(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def held_until(self, end: torch.cuda.Event) -> tuple[str, ...]:
        """Asked once while a short sample runs, every ``ASK_EACH_S`` of a long one: its clocks may be held in the middle."""
        held, seen, asked_at = set(self.throttled()), self._seen, time.perf_counter()
        while not end.query():
            if time.perf_counter() - asked_at > ASK_EACH_S:
                held.update(self.throttled())
                seen, asked_at = _lowest(seen, self._seen), time.perf_counter()
        self._seen = seen
        return tuple(sorted(held))

    def throttled(self) -> tuple[str, ...]:
        self._seen = self._nvml.clocks_mhz()
        return self._nvml.throttled()

    def state(self) -> dict[str, float]:
        watts = self._nvml.watts()
        clocks = {"sm_mhz": float(self._seen["sm"])} if "sm" in self._seen else {}
        return clocks if watts is None else {**clocks, "watts": watts}

    def kept(self) -> None:
        self._clocks = _lowest(self._clocks, self._seen)

    def environment(self, host: Environment) -> Environment:
        return host.model_copy(
            update={
                "device": torch.cuda.get_device_name(self.device),
                "device_bytes": self._device_bytes,
                "driver": self._nvml.driver(),
                "cuda": torch.version.cuda or torch.version.hip,
                "clocks_mhz": self._clocks,
            }
        )


def _lowest(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: min(clocks[name] for clocks in (one, other) if name in clocks) for name in {**one, **other}}


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The stopwatch of a device."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()


def last_cache_bytes() -> int:
    """Size of this CPU's last cache as Linux tells it, at most 64 MiB (a shared host's is not all ours)."""
    found = 0
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        size = re.fullmatch(r"(\d+)K", file.read_text().strip())
        found = max(found, int(size[1]) * 1024 if size else 0)
    return min(found, 64 * MIB) or CPU_CACHE_BYTES
