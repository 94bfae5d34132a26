"""Run trials on this machine: predictions in parallel on the CPU, measurements one to a GPU (or CPU).

A worker process that dies costs its trial a row ("lost") and is replaced.
"""

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait

from trainfit.measurement.machine import check_processes
from trainfit.measurement.nvml import visible_gpus
from trainfit.spec.errors import InputError
from trainfit.spec.sweep import Part
from trainfit.sweeps.parts import OnStart, PartRequest, PartResult, Stop
from trainfit.sweeps.worker import Worker

MAX_PREDICTIONS = 8  # In parallel; each takes a core and half a GiB
POLL_S = 0.1


class LocalExecutor:
    """Run trials on this machine.

    Args:
        jobs: measured trials in parallel, at most one a GPU.
        deadline_s: no trial starts later (``time.monotonic``).
    """

    def __init__(self, device: str, jobs: int | None = None, deadline_s: float = math.inf):
        self._device, self._deadline_s = device, deadline_s
        gpus = [] if device == "cpu" else visible_gpus()
        if jobs is not None and gpus and jobs > len(gpus):
            problem = f"this machine shows {len(gpus)} GPUs, and two trials on one would disturb each other"
            raise InputError(problem, f"use --jobs {len(gpus)} or fewer", field="jobs", value=jobs)
        if jobs is not None and not gpus:
            check_processes(jobs, "jobs")
        self._gpus: list[str | None] = [*gpus[:jobs]] or [None] * (jobs or 1)

    def environments(self, part: Part, count: int) -> list[dict[str, str]]:
        """Return the environment variables of each worker for ``count`` requests."""
        if part == "predict":
            number = min(count, MAX_PREDICTIONS, len(os.sched_getaffinity(0)))
            return [{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}] * number
        return [{} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu} for gpu in self._gpus[:count]]

    def run(
        self, requests: Sequence[PartRequest], *, stop: Stop, on_start: OnStart
    ) -> Iterator[tuple[PartRequest, PartResult]]:
        """Run the requests, all of one stage; yield results as trials end, until ``stop`` returns True."""
        if not requests:
            return
        waiting, part = deque(requests), requests[0].part
        free = self.environments(part, len(requests))
        idle: list[Worker] = []
        busy: list[Worker] = []
        try:
            while not stop():
                while waiting and (idle or free) and time.monotonic() < self._deadline_s:
                    role = "predict" if part == "predict" else "device"
                    busy.append(idle.pop() if idle else Worker(role, self._device, free.pop(0)))
                    busy[-1].take(waiting.popleft(), on_start)
                if not busy:
                    return
                wait([worker.fileno() for worker in busy], POLL_S)
                for worker in tuple(busy):
                    request, result = worker.request, worker.result(on_start)
                    if request is None or result is None:
                        continue
                    busy.remove(worker)
                    if worker.is_alive:
                        idle.append(worker)
                    else:
                        worker.close()
                        free.append(worker.environment)
                    yield request, result
        finally:
            for worker in (*idle, *busy):
                worker.leave()
            for worker in (*idle, *busy):
                worker.close()
