"""Ledgers as memory snapshots and as traces: PyTorch's own reader, and ours, read what was predicted."""

import gzip
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tiny_recipe import tiny_recipe
from trainfit.catalog.load import gpu
from trainfit.cli.main import main
from trainfit.explanation.peak import explained
from trainfit.explanation.snapshot.explain import explain_snapshot
from trainfit.integrations.exporters import perfetto
from trainfit.integrations.exporters.memory_viz import write_snapshot
from trainfit.ledger.ledger import ALLOCATE, NO_LAYER, Event, Ledger, Op, Segment, Storage
from trainfit.ledger.snapshot import RecordingAllocator, snapshot_of
from trainfit.prediction.machine import machine_with
from trainfit.prediction.predict import predict
from trainfit.spec.errors import InputError
from trainfit.spec.explanation import MemoryCourse
from trainfit.spec.recipe import Batch, Recipe
from trainfit.spec.result import CATEGORIES
from trainfit.spec.units import MIB

LAYERS = 5


def recipe(**fields: Any) -> Recipe:
    return tiny_recipe("native", LAYERS, **{"batch": Batch(micro=4, seq=32), **fields})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path_factory.getbasetemp() / "exported"))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "tiny.pickle"
    found = explained(recipe())
    write_snapshot(found.ledger, path, found.capacity_bytes, expandable=False)
    return path


def test_our_reader_finds_the_predicted_peak_and_categories(snapshot: Path) -> None:
    predicted, found = predict(recipe()), explain_snapshot(snapshot)
    assert found.peak_allocated_bytes == predicted.peak_allocated_bytes
    assert found.breakdown == predicted.breakdown
    assert f"{found.moment.step}.{found.moment.phase}" == predicted.peak_phase
    assert found.snapshot is not None
    assert found.snapshot.peak_reserved_bytes == predicted.peak_reserved_bytes
    assert found.snapshot.is_whole
    assert (found.phases.first.peak, found.phases.steady.peak) == (
        predicted.phases.first.peak,
        predicted.phases.steady.peak,
    )


