"""Meters: how memory and time are read on one kind of device.

On CUDA the caching allocator keeps the highest allocated bytes on the host as it hands out blocks, so reading
them at a phase's boundary needs no synchronisation. On a CPU LiveBytes follows the real storages.
"""

import gc
import importlib
import itertools
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from trainfit.measurement.environment import cpu_name
from trainfit.measurement.live import LiveBytes
from trainfit.measurement.nvml import Nvml, Watched, mean_utilisation
from trainfit.spec.result import Environment, MemoryBreakdown
from trainfit.step import Batch, Step
from trainfit.virtual.trace.storages import prepend_grad_hook

Peak = tuple[int, MemoryBreakdown | None]  # Bytes, and their breakdown if known


class Meter(ABC):
    """Memory meter of one device. The step is assembled, settled and run inside ``watching``."""

    reads_at_no_cost = False
    """Whether a step takes as long while its phases' peaks are read."""

    def __init__(self, device: torch.device):
        self.device = device

    @abstractmethod
    def environment(self, host: Environment) -> Environment:
        """Complete ``host`` with the facts of the device, which only this process uses."""

    @abstractmethod
    def limit(self, memory_bytes: int) -> None:
        """Let the steps allocate at most this much, as on a smaller device."""

    def watching(self) -> Any:
        """Return a context that tracks memory; only code inside it is counted."""
        return nullcontext()

    @abstractmethod
    def settle(self, step: Step) -> int | None:
        """Return the allocated bytes of the built step, without its garbage; None if not followed."""

    def enter_phase(self, phase: str) -> None:  # noqa: B027 - only a meter with categories needs it
        """Count new storages as those of ``phase``."""

    def own(self, tensors: Sequence[torch.Tensor], category: str) -> None:  # noqa: B027
        """Count tensors as of a category."""

    def after_step(self, step: Step) -> None:  # noqa: B027
        """Count optimizer state, known once a step is over."""

    @abstractmethod
    def take(self) -> Peak | None:
        """Return the highest allocated bytes since the last call, and begin anew; None if not followed."""

    def reserved(self) -> int | None:
        """Return the highest reserved bytes since the last ``take``; None: there is no cache."""
        return None

    @abstractmethod
    def times(
        self, run: Callable[[], torch.Tensor], num_steps: int, *, continues: bool = False
    ) -> tuple[list[float], list[float]]:
        """Run ``num_steps`` steps without reading memory; return the seconds of each, and the losses.

        Args:
            continues: the steps of the call before count too: so do clocks and utilisation read during them.
        """

    @abstractmethod
    def totals(self) -> dict[str, Any]:
        """Return the fields of the Measurement that are read once, at the end."""

    def breakdown(self, step: Step, batches: list[Batch]) -> MemoryBreakdown | None:
        """Return the breakdown of the peak from one more step, if the steps before did not show it."""
        return None


class CpuMeter(Meter):
    """A CPU. ``tracked``: follow live tensors; not possible through compiled code (see live.py)."""

    def __init__(self, device: torch.device, tracked: bool):
        super().__init__(device)
        self._live = LiveBytes(device) if tracked else None
        self._hooks: list[RemovableHandle] = []

    def environment(self, host: Environment) -> Environment:
        return host.model_copy(update={"device": cpu_name()})

    def limit(self, memory_bytes: int) -> None:
        # The system's limit is on address space: free parts of this process's heap add to it (a fork inherits
        # its parent's heap), so live tensors have a limit of their own.
        if self._live is not None:
            self._live.limit_bytes = memory_bytes
        # Imported now: the first operation would import it, and its memory would count towards the limit.
        importlib.import_module("torch._dynamo")
        status = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + memory_bytes, resource.RLIM_INFINITY))

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self._live is None:
            yield
            return
        self._live.category = "weights"
        try:
            with self._live:
                yield
        finally:
            for hook in self._hooks:  # Timed steps run without hooks.
                hook.remove()

    def settle(self, step: Step) -> int | None:
        gc.collect()
        if self._live is None:
            return None
        self._hooks = name_holders(self._live, step)
        self._live.category = "activations"  # The next storages are batches.
        self._live.take_peak()
        return self._live.live_bytes

    def enter_phase(self, phase: str) -> None:
        if self._live is not None:
            self._live.enter_phase(phase)

    def own(self, tensors: Sequence[torch.Tensor], category: str) -> None:
        if self._live is not None:
            self._live.assign(tensors, category)

    def after_step(self, step: Step) -> None:
        if self._live is not None:
            self._live.assign(optimizer_tensors(step), "optimizer")

    def take(self) -> Peak | None:
        return None if self._live is None else self._live.take_peak()

    def times(
        self, run: Callable[[], torch.Tensor], num_steps: int, *, continues: bool = False
    ) -> tuple[list[float], list[float]]:
        seconds, losses = [], []
        for _ in range(num_steps):
            start = time.perf_counter()
            loss = run()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
        return seconds, losses

    def totals(self) -> dict[str, Any]:
        # Linux counts ru_maxrss in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return {"peak_device_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


