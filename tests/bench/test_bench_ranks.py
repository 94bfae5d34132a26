"""Experiments on several ranks: failures of a rank, overlap and traffic of a trace, the bucket model."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench_rows import tiny_bench
from evidence.scripts.tables import collectives as published
from trainfit.bench.experiments import collectives, ddp, sharding
from trainfit.bench.harness.bench import failure_of
from trainfit.bench.harness.overlap import timeline, traffic
from trainfit.bench.harness.processes import Rank, RankError, Ranks
from trainfit.bench.harness.runner import run
from trainfit.catalog.collectives import share_of
from trainfit.catalog.load import gpu, link, transfers


def answers_once(rank: Rank, ending: str) -> Iterator[int]:
    rank.start_together()
    yield os.getpid()
    if rank.number == 1 and ending == "raises":
        raise ZeroDivisionError("no such step\nand more")
    if rank.number == 1:
        os._exit(3)
    rank.start_together()  # The other rank never comes.


@pytest.mark.parametrize(
    ("ending", "why"),
    [("raises", "rank 1: ZeroDivisionError: no such step"), ("dies", "rank 1 ended with exit code 3")],
)
def test_a_rank_that_fails_ends_all_ranks_with_one_line(ending: str, why: str) -> None:
    with Ranks(2, "cpu", answers_once, ending) as ranks:
        processes = ranks.results()
        for _ in range(2):  # Points that follow fail for the same reason.
            with pytest.raises(RankError) as error:
                ranks.results()
            assert failure_of(error.value) == ("failed", f"RankError: {why}")
        for process in processes:
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    factors = {name: factor(4) for name, factor in collectives.BUS.items()}
    assert factors == {"all-reduce": 1.5, "all-gather": 0.75, "reduce-scatter": 0.75, "broadcast": 1.0}


def test_a_published_table_is_explained_by_the_ring() -> None:
    """All-reduces of 1 GB by 2, 4 and 6 ranks: the links' rate stays, and is not that of NVLink."""
    for backend, seconds in published.PUBLISHED_S.items():
        bus = [collectives.BUS["all-reduce"](ranks) * 1.0 / one for ranks, one in seconds.items()]
        assert max(bus) / min(bus) < 1.25, backend
    nccl = published.PUBLISHED_S["nccl"]
    assert published.bus_gb_per_s(2, nccl[2]) == pytest.approx(1 / 0.42)
    assert published.bus_gb_per_s(6, nccl[6]) == pytest.approx(2 * 5 / 6 / 0.85)
    assert max(published.bus_gb_per_s(*one) for one in nccl.items()) < 2.5


def test_a_prediction_of_a_collective_is_the_ring_at_the_rate_that_was_fitted() -> None:
    h200, at = gpu("h200"), {"processes": 2, "collective": "all-reduce", "size_mb": 1000}
    share = share_of("all_reduce", transfers(h200))
    inside = link(h200.link)
    expected_s = 1e9 / (share * inside.bytes_per_s) + inside.latency_s + transfers(h200).start_s
    assert collectives.predicted_s(at, h200) == pytest.approx(expected_s)
    # Two H200s took 3.07 ms (evidence/records/bench.jsonl).
    assert collectives.predicted_s(at, h200) == pytest.approx(3.07e-3, rel=0.1)


@pytest.mark.parametrize(
    ("device", "form", "expected"),
    [
        ("cpu", "tiny", [("gloo", 2, 1), ("gloo", 2, 3)]),
        ("cuda", "tiny", [("nccl", 2, 4)]),
        (
            "cuda",
            "full",
            [*[("nccl", n, 4) for n in (2, 4, 6)], *[("gloo", n, k) for k in (1, 3) for n in (2, 4, 6)]],
        ),
    ],
)
def test_a_machine_with_gpus_measures_both_backends(device: str, form: Any, expected: list[Any]) -> None:
    bench = replace(tiny_bench(form=form), device=torch.device(device))
    assert [(name, count, len(kinds)) for name, count, kinds in collectives.groups(bench)] == expected


def test_what_a_machine_has_too_few_gpus_for_is_said() -> None:
    only = {"backend": ["nccl"], "processes": ["6"], "size_mb": ["1"]}
    rows = run("collectives", device="cpu", form="full", only=only).rows
    assert {row.status for row in rows} == {"refused"}
    assert all("this machine has 0 GPUs" in row.message for row in rows)


