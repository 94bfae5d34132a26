"""``torch.cuda``, NVML, profilers and CUDA graphs in user code under ``trainfit.trace``."""

import importlib
import inspect
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import trainfit
from trainfit.catalog.load import gpu
from trainfit.ledger.segments import SMALL_SEGMENT
from trainfit.spec.errors import InputError
from user_training import MIB, inside, mlp, steps

REAL_STATISTICS = [
    f"{metric}.{pool}.{kind}"
    for metric in (
        "active active_bytes allocated_bytes allocation inactive_split inactive_split_bytes requested_bytes "
        "reserved_bytes segment"
    ).split()
    for pool in ("all", "large_pool", "small_pool")
    for kind in ("allocated", "current", "freed", "peak")
]
"""Keys of ``torch.cuda.memory_stats()`` on an H200 (torch 2.11), without those of settings and counts."""


def test_every_query_of_the_device_has_an_answer() -> None:
    """Functions of ``torch.cuda`` and its neighbours that need no argument."""
    modules = [torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator, torch.backends.cuda]
    deprecated = {
        "max_memory_cached",
        "memory_cached",
        "reset_max_memory_cached",
        "reset_max_memory_allocated",
    }

    def check() -> None:
        failed = []
        for module in modules:
            public = {name for name in dir(module) if not name.startswith("_")} - deprecated
            for name in public if module is torch.backends.cuda else public & {*module.__all__}:
                function: Any = getattr(module, name)
                if not inspect.isfunction(function):
                    continue
                try:
                    function()
                except TypeError as error:
                    assert "argument" in str(error), name  # It needs one.
                except Exception as error:
                    failed.append((name, error))
        assert not failed

    inside(check)


def test_the_answers_are_those_of_the_catalogs_gpu() -> None:
    h100 = gpu("h100-sxm")

    def check() -> None:
        found: Any = torch.cuda.get_device_properties(0)
        assert (found.total_memory, found.multi_processor_count) == (h100.usable_bytes, 132)
        assert (found.L2_cache_size, str(found.uuid).count("-")) == (h100.l2_cache_bytes, 4)
        assert torch.cuda.get_arch_list() == ["sm_90"]
        assert torch.version.cuda is not None
        assert [part.isdecimal() for part in torch.version.cuda.split(".")] == [True, True]
        assert torch.backends.cuda.is_built()
        assert torch.backends.cudnn.version() > 90000
        assert importlib.import_module("torch.cuda.nccl").version() >= (2, 0, 0)
        assert torch.distributed.is_nccl_available()
        assert torch.cuda.nvtx.range_push("forward") is None
        assert torch.cuda.cudart().cudaProfilerStart() == 0
        torch.cuda.manual_seed_all(5)
        state = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(6)
        torch.cuda.set_rng_state(state)
        assert torch.cuda.initial_seed() == 5
        generator = torch.Generator("cuda").manual_seed(1)
        assert generator.device.type == "cuda"
        assert torch.randn(2, device="cuda", generator=generator).is_cuda
        torch.cuda.set_per_process_memory_fraction(0.5)
        assert torch.cuda.get_per_process_memory_fraction() == 0.5

    def train() -> None:
        check()
        model = mlp().cuda()
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)

    notes = trainfit.trace(train, gpu="h100-sxm").assumptions
    assert any("set_per_process_memory_fraction" in note for note in notes)
    assert torch.version.cuda is None or not torch.version.cuda.startswith("virtual")


def test_memory_statistics_count_as_the_allocator_does() -> None:
    def check() -> None:
        assert torch.cuda.memory_stats()["allocation.all.current"] == 0
        small = torch.empty(1000, dtype=torch.uint8, device="cuda")
        large = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        found = torch.cuda.memory_stats()
        assert {*REAL_STATISTICS} <= found.keys()
        assert {"num_alloc_retries", "num_ooms", "max_split_size", "oversize_segments.peak"} <= found.keys()
        assert found["requested_bytes.small_pool.current"] == 1000
        assert found["allocated_bytes.small_pool.current"] == 1024
        assert found["active_bytes.large_pool.peak"] == 3 * MIB
        assert found["segment.all.current"] == found["num_device_alloc"] == 2
        # The rest of a segment in use cannot be released: of 2 MiB and of 20 MiB.
        split = (
            found["inactive_split_bytes.small_pool.current"],
            found["inactive_split_bytes.large_pool.current"],
        )
        assert split == (SMALL_SEGMENT - 1024, 17 * MIB)
        assert found["inactive_split.all.current"] == 2
        del small, large
        found = torch.cuda.memory_stats()
        assert found["inactive_split_bytes.all.current"] == found["active_bytes.all.current"] == 0
        assert found["allocated_bytes.all.freed"] == 3 * MIB + 1024
        assert found["reserved_bytes.all.current"] == torch.cuda.memory_reserved() == 22 * MIB
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        found = torch.cuda.memory_stats()
        assert [found[f"reserved_bytes.all.{kind}"] for kind in ("current", "peak", "freed")] == [0, 0, 0]
        assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
        address = torch.cuda.caching_allocator_alloc(MIB)
        assert torch.cuda.memory_allocated() == torch.cuda.device_memory_used() - MIB == MIB
        torch.cuda.caching_allocator_delete(address)
        assert torch.cuda.memory_allocated() == 0

    inside(check)