class CudaMeter(Meter):
    """One CUDA GPU. Made before this process touches CUDA, so that the context's own memory is counted."""

    reads_at_no_cost = True

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._nvml = Nvml(device.index or 0)
        self._used_before = self._nvml.used_bytes()
        self._reserved = 0
        self._clocks: dict[str, Any] = {}
        self._shares: dict[str, float | None] = {}
        self._watched: Watched | None = None
        self._timed: list[tuple[float, float]] = []
        """When timed steps ran."""
        self._host: Environment | None = None

    def environment(self, host: Environment) -> Environment:
        torch.cuda.set_device(self.device)
        self._host = cuda_environment(host, self.device, self._nvml)
        return self._host

    def limit(self, memory_bytes: int) -> None:
        total = torch.cuda.mem_get_info(self.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total), self.device)

    def settle(self, step: Step) -> int | None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        # Segments that only building the model needed would otherwise count as the step's reserved memory.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def take(self) -> Peak:
        peak = torch.cuda.max_memory_allocated(self.device)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak, None

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    def times(
        self, run: Callable[[], torch.Tensor], num_steps: int, *, continues: bool = False
    ) -> tuple[list[float], list[float]]:
        # No wait between steps, as in training: the time from one event to the next is the GPU's own.
        torch.cuda.synchronize(self.device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
        # Losses go to the host as they come: kept on the device they would count towards the peak.
        losses = torch.empty(num_steps, pin_memory=True)
        begin_s = time.perf_counter()
        if not continues:
            self._watched, self._timed = None, []
        with Watched(self._nvml, self._watched) as watched:
            events[0].record()
            for loss, event in zip(losses, events[1:], strict=True):
                loss.copy_(run(), non_blocking=True)
                event.record()
            watched.take()  # The last step is still running on the GPU: the clocks are those under load.
            torch.cuda.synchronize(self.device)
        self._watched = watched
        self._timed.append((begin_s, time.perf_counter()))
        self.note(watched, self._timed)
        seconds = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
        return seconds, losses.tolist()

    def watched(self) -> Watched:
        """Return a context that reads clocks and utilisation, for ``note``."""
        return Watched(self._nvml)

    def note(self, watched: Watched, spans: Sequence[tuple[float, float]]) -> None:
        """Keep what was read while timed steps ran, in spans of time."""
        self._clocks = {"clocks_mhz": watched.clocks_mhz, "throttled": tuple(sorted(watched.reasons))}
        self._shares = dict(
            zip(("busy", "memory_access"), mean_utilisation(watched.readings, spans), strict=True)
        )

    def totals(self) -> dict[str, Any]:
        assert self._host is not None, "environment() comes first"
        # The most that this process had: current use, and memory that the allocator gave back.
        returned = max(0, self._reserved - torch.cuda.memory_reserved(self.device))
        return {
            "peak_reserved_bytes": self._reserved,
            "peak_device_bytes": self._used_bytes() + returned,
            "environment": self._host.model_copy(update=self._clocks),
            **self._shares,
        }

    def _used_bytes(self) -> int:
        used = self._nvml.used_bytes()
        if used is None or self._used_before is None:
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free  # Without NVML: all processes' memory on this GPU.
        return max(0, used - self._used_before)

    def breakdown(self, step: Step, batches: list[Batch]) -> MemoryBreakdown | None:
        live = LiveBytes(self.device)
        with live:
            name_holders(live, step)
            live.assign(tree_tensors(batches), "activations")
            live.take_peak()
            torch.cuda.reset_peak_memory_stats(self.device)
            step(batches, on_phase=live.enter_phase)
            peak, held = live.take_peak()
        # Allocated, but of no tensor: cuBLAS workspaces, scratch inside kernels, rounding of blocks.
        unseen = torch.cuda.max_memory_allocated(self.device) - peak
        return held.model_copy(update={"workspace": unseen}) if unseen >= 0 else None


def cuda_environment(host: Environment, device: torch.device, nvml: Nvml) -> Environment:
    """Return the host's environment with the GPU's facts."""
    found = {
        "device": torch.cuda.get_device_name(device),
        "device_bytes": torch.cuda.mem_get_info(device)[1],
        "driver": nvml.driver(),
        "cuda": torch.version.cuda or torch.version.hip,
    }
    return host.model_copy(update=found)


def assign_state(live: LiveBytes, step: Step) -> None:
    """Assign weights and optimizer state to their categories."""
    live.assign([*step.model.parameters(), *step.model.buffers()], "weights")
    live.assign(optimizer_tensors(step), "optimizer")


def name_holders(live: LiveBytes, step: Step) -> list[RemovableHandle]:
    """``assign_state``, and register hooks that assign each gradient once it is accumulated."""
    assign_state(live, step)

    def is_gradient(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            live.assign([parameter.grad], "gradients")

    trained = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
    for parameter in trained:  # Gradients that are kept from step to step.
        is_gradient(parameter)
    return [prepend_grad_hook(parameter, is_gradient) for parameter in trained]


def optimizer_tensors(step: Step) -> list[torch.Tensor]:
    """Return every tensor in the optimizers' state."""
    return tree_tensors([list(optimizer.state.values()) for optimizer in step.optimizers])


def tree_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of nested lists and mappings."""
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` reports a lack of memory, on the GPU, in a CUDA library or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    phrases = (
        "can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED", "bad_alloc",
        "Cuda failure 2 'out of memory'",  # NCCL's.
    )  # fmt: skip
    return isinstance(error, RuntimeError) and any(text in str(error) for text in phrases)


def out_of_memory_reason(error: BaseException) -> str:
    """Return the first line of the message; Python's own MemoryError has none."""
    return next(iter(str(error).strip().splitlines()), "no memory left")
