"""Device readings during training: peak memory and utilisation."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from trainfit.measurement.live import LiveBytes
from trainfit.measurement.meter import optimizer_tensors
from trainfit.measurement.nvml import Nvml
from trainfit.step import Batch, Step

SAMPLE_EVERY_S = 0.25
"""The driver averages utilisation over 1/6 to 1 s (nvml.h, nvmlUtilization_t)."""


class _NvmlBusy(Nvml):
    """Utilisation as nvidia-smi prints it: share of time in which a kernel ran."""

    def share(self) -> float | None:
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return None if rates is None else rates.gpu / 100


class Busy:
    """Utilisation of the device since the last sample, 0 to 1; None where it is unknown."""

    def __init__(self, device: torch.device):
        self._nvml = _NvmlBusy(device.index or 0) if device.type == "cuda" else None
        self._cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self._at_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._last: float | None = None

    def share(self) -> float | None:
        now_s = time.perf_counter()
        if self._last is not None and now_s - self._at_s < SAMPLE_EVERY_S:
            return self._last
        if self._nvml is not None:
            self._last = self._nvml.share()
        else:
            cpu_s = time.process_time()
            self._last = (cpu_s - self._cpu_s) / max(now_s - self._at_s, 1e-9) / self._cores
            self._cpu_s = cpu_s
        self._at_s = now_s
        return self._last


class PeakMemory:
    """Peak allocated bytes: of all steps by CUDA's allocator, or of one step's live tensors on a CPU.

    Counting live tensors slows every operation, so only one steady step is counted, outside the step times.
    It does not see compiled code: there the peak stays None.
    """

    def __init__(self, step: Step, num_steps: int):
        self._step = step
        self.kind: Literal["cuda-allocated", "live-tensors"] | None = None
        self.num_bytes: int | None = None
        self._cuda = step.device.type == "cuda"
        # The first step has no optimizer state yet; the second is like all others.
        self._counted = None if self._cuda or step.recipe.compile else min(1, num_steps - 1)
        if self._cuda:
            self.kind = "cuda-allocated"
            torch.cuda.reset_peak_memory_stats(step.device)

    @contextmanager
    def around(self, index: int, batches: Sequence[Batch]) -> Iterator[bool]:
        """Run step ``index`` of this process (from 0); yield whether its live tensors are counted."""
        if index != self._counted:
            yield False
            return
        live = LiveBytes(self._step.device)
        live.assign([*self._step.model.parameters(), *self._step.model.buffers()], "weights")
        live.assign(optimizer_tensors(self._step), "optimizer")
        live.assign([tensor for batch in batches for tensor in batch.values()], "activations")
        with live:
            yield True
        self.kind, self.num_bytes = "live-tensors", live.take_peak()[0]

    def read(self) -> int | None:
        if self._cuda:
            self.num_bytes = torch.cuda.max_memory_allocated(self._step.device)
        return self.num_bytes
