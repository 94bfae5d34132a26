"""Run trials on a Ray cluster (extra ``ray``): one task a part, its trial in its own process on that node.

A lost worker or node costs its trial a row ("lost"). A measured trial has the GPUs of its recipe to itself,
all of one node, or without GPUs a node's processors. Every node needs trainfit, in the same versions. Source
of the names: docs.ray.io, "Ray Core API", "Task fault tolerance".
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from trainfit.measurement.process import spawned
from trainfit.spec.errors import InputError
from trainfit.spec.optional import optional
from trainfit.spec.parsing.parse import parse
from trainfit.sweeps.parts import (
    OnStart,
    PartRequest,
    PartResult,
    Stop,
    ended,
    host_out_of_memory,
    largest_first,
    run_part,
    too_few_gpus,
)  # fmt: skip

POLL_S = 0.2


class RayExecutor:
    """A cluster at ``address``, or one started on this machine for the sweep and ended with it.

    ``jobs``: measured trials in parallel; default: one a GPU, and without GPUs one a node.
    """

    def __init__(
        self, device: str, jobs: int | None = None, address: str | None = None, deadline_s: float = math.inf
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
            raise self._refusal(f"no cluster answers ({_first(error)})", "ray start --head") from None
        self._ray = ray
        return self

    def __exit__(self, *_: Any) -> None:
        self._ray.shutdown()

    def _refusal(self, problem: str, command: str) -> InputError:
        return InputError(problem, f"start one with {command}", field="ray-address", value=self._address)

    def run(
        self, requests: Sequence[PartRequest], *, stop: Stop, on_start: OnStart
    ) -> Iterator[tuple[PartRequest, PartResult]]:
        """Run the requests, all of one stage; yield results as trials end, until ``stop`` returns True."""
        if not requests:
            return
        ray = self._ray
        num_parallel, options = self._resources(predicting=requests[0].part == "predict")
        of_node, free = self._gpus() if "num_gpus" in options else (0, 0)
        refused = too_few_gpus(requests, of_node, "the largest node has")
        yield from refused
        waiting, running = largest_first(requests, refused), {}
        try:
            while not stop():
                while waiting and len(running) < num_parallel and time.monotonic() < self._deadline_s:
                    if of_node and waiting[0].num_gpus > free - sum(one.num_gpus for one in running.values()):
                        break
                    request = waiting.pop(0)
                    own = options | ({"num_gpus": request.num_gpus} if of_node else {})
                    task = ray.remote(_task).options(max_retries=0, **own)
                    running[task.remote(request.model_dump_json())] = request
                    on_start(request)
                if not running:
                    return
                finished, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
                for reference in finished:
                    request = running.pop(reference)
                    yield request, self._result(reference, request)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)  # The worker ends, and its trial with it.

    def _gpus(self) -> tuple[int, int]:
        """Return the GPUs of the node with the most, and of all."""
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        counts = [int(resources.get("GPU", 0)) for resources in alive]
        return max(counts, default=0), sum(counts)

    def _resources(self, *, predicting: bool) -> tuple[int, dict[str, Any]]:
        """Return the number of parallel tasks, and the resources that each needs of its node."""
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
            raise self._refusal(problem, "ray start --num-cpus N")
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
            status = host_out_of_memory(request.part)
            return ended(request, status, f"the node ran out of memory: {_first(error)}")
        except errors.RayError as error:
            return ended(request, "lost", f"{type(error).__name__}: {_first(error)}")


def _task(request: str) -> str:
    """Run a part in a new interpreter: a worker of Ray has threads, so it must not fork."""
    return run_part(parse(PartRequest, json.loads(request)), spawned).model_dump_json()


def _first(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
