"""Device timers for CPU and CUDA: timestamps, cache flushing, throttling checks.

On CUDA a mark is an event in the stream, so the time between two marks is the GPU's own and not the host's
time to issue the work; on a CPU it is ``perf_counter``.
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

LEAST_FLUSH_BYTES = 256 * MIB  # At least twice the L2 cache of any GPU in the catalog
CPU_CACHE_BYTES = 32 * MIB  # Assumed of a CPU that does not report the size of its last cache
BUSY_S = 2e-4  # Shortest spin: longer than a busy host needs to issue an event, a few kernels and an event
HIGHEST_CLOCK_PER_S = 2e9  # GPUs spin by cycles; at a lower clock a spin is longer
POLL_S = 0.01


class Stopwatch(ABC):
    """Timer of one device. ``flush`` and marks are ordered with the device's work; ``wait`` ends it."""

    flush_bytes: int

    @abstractmethod
    def flush(self) -> None:
        """Overwrite the last-level cache, so that the next run finds none of its data there."""

    @abstractmethod
    def mark(self) -> Any:
        """Mark this point of the device's work."""

    @abstractmethod
    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; call it after ``wait``."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the device has finished all issued work."""

    @abstractmethod
    def throttled(self) -> tuple[str, ...]:
        """Return why the clocks are held down right now."""

    def held_until(self, end: Any) -> tuple[str, ...]:
        """Return why the clocks were held down from now until the device reached ``end``."""
        return self.throttled()

    def state(self) -> dict[str, float]:
        """Return ``watts`` and ``sm_mhz``, the lowest clock since the last ``held_until`` began."""
        return {}

    def kept(self) -> None:  # noqa: B027
        """Count the clocks read last, which were of a sample that is kept."""

    def busy(self, seconds: float) -> None:  # noqa: B027
        """Keep the device busy this long while the host issues the next work; does nothing on a CPU."""

    def reached(self, mark: Any) -> bool:
        """Return whether the device has reached ``mark``; never on a CPU."""
        return False

    def host_now(self) -> float:
        """Return seconds on the host's clock."""
        return time.perf_counter()

    @abstractmethod
    def environment(self, host: Environment) -> Environment:
        """Return ``host`` completed with the device, and the lowest clocks of the samples kept."""

    def rest(self, seconds: float) -> None:
        """Let the device cool down."""
        time.sleep(seconds)


@final
class CpuStopwatch(Stopwatch):
    """A CPU, whose clocks are not checked."""

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
        """Poll once while a short sample runs, and every ``POLL_S`` of a long one."""
        held, seen, polled_at = set(self.throttled()), self._seen, time.perf_counter()
        while not end.query():
            if time.perf_counter() - polled_at > POLL_S:
                held.update(self.throttled())
                seen, polled_at = _lowest(seen, self._seen), time.perf_counter()
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
    """Return the stopwatch of a device."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()


def last_cache_bytes() -> int:
    """Return the size of this CPU's last cache, as Linux reports it, at most 64 MiB of a shared host's."""
    found = 0
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        size = re.fullmatch(r"(\d+)K", file.read_text().strip())
        found = max(found, int(size[1]) * 1024 if size else 0)
    return min(found, 64 * MIB) or CPU_CACHE_BYTES
