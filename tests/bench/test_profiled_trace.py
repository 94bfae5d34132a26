"""The trace of ``bench kernels``: each kernel's phase and part, and tracks of both."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from trainfit.bench.harness.profiled_trace import ON_GPU, in_parts, write_trace
from trainfit.bench.harness.profiling import PHASE, launches, operation_parts, part, profiler
from trainfit.bench.harness.runner import run

Events = list[dict[str, Any]]
KNOWN = {
    11: ("forward", "scores"), 12: ("forward", "softmax"), 21: ("backward", "softmax"),
    31: ("optimizer", "optimizer"),
}  # fmt: skip


def kernel(number: int, ts: float, dur: float, cat: str = "kernel", **others: Any) -> dict[str, Any]:
    args = {"External id": number, "stream": 7}
    known = {"ph": "X", "cat": cat, "name": f"k{number}", "pid": 0, "tid": 7, "ts": ts, "dur": dur}
    return known | {"args": args} | others


def gpu_trace() -> Events:
    """Kernels out of order, one without a known operation, and a backward's range as Kineto draws it."""
    return [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7 "}},
        kernel(21, 50.0, 4.0), kernel(11, 10.0, 2.0), kernel(11, 13.0, 2.0), kernel(12, 20.0, 5.0),
        kernel(21, 40.0, 6.0, "gpu_memset"), kernel(31, 60.0, 8.0), kernel(99, 70.0, 1.0),
        kernel(11, 1.0, 3.0, "cpu_op", name="aten::mm", pid=5, tid=90),
        kernel(8, 50.0, 0.7, "gpu_user_annotation", name="phase: backward"),
        kernel(9, 60.0, 8.0, "gpu_user_annotation", name="Optimizer.step#AdamW.step"),
    ]  # fmt: skip


def ranges_of(events: Events, cat: str) -> list[tuple[str, float, float, dict[str, Any]]]:
    return [(one["name"], one["ts"], one["dur"], one["args"]) for one in events if one.get("cat") == cat]


def test_each_kernel_has_the_phase_and_part_of_its_operation() -> None:
    raw = gpu_trace()
    found = in_parts(raw, KNOWN)
    ran = {one["ts"]: one["args"] for one in found if one.get("cat") in ("kernel", "gpu_memset")}
    assert (ran[40.0]["phase"], ran[40.0]["part"]) == ("backward", "softmax")
    assert (ran[10.0]["phase"], ran[10.0]["part"], ran[10.0]["stream"]) == ("forward", "scores", 7)
    assert "part" not in ran[70.0]
    (operation,) = (one for one in found if one.get("cat") == "cpu_op")
    assert "part" not in operation["args"]
    assert raw == gpu_trace()
    # The profiler's own range of the backward misses it and is left out.
    kept = [one["name"] for one in found if one.get("cat") == "gpu_user_annotation"]
    assert kept == ["Optimizer.step#AdamW.step"]


def test_phases_and_parts_have_tracks_of_their_own_on_the_gpu() -> None:
    found = in_parts(gpu_trace(), KNOWN)
    assert ranges_of(found, "phases") == [
        ("forward", 10.0, 15.0, {"kernels": 3, "busy, us": 9.0}),
        ("backward", 40.0, 14.0, {"kernels": 2, "busy, us": 10.0}),
        ("optimizer", 60.0, 8.0, {"kernels": 1, "busy, us": 8.0}),
    ]
    parts = [one[:3] for one in ranges_of(found, "parts")]
    assert parts[:2] == [("scores", 10.0, 5.0), ("softmax", 20.0, 5.0)]
    assert parts[2:] == [("softmax", 40.0, 14.0), ("optimizer", 60.0, 8.0)]
    names = {one["args"]["name"]: one["tid"] for one in found if one["name"] == "thread_name"}
    assert set(names) == {"stream 7 ", "stream 7: phases", "stream 7: parts (by kernel)"}
    tracks = {names["stream 7: phases"], names["stream 7: parts (by kernel)"]}
    assert {one["tid"] for one in found if one.get("cat") in ("parts", "phases")} == tracks
    assert not tracks & {7, 90}


def test_a_cpus_trace_has_the_tables_attribution(tmp_path: Path) -> None:
    a, b = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    with profiler(torch.device("cpu")) as seen:
        with record_function(f"{PHASE}forward"):
            with part("scores"):
                scores = a @ b
            with part("softmax"):
                weights = scores.softmax(-1)
        with record_function(f"{PHASE}backward"):
            weights.backward(torch.ones_like(weights))
        with record_function(f"{PHASE}optimizer"):
            torch.ones(3).add_(1)
    events = list(seen.events() or ())
    path = tmp_path / "trace.json.gz"
    write_trace(seen, operation_parts(events, on_gpu=False), path)
    trace: Events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    operations = [one for one in trace if one.get("cat") == "cpu_op" and "part" in one["args"]]
    ran = [(one["args"]["phase"], one["args"]["part"], one["name"]) for one in operations]
    assert sorted(ran) == sorted((one.phase, one.part, one.op) for one in launches(events, on_gpu=False))
    assert ("backward", "scores", "aten::mm") in ran
    assert ("backward", "softmax", "aten::_softmax_backward_data") in ran
    assert ("optimizer", "optimizer") in {one[:2] for one in ran}
    assert [one[0] for one in ranges_of(trace, "phases")] == ["forward", "backward", "optimizer"]
    parts = ranges_of(trace, "parts")
    named = [one[0] for one in parts if one[0] in ("scores", "softmax")]
    assert named == ["scores", "softmax", "softmax", "scores"]
    for (_, start, duration, _), (_, following, _, _) in pairwise(parts):
        assert start + duration <= following + 0.002  # Rounded to a nanosecond.


@pytest.mark.gpu
def test_a_gpus_trace_has_a_part_for_every_kernel_and_all_phases(tmp_path: Path) -> None:
    run("kernels", device="cuda", form="tiny", folder=tmp_path)
    paths = list(tmp_path.glob("*.json.gz"))
    assert paths
    for path in paths:
        trace = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        ran = [one for one in trace if one.get("cat") in ON_GPU]
        assert ran
        assert all("part" in one["args"] for one in ran)
        assert [one[0] for one in ranges_of(trace, "phases")] == ["forward", "backward", "optimizer"]
        assert ("backward", "softmax") in {(one["args"]["phase"], one["args"]["part"]) for one in ran}