@pytest.mark.parametrize("view", ["stats", "trace", "trace_plot", "segment_plot"])
def test_pytorchs_own_reader_takes_it(snapshot: Path, tmp_path: Path, view: str) -> None:
    out = [] if view in ("stats", "trace") else ["-o", str(tmp_path / "out.html")]
    command = [sys.executable, "-m", "torch.cuda._memory_viz", view, str(snapshot), *out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout if not out else (tmp_path / "out.html").stat().st_size > 10_000


def test_a_snapshot_is_plain_and_consistent(snapshot: Path) -> None:
    content = pickle.loads(snapshot.read_bytes())
    allocated: dict[int, int] = {}
    for entry in content["device_traces"][0]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in allocated
            allocated[entry["addr"]] = entry["size"]
            assert entry["frames"][-1]["name"] == f"category: {entry['category']}"
            assert entry["category"] in CATEGORIES
        elif entry["action"] == "free_completed":
            assert allocated.pop(entry["addr"]) == entry["size"]
    blocks = [block for segment in content["segments"] for block in segment["blocks"]]
    assert allocated == {
        one["address"]: one["requested_size"] for one in blocks if one["state"] == "active_allocated"
    }
    for segment in content["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    # The page's script fails where entries have categories and none is "unknown".
    assert "unknown" in {entry["category"] for entry in content["device_traces"][0]}
    stages = [(one["stage"], one["name"]) for one in content["external_annotations"]]
    assert ("START", "steady.backward") in stages
    assert all(one["time_us"] <= other["time_us"] for one, other in pairwise(content["external_annotations"]))


def two_sizes() -> Ledger:
    """Two large blocks that are freed, then one that fits neither: the cache is emptied before it."""
    sizes = (30 * MIB, 30 * MIB, 50 * MIB)
    kinds = ((ALLOCATE, 0), (ALLOCATE, 1), (0, 0), (0, 1), (ALLOCATE, 2))
    return Ledger(
        segments=[Segment("first", "forward")],
        ops=[Op("aten.empty", "block.0.mlp", 0, NO_LAYER, 0.0, 0.0, 0.0, 0.0, 0, "")],
        storages=[Storage(size, "activations", NO_LAYER, 0, f"//{size}") for size in sizes],
        events=[Event(kind, storage, NO_LAYER, 0) for kind, storage in kinds],
    )


@pytest.mark.parametrize("expandable", [False, True])
def test_what_is_given_back_to_the_driver_is_in_the_history(tmp_path: Path, expandable: bool) -> None:
    ledger = two_sizes()
    ledger.emptied_at = (4,)
    allocator = RecordingAllocator(None, expandable)
    content = snapshot_of(ledger, allocator, empty_cache_after_init=False)
    takes, gives = ("segment_map", "segment_unmap") if expandable else ("segment_alloc", "segment_free")
    history = content["device_traces"][0]
    sums = {name: sum(e["size"] for e in history if e["action"] == name) for name in (takes, gives)}
    assert sums[takes] - sums[gives] == allocator.reserved_bytes
    assert sums[gives] == 60 * MIB
    assert content["segments"][0]["is_expandable"] is expandable
    assert [frame["name"] for frame in history[1]["frames"]] == [
        "aten.empty", "block.0.mlp", "block.0", "block", "phase: first.forward", "category: activations",
    ]  # fmt: skip
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(content))
    found = explain_snapshot(path)
    assert found.snapshot is not None
    assert found.snapshot.peak_reserved_bytes == allocator.peak_reserved_bytes
    assert found.peak_allocated_bytes == allocator.peak_allocated_bytes == 60 * MIB


def test_a_ledger_that_needs_its_cache_emptied_is_replayed_within_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    write_snapshot(two_sizes(), path, 64 * MIB, expandable=False)
    found = explain_snapshot(path)
    assert found.snapshot is not None
    assert found.snapshot.peak_reserved_bytes == 60 * MIB
    write_snapshot(two_sizes(), path, 32 * MIB, expandable=False)
    assert explain_snapshot(path).snapshot.peak_reserved_bytes == 110 * MIB, "it does not fit"  # pyright: ignore[reportOptionalMemberAccess]


# -- the trace


def trace_of(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(data)["traceEvents"]


def slices(events: list[dict[str, Any]], pid: int, tid: int) -> list[dict[str, Any]]:
    return [one for one in events if one["ph"] == "X" and (one["pid"], one["tid"]) == (pid, tid)]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_the_trace_is_the_predicted_step(tmp_path: Path, name: str) -> None:
    found, predicted = explained(recipe()), predict(recipe())
    assert found.machine is not None
    perfetto.write_trace(found.ledger, found.machine, tmp_path / name)
    events = trace_of(tmp_path / name)
    kernels = slices(events, perfetto.GPU, perfetto.KERNELS)
    assert predicted.time is not None
    busy_us = sum(one["dur"] for one in kernels)
    assert busy_us == pytest.approx((predicted.time.matmul_s + predicted.time.memory_s) * 1e6, rel=1e-3)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 2e-3 for a, b in pairwise(kernels)), "one stream"
    assert [one["name"] for one in slices(events, perfetto.GPU, perfetto.PHASES)][-3:] == [
        "forward", "backward", "optimizer",
    ]  # fmt: skip
    issued = slices(events, perfetto.HOST, 1)
    assert sum(one["dur"] for one in issued) == pytest.approx(predicted.time.issue_s * 1e6, rel=1e-2)
    counters = [one for one in events if one["ph"] == "C" and "category" in one["name"]]
    highest = max(sum(one["args"].values()) for one in counters)
    assert highest == found.explanation.peak_allocated_bytes - found.explanation.unsplit_bytes
    assert all(one["ts"] >= 0 for one in events if "ts" in one)
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in events if one["ph"] == "X"} <= named


def test_collectives_have_a_track_for_each_group(tmp_path: Path) -> None:
    several = recipe(hardware={"gpu": "h100-sxm", "count": 2}, parallel={"strategy": "fsdp"})
    found = explained(several)
    assert found.machine is not None
    perfetto.write_trace(found.ledger, found.machine, tmp_path / "a.json")
    names = {one["name"] for one in slices(trace_of(tmp_path / "a.json"), perfetto.GPU, perfetto.COLLECTIVES)}
    assert names == {"all_gather", "reduce_scatter"}