@pytest.mark.parametrize(
    ("call_s", "count", "calls"), [(0.001, 10, 2 + 10 * 3), (0.8, 7, 2 + 7), (9.0, 3, 2 + 3)]
)
def test_long_calls_have_fewer_samples(
    call_s: float, count: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(collectives.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(collectives, "_slowest", lambda rank, seconds: seconds)
    made: list[int] = []

    def call() -> None:
        made.append(1)
        now[0] += call_s

    rank = Rank(0, 1, torch.device("cpu"), dist.HashStore())
    assert collectives.samples(rank, call, 1) == pytest.approx([call_s] * count)
    assert len(made) == calls


def event(name: str, begin_us: float, end_us: float, category: str = "kernel", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin_us, "dur": end_us - begin_us, "args": args}


def test_communication_during_computation_is_hidden() -> None:
    trace = [
        event("phase: forward", 100, 200, "gpu_user_annotation"),
        event("gemm", 100, 250),
        event("gemm of another stream", 240, 300),
        event("Memset", 350, 360, "gpu_memset"),
        event("ncclDevKernel_AllReduce", 290, 355),
        event("phase: optimizer", 400, 500, "gpu_user_annotation"),
        event("adamw", 400, 500),
        event("aten::mm", 0, 900, "cpu_op"),  # The host is no part of a GPU's timeline.
    ]
    line = timeline(trace)
    assert line.end == pytest.approx(400e-6)
    assert line.communication_s == pytest.approx(65e-6)
    assert line.hidden_s == pytest.approx(10e-6 + 5e-6)
    curve = line.curve(8)
    assert curve.columns["compute"] == (1000, 1000, 1000, 1000, 0, 200, 1000, 1000)
    assert curve.columns["communication"] == (0, 0, 0, 200, 1000, 100, 0, 0)
    assert curve.phases == ("forward", "forward", *["backward"] * 4, "optimizer", "optimizer")


def test_traffic_counts_every_tensor_of_a_call_and_the_larger_side() -> None:
    trace = [
        event("c10d::allreduce_coalesced_", 0, 1, "cpu_op", **{"Input Dims": [[[2, 3], [4]], [], []]}),
        event("c10d::allreduce_", 2, 3, "cpu_op", **{"Input Dims": [[[5]], [], []]}),
        event("c10d::_allgather_base_", 4, 5, "cpu_op", **{"Input Dims": [[8], [4], []]}),
        event("c10d::barrier", 6, 7, "cpu_op", **{"Input Dims": [[1]]}),
    ]
    found = traffic(trace)
    assert {name: (one.calls, one.elements) for name, one in found.items()} == {
        "all-reduce": (2, 15),
        "all-gather": (1, 8),
    }


def test_the_bucket_model_finds_the_link_and_the_overhead_that_made_the_times() -> None:
    """4 GB over 200 GB/s with 50 us a call: the best size is sqrt(s w o) = 200 MB."""
    sizes: dict[Any, dict[str, Any]] = {}
    for calls in (4, 40, 400):
        seconds = 4e9 / (calls * 200e9) + calls * 50e-6
        sizes[4000 // calls] = {"calls": calls, "bytes": 4e9, "exposed_s": seconds, "step_s": 1 + seconds}
    found = ddp.bucket_model(sizes)
    assert found["link_gb_per_s"] == pytest.approx(200)
    assert found["overhead_s"] == pytest.approx(50e-6)
    assert found["best_predicted_mb"] == pytest.approx(200e6 / 2**20)
    assert found["best_measured_mb"] == 100
    assert found["r_squared"] == pytest.approx(1)
    for one in sizes.values():
        one["exposed_s"] = 1e-3 / one["calls"]  # Fewer calls take longer: no overhead.
    without = ddp.bucket_model(sizes)
    assert "best_predicted_mb" not in without or float(without["overhead_s"]) < 1e-9


def test_sharding_sends_what_the_formulas_say() -> None:
    """Of N ranks, in units of the weights: (N - 1) / N for each reduction, gathering or broadcast."""
    ways = {"ours": 3 / 2, "ZeRO-3": 3 / 2}
    rows = run("sharding", device="cpu", form="tiny", only={"sharding": list(ways)}).rows
    found = {row.point["sharding"]: row.numbers for row in rows}
    for way, halves in ways.items():
        assert found[way]["traffic_of_weights"] == pytest.approx(halves, rel=0.01), way
        # Two fp32 moments of every weight over two ranks, and a step count for each parameter.
        weights = float(found[way]["traffic_bytes"]) / float(found[way]["traffic_of_weights"])
        assert float(found[way]["state_bytes"]) == pytest.approx(2 * weights / 2, rel=0.01)
    assert found["ours"]["collectives"] == "1 all-reduce, 26 broadcast"
    assert sharding.RING["all-reduce"](8) == 1.75
