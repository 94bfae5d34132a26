"""Run trials on a Ray cluster (extra ``ray``): one task a part, its trial in its own process on that node.

A worker or node that is lost costs its trial a row
("lost"). A measured trial has a GPU to itself; on a cluster without GPUs it has a node's processors to
itself. Every node needs trainfit, in the same versions. Source of the names: docs.ray.io, "Ray Core API",
"Task fault tolerance".
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

from trainfit.measurement.process import spawned
from trainfit.spec.errors import InputError
from trainfit.spec.optional import optional
from trainfit.spec.value import parse
from trainfit.sweeps.local import OnStart, Stop
from trainfit.sweeps.parts import PartRequest, PartResult, ended, host_out_of_memory, run_part

POLL_S = 0.2


class RayExecutor:
    """A cluster at ``address``, or one started on this machine for the sweep and ended with it.

    ``jobs``: measured trials side by side; default: one a GPU, and without GPUs one a node.
    """

    def __init__(
        self,
        device: Literal["auto", "cpu", "cuda"],
        jobs: int | None = None,
        address: str | None = None,
        deadline_s: float = math.inf,
    ):
        self._device, self._jobs, self._address, self._deadline_s = device, jobs, address, deadline_s
        self._ray: Any = None

    def __enter__(self) -> "RayExecutor":
        # Before ray is imported: no usage statistics, no warning about a future default.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray: Any = optional("ray", "ray", field="executor", value="ray")
        alone: dict[str, Any] = {"address": "local", "include_dashboard": False}
        where = alone if self._address is None else {"address": self._address}
        try:
            ray.init(**where, log_to_driver=False, logging_level="ERROR", configure_logging=True)
        except (ConnectionError, ValueError) as error:
            raise InputError(
                f"no cluster answers ({str(error).strip().splitlines()[0]})",
                "start one with ray start --head",
                field="ray-address",
                value=self._address,
            ) from None
        self._ray = ray
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.shutdown()

    def run(
        self, requests: Sequence[PartRequest], *, stop: Stop, on_start: OnStart
    ) -> Iterator[tuple[PartRequest, PartResult]]:
        """Run them all, of one stage; yields as they end, and ends early when ``stop`` says so."""
        if not requests:
            return
        ray = self._ray
        side_by_side, options = self._places(predicting=requests[0].part == "predict")
        task = ray.remote(_task).options(max_retries=0, **options)
        waiting, running = list(requests), {}
        try:
            while (waiting or running) and not stop():
                if time.monotonic() > self._deadline_s:
                    waiting.clear()
                    if not running:
                        break
                while waiting and len(running) < side_by_side:
                    request = waiting.pop(0)
                    running[task.remote(request.model_dump_json())] = request
                    on_start(request)
                finished, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
                for reference in finished:
                    request = running.pop(reference)
                    yield request, self._result(reference, request)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)  # The worker ends, and its trial with it.

    def _places(self, *, predicting: bool) -> tuple[int, dict[str, Any]]:
        """Number of concurrent tasks, and the resources that each requests of its node."""
        resources = self._ray.cluster_resources()
        if predicting:
            return max(1, int(resources.get("CPU", 1))), {"num_cpus": 1}
        gpus = 0 if self._device == "cpu" else int(resources.get("GPU", 0))
        if gpus:
            if self._jobs is not None and self._jobs > gpus:
                problem = f"the cluster has {gpus} GPUs, and two trials on one would disturb each other"
                raise InputError(problem, f"use --jobs {gpus} or fewer", field="jobs", value=self._jobs)
            return self._jobs or gpus, {"num_gpus": 1, "num_cpus": 1}
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        if not nodes:
            problem = "no live node of the cluster offers processors"
            raise InputError(
                problem, "start one with ray start --num-cpus N", field="ray-address", value=self._address
            )
        jobs = self._jobs or len(nodes)
        fewest = min(int(node["Resources"]["CPU"]) for node in nodes)
        a_node = -(-jobs // len(nodes))
        return jobs, {"num_cpus": max(1, fewest // a_node)}

    def _result(self, reference: Any, request: PartRequest) -> PartResult:
        errors = self._ray.exceptions
        try:
            return parse(PartResult, json.loads(self._ray.get(reference)))
        except errors.RayTaskError as error:
            return ended(request, "crashed", f"the task failed: {error.cause}")
        except errors.OutOfMemoryError as error:
            return ended(
                request, host_out_of_memory(request.part), f"the node ran out of memory: {_first(error)}"
            )
        except errors.RayError as error:
            return ended(request, "lost", f"{type(error).__name__}: {_first(error)}")


def _task(request: str) -> str:
    """Run a part in a new interpreter, on a worker (which has threads, so it must not be forked)."""
    return run_part(parse(PartRequest, json.loads(request)), spawned).model_dump_json()


def _first(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
