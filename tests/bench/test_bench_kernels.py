"""``bench kernels``: kernels get the part of the model that launched them, on a CPU and by a GPU's events."""

import gzip
import json
from collections import Counter
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_rows import Held, tiny_bench
from trainfit.bench.experiments import kernels
from trainfit.bench.harness.profiling import (
    ENGINE,
    PARTS,
    PHASE,
    PRODUCTS,
    Launch,
    attention_in_ranges,
    launches,
    operation_parts,
    profiler,
    put_in_ranges,
    run_in_phases,
)
from trainfit.bench.harness.runner import run
from trainfit.bench.harness.timing import Timing
from trainfit.models.native import attention, decoder
from trainfit.spec.errors import InputError
from trainfit.step import Step, assemble

LAYERS = 4
SOFTMAX = ("aten::_softmax", "aten::_softmax_backward_data")
POINT: kernels.Point = {"model": "tiny-llama-demo", "precision": "amp-bf16", "context": 32}


@pytest.fixture(scope="module")
def step() -> Step:
    return assemble(kernels.recipe_of(tiny_bench(), POINT), torch.device("cpu"))


@pytest.mark.parametrize("with_bias", [False, True])
def test_attention_in_ranges_is_the_decoders_own(with_bias: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(2, heads, 9, 8, dtype=dtype) for heads in (4, 2, 2))
        bias = torch.randn(1, 1, 9, 9, dtype=dtype) if with_bias else None
        for softmax in attention.SOFTMAX.values():
            expected = attention.eager_attention(q, k, v, bias, softmax)
            assert torch.equal(attention_in_ranges(q, k, v, bias, softmax), expected)


def test_every_product_is_in_the_part_that_makes_it_forward_and_backward(step: Step) -> None:
    batches = step.random_batches()
    step(batches)
    put_in_ranges(step.model)
    with profiler(step.device) as profile:
        run_in_phases(step, batches)
    found = launches(profile.events() or (), on_gpu=False)
    products = Counter((one.phase, one.part) for one in found if one.op in PRODUCTS)
    a_layer = {"projections": 2, "MLP": 2, "scores": 1, "values": 1}
    forward = {name: LAYERS * times for name, times in a_layer.items()} | {"head": 1}
    expected = {("forward", name): times for name, times in forward.items()}
    assert products == expected | {("backward", name): 2 * times for name, times in forward.items()}
    assert {one.phase for one in found} == {"forward", "backward", "optimizer"}
    softmaxes = Counter((one.phase, one.part) for one in found if one.op in SOFTMAX)
    assert softmaxes == {("forward", "softmax"): LAYERS, ("backward", "softmax"): LAYERS}
    assert {one.part for one in found if one.phase == "optimizer"} == {"optimizer"}
    assert set(PARTS) - {one.part for one in found} <= {"other"}
    assert float(kernels.by_part(found)["other_share"]) < 0.05


NUMBERS = count(1)
ON_GPU = {"device_type": torch.autograd.DeviceType.CUDA}


def event(name: str, parent: Any = None, us: float = 0.0, **known: Any) -> Any:
    """An event of the profiler; with ``us`` it launched one kernel of its own name."""
    usual = {
        "sequence_nr": -1, "scope": 0, "is_user_annotation": name.startswith(("part: ", PHASE)),
        "self_cpu_time_total": 1.0, "device_type": torch.autograd.DeviceType.CPU, "id": next(NUMBERS),
        "kernels": [SimpleNamespace(name=name.removeprefix("aten::"), duration=us)] if us else [],
    }  # fmt: skip
    return SimpleNamespace(name=name, cpu_parent=parent, **(usual | known))