def test_a_long_step_is_merged_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = explained(recipe())
    assert found.machine is not None
    perfetto.write_trace(found.ledger, found.machine, tmp_path / "a.json")
    monkeypatch.setattr(perfetto, "MOST_SLICES", 10)
    perfetto.write_trace(found.ledger, found.machine, tmp_path / "b.json")
    each, merged = (slices(trace_of(tmp_path / name), 1, perfetto.KERNELS) for name in ("a.json", "b.json"))
    assert len(merged) < len(each) / 2
    assert sum(one["args"]["bytes"] for one in merged) == sum(one["args"]["bytes"] for one in each)


def test_a_gpu_without_a_known_speed_has_no_trace(tmp_path: Path) -> None:
    row = gpu("h100-sxm").model_copy(update={"memory_bytes_per_s": None})
    machine = replace(machine_with(gpu("h100-sxm")), gpu=row)
    with pytest.raises(InputError, match="its speed is not known"):
        perfetto.write_trace(two_sizes(), machine, tmp_path / "a.json")


# -- the command


def test_the_command_writes_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"--plot": "a.html", "--snapshot": "a.pickle", "--perfetto": "a.json"}
    files = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    assert main(["explain", "tiny-cpu", "--gpu", "h100-sxm", *files]) == 0
    errors = capsys.readouterr().err
    assert "a.pickle: open it with pytorch.org/memory_viz" in errors
    page = (tmp_path / "a.html").read_text()
    assert page.count("<script") == 2
    assert "src=" not in page
    assert "https://" not in page
    assert main(["explain", str(tmp_path / "a.pickle"), "tiny-cpu", "--gpu", "h100-sxm"]) == 0
    assert "peak  +0 B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--snapshot", "a.json"], "another kind of file is written"),
        (["--perfetto", "a.pickle"], "another kind of file is written"),
        (["--plot", "a.txt"], "no format of a plot"),
        (["--plot", "missing/a.html"], "no such folder"),
        (["gpt2", "--recipe", "gpt2"], "both say what to compare with"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "tiny-cpu", *arguments]) == 65
    assert problem in capsys.readouterr().err


def test_a_snapshot_has_no_kernels(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(snapshot), "--perfetto", str(tmp_path / "a.json")]) == 65
    assert "a memory snapshot has no kernels" in capsys.readouterr().err


# -- scripts

SCRIPT = """
import sys, torch
from torch import nn
size = int(sys.argv[1]) if len(sys.argv) > 1 else 256
model = nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, size)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(64, size, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.empty_cache()
"""


def test_a_script_is_explained_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, exported = tmp_path / "train.py", tmp_path / "a.pickle"
    script.write_text(SCRIPT)
    gpu_of = ["--gpu", "h100-sxm"]
    assert main(["explain", str(script), *gpu_of, "--snapshot", str(exported), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["script"] == "train.py"
    assert (found["moment"]["step"], found["moment"]["phase"]) == ("first", "optimizer")
    assert found["breakdown"]["optimizer"] > 2 * 4 * 2 * 256 * 256
    assert main(["explain", str(exported), "--script", f"{script} 256", *gpu_of, "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["explanations"]
    assert both[0]["peak_allocated_bytes"] == both[1]["peak_allocated_bytes"] == found["peak_allocated_bytes"]
    assert both[0]["breakdown"] == both[1]["breakdown"]
    assert main(["explain", str(exported), "--script", f"{script} 512", *gpu_of, "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["explanations"]
    weights = [one["breakdown"]["weights"] for one in both]
    assert weights[1] == pytest.approx(4 * weights[0], rel=0.01)
    assert main(["explain", str(script), "--batch", "4"]) == 65
    assert "a script has no fields but its GPU and count" in capsys.readouterr().err


def test_the_course_reaches_the_peak() -> None:
    from trainfit.explanation.course import course_of_explained

    found = explained(recipe())
    course: MemoryCourse = course_of_explained(found, 50)
    assert course.is_timed
    assert course.peak.alive.total == found.explanation.peak_allocated_bytes - course.unsplit_bytes
    assert len(course.moments) <= 51
    assert [one.at for one in course.moments] == sorted(one.at for one in course.moments)
    holders = {
        f"{one.category}: {f'{one.path} {one.op}'.strip()}": one.num_bytes
        for one in found.explanation.holders
    }
    assert all(holders[name] == size for name, size in course.peak.largest)
