"""Run trials on this machine: predictions in parallel on the CPU, measurements on GPUs of their own or a CPU.

A measured trial takes as many GPUs as its recipe is for, and none of them is another trial's meanwhile. A
worker process that dies costs its trial a row ("lost") and is replaced.
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
from trainfit.sweeps.parts import OnStart, PartRequest, PartResult, Stop, largest_first, too_few_gpus
from trainfit.sweeps.worker import Worker

MAX_PREDICTIONS = 8  # In parallel; each takes a core and half a GiB
POLL_S = 0.1
FOR_PREDICTION = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class LocalExecutor:
    """Run trials on this machine.

    Args:
        jobs: measured trials in parallel; no two of them share a GPU.
        deadline_s: no trial starts later (``time.monotonic``).
    """

    def __init__(self, device: str, jobs: int | None = None, deadline_s: float = math.inf):
        self._device, self._deadline_s = device, deadline_s
        self._gpus = [] if device == "cpu" else visible_gpus()
        if jobs is not None and self._gpus and jobs > len(self._gpus):
            shown = len(self._gpus)
            problem = f"this machine shows {shown} GPUs, and two trials on one would disturb each other"
            raise InputError(problem, f"use --jobs {shown} or fewer", field="jobs", value=jobs)
        if jobs is not None and not self._gpus:
            check_processes(jobs, "jobs")
        self._jobs = jobs or max(1, len(self._gpus))

    def run(
        self, requests: Sequence[PartRequest], *, stop: Stop, on_start: OnStart
    ) -> Iterator[tuple[PartRequest, PartResult]]:
        """Run the requests, all of one stage; yield results as trials end, until ``stop`` returns True."""
        if not requests:
            return
        predicts = requests[0].part == "predict"
        refused = [] if predicts else too_few_gpus(requests, len(self._gpus), "this machine shows")
        yield from refused
        waiting = deque(largest_first(requests, refused))
        workers = _Workers(self._device, [] if predicts else self._gpus, predicts=predicts)
        most = min(len(requests), MAX_PREDICTIONS, len(os.sched_getaffinity(0))) if predicts else self._jobs
        try:
            while not stop():
                while waiting and len(workers.busy) < most and time.monotonic() < self._deadline_s:
                    worker = workers.begun(waiting[0].num_gpus)
                    if worker is None:
                        break  # The largest waits first: smaller ones would keep it from ever running.
                    worker.take(waiting.popleft(), on_start)
                if not workers.busy:
                    return
                wait([worker.fileno() for worker in workers.busy], POLL_S)
                for worker in tuple(workers.busy):
                    request, result = worker.request, worker.result(on_start)
                    if request is None or result is None:
                        continue
                    workers.end(worker)
                    yield request, result
        finally:
            workers.close()


class _Workers:
    """The worker processes of a stage, and the GPUs of each; without ``gpus`` they share the machine."""

    def __init__(self, device: str, gpus: Sequence[str], *, predicts: bool):
        self._device, self._gpus, self._predicts = device, gpus, predicts
        self._idle: list[Worker] = []
        self.busy: list[Worker] = []

    def begun(self, num_gpus: int) -> Worker | None:
        """Return a worker with so many GPUs, now busy; None where too few are free."""
        taken = [gpu for worker in self.busy for gpu in _gpus_of(worker.environment)]
        free = [gpu for gpu in self._gpus if gpu not in taken]
        num_gpus = num_gpus if self._gpus else 0
        if num_gpus > len(free):
            return None
        for worker in self._idle:
            of_worker = _gpus_of(worker.environment)
            if len(of_worker) == num_gpus and not set(of_worker) & set(taken):
                self._idle.remove(worker)
                break
        else:
            while self._idle:  # They were for another number of GPUs.
                self._idle.pop().close()
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(free[:num_gpus])} if num_gpus else {}
            role, environment = ("predict", FOR_PREDICTION) if self._predicts else ("device", environment)
            worker = Worker(role, self._device, environment)
        self.busy.append(worker)
        return worker

    def end(self, worker: Worker) -> None:
        """Take back a worker that has ended its trial, or died."""
        self.busy.remove(worker)
        if worker.is_alive:
            self._idle.append(worker)
        else:
            worker.close()

    def close(self) -> None:
        """End all workers and their trials."""
        for worker in (*self._idle, *self.busy):
            worker.leave()
        for worker in (*self._idle, *self.busy):
            worker.close()


def _gpus_of(environment: dict[str, str]) -> list[str]:
    return [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