def gpu_events() -> list[Any]:
    """A forward on one thread and its backward on another, as a CUDA step's events are."""
    phase = event(f"{PHASE}forward", us=99.0, scope=7)
    part = event("part: softmax", phase, us=9.0, scope=7)
    soft = event("aten::softmax", part, sequence_nr=5)
    inner = event("aten::_softmax", soft, us=3.0, sequence_nr=5)
    residuals = event("part: residuals", phase)
    add = event("aten::add", residuals, us=2.0, sequence_nr=6)
    engine = event(f"{ENGINE}: SoftmaxBackward0", sequence_nr=5)
    node = event("SoftmaxBackward0", engine, sequence_nr=5, scope=1)
    back = event("aten::_softmax_backward_data", node, us=4.0, sequence_nr=9)
    summed = event("aten::add_", engine, us=1.0, sequence_nr=9)
    leaf = event("torch::autograd::AccumulateGrad", scope=1)
    kept = event("aten::copy_", leaf, us=0.5)
    update = event(f"{PHASE}optimizer")
    adam = event("aten::_fused_adamw_", update, us=8.0)
    on_gpu = [event(one.name, **ON_GPU) for one in (inner, add, back, summed, kept, adam)]
    return [
        phase, part, soft, inner, residuals, add, engine, node, back, summed, leaf, kept, update, adam,
        *on_gpu, event(f"{PHASE}forward", **ON_GPU),
    ]  # fmt: skip


def test_a_gpus_kernels_have_the_phase_and_part_of_what_launched_them() -> None:
    found = launches(gpu_events(), on_gpu=True)
    assert [(one.phase, one.part, one.kernel, round(one.seconds * 1e6, 3)) for one in found] == [
        ("forward", "softmax", "_softmax", 3.0),
        ("forward", "residuals", "add", 2.0),
        ("backward", "softmax", "_softmax_backward_data", 4.0),
        ("backward", "softmax", "add_", 1.0),
        ("backward", "other", "copy_", 0.5),
        ("optimizer", "optimizer", "_fused_adamw_", 8.0),
    ]


@pytest.mark.parametrize("name", ["Command Buffer Full", "an overhead of a later CUPTI"])
def test_an_overhead_event_with_an_operations_number_does_not_repeat_its_kernels(name: str) -> None:
    events = gpu_events()
    (adam,) = (one for one in events if one.name == "aten::_fused_adamw_" and one.kernels)
    costs = [event(name, adam, id=adam.id, kernels=adam.kernels) for _ in range(84)]
    assert launches([*events, *costs], on_gpu=True) == launches(events, on_gpu=True)


def test_kernels_that_operations_do_not_account_for_are_no_result() -> None:
    flush = event("Memset (Device)", **ON_GPU)
    with pytest.raises(RuntimeError, match="7 kernels ran, and operations account for 6"):
        launches([*gpu_events(), flush], on_gpu=True)
    silent = [one for one in gpu_events() if not one.kernels or one.is_user_annotation]
    with pytest.raises(RuntimeError, match="CUPTI"):
        launches(silent, on_gpu=True)
    assert operation_parts(silent, on_gpu=True) == {}


@pytest.mark.parametrize(("seconds", "believed"), [(3.7, True), (3.9, False)])
def test_more_kernels_than_a_step_has_time_for_are_a_failure(seconds: float, believed: bool) -> None:
    timing = Timing(laps={"total": [3.6] * 6}, runs=list(range(6)))
    found = [Launch("forward", "MLP", "aten::mm", "gemm", seconds)]
    checked = kernels._plausible(found, timing)
    assert checked == (found if believed else ("failed", "3.9 s of kernels in a step of 3.6 s"))


def test_flops_of_attentions_core(step: Step) -> None:
    assert isinstance(step.model, decoder.NativeDecoder)
    products, softmax = kernels.core_flops(step.model, step.recipe, "forward")
    # Two products of 4 heads, 32 x 32 scores, head size 32.
    assert products == LAYERS * 2 * (2 * 4 * 32 * 32 * 32)
    assert softmax == LAYERS * 5 * 4 * 32 * 32
    assert kernels.core_flops(step.model, step.recipe, "backward")[0] == 2 * products


