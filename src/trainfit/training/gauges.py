"""Device readings during training: peak memory and utilisation."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from trainfit.measurement.live import LiveBytes
from trainfit.measurement.meter import assign_state, tree_tensors
from trainfit.measurement.nvml import Nvml
from trainfit.spec.bench import SLOWDOWNS
from trainfit.step import Batch, Step

SAMPLE_EVERY_S = 0.25  # The driver averages utilisation over 1/6 to 1 s (nvml.h, nvmlUtilization_t)


class Load:
    """Utilisation of the device, and why its driver throttles it; both are read every ``SAMPLE_EVERY_S``."""

    def __init__(self, device: torch.device):
        self._nvml = Nvml(device.index or 0) if device.type == "cuda" else None
        self._cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self._at_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._last: float | None = None
        self._held_back: tuple[str, ...] = ()
        self._held_at_s = -SAMPLE_EVERY_S

    def held_back(self) -> tuple[str, ...]:
        """Return why the driver throttles the GPU (SLOWDOWNS); empty: it does not."""
        now_s = time.perf_counter()
        if self._nvml is not None and now_s - self._held_at_s >= SAMPLE_EVERY_S:
            self._held_back = tuple(one for one in self._nvml.throttled() if one in SLOWDOWNS)
            self._held_at_s = now_s
        return self._held_back

    def share(self) -> float | None:
        """Return the utilisation since the last sample, 0 to 1; None where it is unknown."""
        now_s = time.perf_counter()
        if self._last is not None and now_s - self._at_s < SAMPLE_EVERY_S:
            return self._last
        if self._nvml is not None:
            self._last = self._nvml.utilisation()
        else:
            cpu_s = time.process_time()
            self._last = (cpu_s - self._cpu_s) / max(now_s - self._at_s, 1e-9) / self._cores
            self._cpu_s = cpu_s
        self._at_s = now_s
        return self._last


class PeakMemory:
    """Peak allocated bytes: of all steps by CUDA's allocator, or of one step's live tensors on a CPU.

    Counting live tensors slows every operation, so only one steady step is counted, outside the step times.
    The peak of compiled code on a CPU is unknown, and so is that of several ranks.
    """

    def __init__(self, step: Step, num_steps: int):
        self._step, self._cuda = step, step.device.type == "cuda"
        self.kind: Literal["cuda-allocated", "live-tensors"] | None = "cuda-allocated" if self._cuda else None
        self._num_bytes: int | None = None
        # The first step has no optimizer state yet; the second is like all others.
        self._counted = (
            None if self._cuda or step.recipe.compile or step.mesh is not None else min(1, num_steps - 1)
        )
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(step.device)

    @contextmanager
    def around(self, index: int, batches: Sequence[Batch]) -> Iterator[bool]:
        """Run step ``index`` of this process (from 0); yield whether its live tensors are counted."""
        if index != self._counted:
            yield False
            return
        live = LiveBytes(self._step.device)
        assign_state(live, self._step)
        live.assign(tree_tensors(batches), "activations")
        with live:
            yield True
        self.kind, self._num_bytes = "live-tensors", live.take_peak()[0]

    def read(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._step.device) if self._cuda else self._num_bytes
