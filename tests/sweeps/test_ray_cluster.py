"""Trials on a Ray cluster: what Ray is asked for, and what becomes of each end of a task."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fake_ray import OutOfMemoryError, Ray, WorkerCrashedError
from trainfit.cli.sweep import executing
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.sweep import MeasurePart
from trainfit.sweeps import parts, ray_cluster
from trainfit.sweeps.parts import PartRequest, PartResult

GPU_NODE, CPU_NODE = {"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0}


def requests(part: Any, count: int = 5, num_gpus: int = 1) -> list[PartRequest]:
    recipe = recipe_from({"model": {"config": "gpt2"}, "hardware": {"count": num_gpus}})
    how: dict[str, Any] = {"recipe": recipe, "device": "auto", "timeout_s": 60.0, "measure": MeasurePart()}
    return [PartRequest(part=part, variant=str(number), **how) for number in range(count)]


ENDS: dict[str, Callable[[], object]] = {}


def run_part(request: PartRequest, start: Any) -> PartResult:
    """In place of a trial's process."""
    assert start is ray_cluster.spawned, "a worker of Ray has threads, so it must not fork"
    ENDS.get(request.variant, lambda: None)()
    return parts.ended(request, "done")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str, str]]]:
    """Run requests on a cluster as the command does; return variant, status and message in their order."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(ray_cluster, "run_part", run_part)
    monkeypatch.setattr(sys.modules[__name__], "ENDS", {})

    def run(
        ray: Ray, part: str = "measure", *, jobs: int | None = None, address: str | None = None,
        device: str = "auto", most: int = 9, deadline_s: float = float("inf"), num_gpus: int = 1,
    ) -> list[tuple[str, str, str]]:  # fmt: skip
        monkeypatch.setitem(sys.modules, "ray", ray)  # pyright: ignore[reportArgumentType]
        begun, found = [], []
        with executing("ray", device, jobs, address, deadline_s) as trials:
            results = trials.run(
                requests(part, num_gpus=num_gpus),
                stop=lambda: len(found) >= most,
                on_start=lambda one: begun.append(one.variant),
            )
            for request, result in results:
                assert request.id == result.outcome.request_id
                found.append((request.variant, result.outcome.status, result.outcome.message))
        assert [one for one, status, _ in found if one not in begun and status != "refused"] == []
        assert (ray.log[-1], ray.is_initialized) == ("shutdown", False)
        return found

    return run


def fails(error: Exception) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


def test_every_end_of_a_task_is_a_row(ran: Any) -> None:
    ray = Ray(GPU_NODE, GPU_NODE, dead=[GPU_NODE])
    ENDS.update(
        {
            "1": fails(WorkerCrashedError("The worker died.\nmore")),
            "2": fails(OutOfMemoryError("\nTask was killed due to the node running low on memory")),
            "3": fails(KeyError("no trainfit here")),
        }
    )
    found = {variant: (status, message) for variant, status, message in ran(ray)}
    low = "the node ran out of memory: Task was killed due to the node running low on memory"
    assert found == {
        "0": ("done", ""), "4": ("done", ""), "1": ("lost", "WorkerCrashedError: The worker died."),
        "2": ("out-of-memory", low), "3": ("crashed", "the task failed: 'no trainfit here'"),
    }  # fmt: skip
    assert ray.log == [("init", "local"), "shutdown"]
    assert (ray.most_running, ray.cancelled) == (2, [])  # One a live GPU
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize(
    ("nodes", "part", "how", "running", "needs"),
    [
        ([GPU_NODE, CPU_NODE], "predict", {}, 5, {"CPU": 1, "GPU": 0}),
        ([GPU_NODE, GPU_NODE], "measure", {"jobs": 1}, 1, {"CPU": 1, "GPU": 1}),
        ([GPU_NODE, CPU_NODE], "measure", {"device": "cpu"}, 2, {"CPU": 8, "GPU": 0}),
        ([CPU_NODE, {"CPU": 6.0}], "measure", {"jobs": 3}, 3, {"CPU": 3, "GPU": 0}),  # Two on a node
    ],
)
def test_a_measured_trial_has_its_gpu_or_its_share_of_a_node(
    ran: Any, nodes: Any, part: str, how: dict[str, Any], running: int, needs: dict[str, float]
) -> None:
    ray = Ray(*nodes)
    assert len(ran(ray, part, address="head:6379", **how)) == 5
    assert ray.log[0] == ("init", "head:6379")
    assert (ray.most_running, ray.needs) == (running, [needs] * 5)


def test_a_trial_for_several_gpus_takes_as_many_of_one_node(ran: Any) -> None:
    ray = Ray({"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0})
    assert len(ran(ray, num_gpus=2)) == 5
    assert (ray.most_running, ray.needs) == (2, [{"CPU": 1, "GPU": 2}] * 5)
    (first, *_), more = ran(ray := Ray(GPU_NODE, GPU_NODE), num_gpus=2), "the largest node has 1 GPU"
    assert first[1] == "refused"
    assert more in first[2]
    assert not ray.needs


def test_a_stopped_sweep_cancels_what_runs_and_a_late_one_begins_nothing(ran: Any) -> None:
    ray = Ray(GPU_NODE, GPU_NODE)
    assert len(ran(ray, most=1)) == 1
    assert ray.cancelled == ray.running != []
    assert ran(late := Ray(GPU_NODE), deadline_s=0.0) == []
    assert late.most_running == 0


def test_what_a_cluster_lacks_is_refused(ran: Any) -> None:
    for ray, how, words in (
        (Ray(GPU_NODE), {"jobs": 2}, "the cluster has 1 GPU.*use --jobs 1"),
        (Ray(dead=[CPU_NODE]), {}, "no live node of the cluster offers processors"),
    ):
        with pytest.raises(InputError, match=words):
            ran(ray, **how)
        assert ray.log[-1] == "shutdown"
    with pytest.raises(InputError, match=r"ray-address = 'nowhere:6379'.*Could not find any running Ray in"):
        ran(Ray(), address="nowhere:6379")