def test_the_largest_kernels_of_a_pass() -> None:
    gemms = [("forward", 3.0), ("forward", 1.0), ("backward", 2.0)]
    found = [Launch(phase, "MLP", "aten::mm", "void ns::gemm<float>(int)", s) for phase, s in gemms]
    found.append(Launch("optimizer", "optimizer", "aten::_fused_adamw_", "adam", 6.0))
    rows = {(row.point["top of"], row.point["kernel"]): row.numbers for row in kernels.top_rows({}, found)}
    assert rows["forward", "gemm"] == {"calls": 2, "total_s": 4.0, "mean_s": 2.0, "share": 1.0}
    assert rows["whole step", "gemm"]["share"] == rows["whole step", "adam"]["share"] == 0.5
    assert ("forward", "adam") not in rows


CUTLASS = "cutlass_80_simt_sgemm_128x256_8x4_tn_align1"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, char>(int)",
         "vectorized_elementwise_kernel CUDAFunctor_add"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, 9>(float*)", "softmax_warp_forward"),
        (f"void cutlass::Kernel2<{CUTLASS}>(cutlass::Params)", f"Kernel2 {CUTLASS}"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT"),
        ("Memset (Device)", "Memset"),
    ],
)  # fmt: skip
def test_a_kernels_short_name(name: str, expected: str) -> None:
    assert kernels.short(name) == expected


def test_a_step_under_held_clocks_is_profiled_again_and_then_given_up(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled: list[Step] = []
    monkeypatch.setattr(kernels, "run_in_phases", lambda step, batches: profiled.append(step))
    once = Held(lambda reading: reading == 0)
    assert isinstance(kernels._profiled(tiny_bench(once), step, [], POINT), list)
    assert (once.num_rests, len(profiled)) == (1, 2)
    assert kernels._profiled(tiny_bench(Held()), step, [], POINT)[0] == "throttled"
    assert len(profiled) == 2 + kernels.TRIES


def test_a_pass_is_the_sum_of_its_phases() -> None:
    laps = {"forward": [1.0] * 6, "backward": [2.0] * 6, "optimizer": [0.5] * 6, "total": [3.6] * 6}
    timing = Timing(laps=laps, runs=list(range(6)))
    found = [
        Launch("forward", "MLP", "aten::mm", "gemm", 0.5),
        Launch("optimizer", "optimizer", "x", "y", 0.5),
    ]
    rows = {name: kernels._pass_row(tiny_bench(), {}, timing, name, found) for name in kernels.PASSES}
    medians = {name: row.times.median for name, row in rows.items() if row.times}
    assert medians == {"forward": 1.0, "forward + backward": 3.0, "whole step": 3.6}
    assert "busy_share" not in rows["forward"].numbers  # On a CPU the profiler's cost is in the operations.
    on_gpu = tiny_bench(device=torch.device("cuda"))
    assert kernels._pass_row(on_gpu, {}, timing, "forward", found).numbers["busy_share"] == 0.5
    assert rows["forward"].numbers["products_share"] == 1.0
    assert rows["whole step"].numbers["operations"] == 2
    assert rows["whole step"].numbers["optimizer_share"] == 0.5


def test_the_tiny_run_has_its_shares_and_its_trace(tmp_path: Path) -> None:
    result = run("kernels", device="cpu", form="tiny", folder=tmp_path, only={"precision": ["fp32"]})
    assert {row.status for row in result.rows} <= {"done", "unsteady"}
    (shares,) = [row.numbers for row in result.rows if "profiled" in row.point]
    assert sum(map(float, shares.values())) == pytest.approx(1.0)
    core = [row.numbers for row in result.rows if "attention's core in" in row.point]
    assert [float(numbers["flops_ratio"]) for numbers in core] == pytest.approx([4 * 32 / 5, 8 * 32 / 4])
    trace = json.loads(gzip.decompress((tmp_path / "kernels-tiny-llama-demo-fp32-64.json.gz").read_bytes()))
    assert {"part: softmax", "phase: optimizer"} <= {one.get("name") for one in trace["traceEvents"]}


def test_files_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="files"):
        run("accumulation", device="cpu", folder=tmp_path / "x")