def test_a_snapshot_shows_what_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"

    def check() -> None:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        (segment,) = torch.cuda.memory_snapshot()
        assert (segment["total_size"], segment["allocated_size"]) == (20 * MIB, kept.nbytes)

    inside(check)
    found = pickle.loads(path.read_bytes())
    (segment,) = found["segments"]
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
    assert [one["action"] for one in found["device_traces"][0]] == ["alloc", "alloc", "free_completed"]
    assert segment["blocks"][0]["frames"][0]["name"] == "aten.empty.memory_format"


def test_nvml_shows_the_virtual_gpu() -> None:
    pynvml = pytest.importorskip("pynvml")

    def check() -> None:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        assert (memory.used, memory.total) == (kept.nbytes, gpu("h200").usable_bytes)
        assert 0 <= torch.cuda.utilization() <= 100
        assert torch.cuda.temperature() > 0
        assert torch.cuda.power_draw() > 0
        assert torch.cuda.clock_rate() > 0
        assert "no processes are running" in torch.cuda.list_gpu_processes()

    assert any("placeholders" in note for note in inside(check).assumptions)


def test_profilers_keep_their_schedule_and_write_nothing(tmp_path: Path) -> None:
    ready = []

    def export(one: Any) -> None:
        ready.append(one.step_num)
        one.export_chrome_trace(str(tmp_path / "trace.json"))
        assert one.key_averages().table(sort_by="self_cuda_time_total") == ""

    def check() -> None:
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        for chosen in (activities, activities[1:]):
            plan = schedule(wait=0, warmup=1, active=1, repeat=1)
            with profile(activities=chosen, schedule=plan, on_trace_ready=export, profile_memory=True) as one:
                for _ in range(3):
                    with record_function("step"):
                        torch.ones(2, device="cuda").sum()
                    one.step()
        with torch.autograd.profiler.profile(use_device="cuda") as old, torch.autograd.profiler.emit_nvtx():
            torch.ones(2, device="cuda").sum()
        assert len(old.key_averages()) == 0

    assert any("profiled nothing" in note for note in inside(check).assumptions)
    assert ready == [2, 2]
    assert not [*tmp_path.iterdir()]


def _graphed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Capture a whole step, as PyTorch's notes on CUDA graphs do."""
    batch = torch.randn(8, 256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(batch).square().mean().backward()
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(batch).square().mean().backward()
        optimizer.step()
    while True:
        batch.copy_(torch.randn(8, 256))
        graph.replay()


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    steps(model, optimizer, 5)


def _partly_graphed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sample = torch.randn(8, 256, device="cuda", requires_grad=True)
    graphed: Any = torch.cuda.make_graphed_callables(model, (sample,))
    steps(graphed, optimizer, 5)


@pytest.mark.parametrize("loop", [_graphed, _partly_graphed])
def test_replayed_graphs_are_steps(loop: Callable[..., None]) -> None:
    """As many FLOPs as eager code takes, while the host launches a graph once."""

    def train(run: Callable[..., None]) -> None:
        model = mlp().cuda()
        run(model, torch.optim.SGD(model.parameters(), lr=0.1))

    graphed, eager = (trainfit.trace(lambda run=run: train(run), steps=4) for run in (loop, _eager))
    assert graphed.code is not None
    assert graphed.code.num_steps == 4
    assert graphed.model_flops == pytest.approx(eager.model_flops, rel=0.35)  # The input's gradient
    assert graphed.step_s is not None
    assert eager.step_s is not None
    assert graphed.step_s < eager.step_s


def test_a_side_stream_has_its_own_pool() -> None:
    def check() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            aside = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 40 * MIB
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            pooled = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 60 * MIB
        assert torch.cuda.memory_allocated() == sum(t.nbytes for t in (aside, kept, pooled))

    inside(check)


@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch for CUDA has functions of its own")
def test_what_is_not_modelled_is_named() -> None:
    with pytest.raises(InputError, match=r"torch\.cuda\.tunable\.enable is not modelled by the virtual GPU"):
        inside(torch.cuda.tunable.enable)
    with pytest.raises(InputError, match=r"torch\.cuda\.memory\.change_current_allocator is not modelled"):
        inside(lambda: torch.cuda.change_current_allocator(torch.cuda.memory._CUDAAllocator(None)))


def test_the_allocator_is_set_as_the_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 21 MiB in an expandable segment takes pages of 20 MiB, else a segment of 22 MiB."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    reserved: list[int] = []

    def run(setting: str) -> None:
        if setting:
            os.environ["PYTORCH_ALLOC_CONF"] = setting
        kept = torch.empty(21 * MIB, dtype=torch.uint8, device="cuda")
        reserved.append(torch.cuda.memory_reserved())
        del kept
        torch.cuda.empty_cache()
        assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == 0

    for setting in ("", "expandable_segments:True"):
        found = inside(lambda setting=setting: run(setting))
        assert any("expandable" in note for note in found.assumptions) == bool(setting)
    assert reserved == [22 * MIB, 40 * MIB]
