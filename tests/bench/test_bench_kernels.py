"""``bench kernels``: kernels get the part of the model that launched them, on a CPU and by a GPU's events."""

import gzip
import json
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainfit.bench.experiments import kernels
from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.profiling import (
    ENGINE,
    PARTS,
    PHASE,
    PRODUCTS,
    Launch,
    attention_in_ranges,
    launches,
    profiler,
    ranges,
    run_in_phases,
)
from trainfit.bench.harness.runner import RULES, run
from trainfit.bench.harness.stopwatch import CpuStopwatch, Stopwatch
from trainfit.bench.harness.timing import Timing
from trainfit.models.native import attention, decoder
from trainfit.spec.bench import BenchResult, Environment
from trainfit.spec.errors import InputError
from trainfit.step import Step, assemble

LAYERS = 4
SOFTMAX = ("aten::_softmax", "aten::_softmax_backward_data")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchResult, Path]:
    folder = tmp_path_factory.mktemp("files")
    return run("kernels", device="cpu", form="tiny", folder=folder), folder


class Held(Stopwatch):
    """A CPU whose clocks are held down the first ``times`` times one asks."""

    def __init__(self, times: int) -> None:
        self.times, self.rested, self.flush_bytes = times, 0, 0

    def flush(self) -> None:
        raise AssertionError("a profiled step needs no flush")

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        pass

    def environment(self, host: Environment) -> Environment:
        return host

    def throttled(self) -> tuple[str, ...]:
        self.times -= 1
        return ("software power cap",) if self.times >= 0 else ()

    def rest(self, seconds: float) -> None:
        self.rested += 1


def bench(stopwatch: Stopwatch) -> Bench:
    return Bench(torch.device("cpu"), "tiny", stopwatch, None, RULES["tiny"], float("inf"))


def tiny_step(precision: str = "fp32") -> Step:
    recipe = kernels.recipe_of(
        bench(CpuStopwatch()), {"model": "tiny-llama-demo", "precision": precision, "context": 32}
    )
    return assemble(recipe, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_attention_in_ranges_is_the_decoders_own(dtype: torch.dtype, with_bias: bool) -> None:
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    bias = torch.randn(1, 1, 9, 9, dtype=dtype) if with_bias else None
    for softmax in attention.SOFTMAX.values():
        expected = attention.eager_attention(q, k, v, bias, softmax)
        assert torch.equal(attention_in_ranges(q, k, v, bias, softmax), expected)


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16"])
def test_every_product_is_in_the_part_that_makes_it_forward_and_backward(precision: str) -> None:
    step = tiny_step(precision)
    batches = step.random_batches()
    step(batches)
    before = attention.eager_attention, decoder.next_token_loss
    with ranges(step.model), profiler(step.device) as profile:
        run_in_phases(step, batches)
    assert (attention.eager_attention, decoder.next_token_loss) == before
    found = launches(profile.events() or (), on_gpu=False)
    products: dict[tuple[str, str], int] = {}
    for one in found:
        if one.op in PRODUCTS:
            products[one.phase, one.part] = products.get((one.phase, one.part), 0) + 1
    a_layer = {"projections": 2, "MLP": 2, "scores": 1, "values": 1}
    expected = {("forward", name): LAYERS * times for name, times in a_layer.items()} | {
        ("forward", "head"): 1
    }
    assert products == expected | {("backward", name): 2 * times for (_, name), times in expected.items()}
    assert {one.phase for one in found} == {"forward", "backward", "optimizer"}
    softmaxes = [(one.phase, one.part) for one in found if one.op in SOFTMAX]
    assert sorted(softmaxes) == LAYERS * [("backward", "softmax")] + LAYERS * [("forward", "softmax")]
    assert {one.part for one in found if one.phase == "optimizer"} == {"optimizer"}
    assert set(PARTS) - {one.part for one in found} <= {"other"}
    assert kernels.by_part(found)["other_share"] < 0.05  # pyright: ignore[reportOperatorIssue]


NUMBERS = count(1)


def event(name: str, parent: Any = None, **known: Any) -> Any:
    usual = {
        "sequence_nr": -1,
        "scope": 0,
        "kernels": [],
        "is_user_annotation": False,
        "self_cpu_time_total": 1.0,
    }
    usual |= {"device_type": torch.autograd.DeviceType.CPU, "id": next(NUMBERS)}
    return SimpleNamespace(name=name, cpu_parent=parent, **(usual | known))


def kernel(name: str, us: float) -> Any:
    return SimpleNamespace(name=name, duration=us)


def gpu_events() -> list[Any]:
    """A forward on one thread and its backward on another, as a CUDA step's events are."""
    phase = event(
        f"{PHASE}forward", is_user_annotation=True, scope=7, kernels=[kernel(f"{PHASE}forward", 99.0)]
    )
    part = event(
        "part: softmax", phase, is_user_annotation=True, scope=7, kernels=[kernel("part: softmax", 9.0)]
    )
    soft = event("aten::softmax", part, sequence_nr=5)
    inner = event("aten::_softmax", soft, sequence_nr=5, kernels=[kernel("softmax_warp_forward", 3.0)])
    add = event("aten::add", event("part: residuals", phase, is_user_annotation=True), sequence_nr=6)
    add.kernels = [kernel("add", 2.0)]
    engine = event(f"{ENGINE}: SoftmaxBackward0", sequence_nr=5)
    node = event("SoftmaxBackward0", engine, sequence_nr=5, scope=1)
    back = event(
        "aten::_softmax_backward_data", node, sequence_nr=9, kernels=[kernel("softmax_warp_backward", 4.0)]
    )
    summed = event("aten::add_", engine, sequence_nr=9, kernels=[kernel("add_", 1.0)])
    leaf = event("torch::autograd::AccumulateGrad", scope=1)
    kept = event("aten::copy_", leaf, kernels=[kernel("copy", 0.5)])
    update = event(f"{PHASE}optimizer", is_user_annotation=True)
    adam = event("aten::_fused_adamw_", update, kernels=[kernel("multi_tensor_apply_kernel", 8.0)])
    launched = [one for by in (inner, add, back, summed, kept, adam) for one in by.kernels]
    on_gpu = [event(one.name, device_type=torch.autograd.DeviceType.CUDA) for one in launched]
    on_gpu.append(
        event(f"{PHASE}forward", device_type=torch.autograd.DeviceType.CUDA, is_user_annotation=True)
    )
    return [
        phase,
        part,
        soft,
        inner,
        add.cpu_parent,
        add,
        engine,
        node,
        back,
        summed,
        leaf,
        kept,
        update,
        adam,
        *on_gpu,
    ]


def test_a_gpus_kernels_have_the_phase_and_part_of_what_launched_them() -> None:
    found = [
        (one.phase, one.part, one.kernel, round(one.seconds * 1e6, 3))
        for one in launches(gpu_events(), on_gpu=True)
    ]
    assert found == [
        ("forward", "softmax", "softmax_warp_forward", 3.0),
        ("forward", "residuals", "add", 2.0),
        ("backward", "softmax", "softmax_warp_backward", 4.0),
        ("backward", "softmax", "add_", 1.0),
        ("backward", "other", "copy", 0.5),
        ("optimizer", "optimizer", "multi_tensor_apply_kernel", 8.0),
    ]


@pytest.mark.parametrize("name", ["Command Buffer Full", "a cost of a later CUPTI"])
def test_a_kernel_counts_once_whatever_cost_of_the_profiler_bears_its_operations_number(name: str) -> None:
    events = gpu_events()
    (adam,) = (one for one in events if one.name == "aten::_fused_adamw_")
    costs = [event(name, adam, id=adam.id, kernels=adam.kernels) for _ in range(84)]
    found = launches([*events, *costs], on_gpu=True)
    assert found == launches(events, on_gpu=True)
    assert [one.kernel for one in found if one.op == "aten::_fused_adamw_"] == ["multi_tensor_apply_kernel"]


def test_kernels_that_no_operation_accounts_for_are_no_result() -> None:
    flush = event("Memset (Device)", device_type=torch.autograd.DeviceType.CUDA)
    with pytest.raises(RuntimeError, match="7 kernels ran, and operations account for 6"):
        launches([*gpu_events(), flush], on_gpu=True)


@pytest.mark.parametrize(("seconds", "believed"), [(3.7, True), (3.9, False)])
def test_more_kernels_than_a_step_has_time_for_are_a_failure(seconds: float, believed: bool) -> None:
    timing = Timing(laps={"total": [3.6] * 6}, runs=list(range(6)))
    found = [Launch("forward", "MLP", "aten::mm", "gemm", seconds)]
    checked = kernels._plausible(found, timing)
    assert checked == (found if believed else ("failed", "3.9 s of kernels in a step of 3.6 s"))


def test_a_profiler_that_saw_no_kernel_is_no_result() -> None:
    silent = [one for one in gpu_events() if not one.kernels or one.is_user_annotation]
    with pytest.raises(RuntimeError, match="CUPTI"):
        launches(silent, on_gpu=True)


def test_flops_of_attentions_core() -> None:
    step = tiny_step()
    assert isinstance(step.model, decoder.NativeDecoder)
    products, softmax = kernels.core_flops(step.model, step.recipe, "forward")
    assert products == LAYERS * 2 * (
        2 * 4 * 32 * 32 * 32
    )  # two products of 4 heads, 32 x 32 scores, head size 32
    assert softmax == LAYERS * 5 * 4 * 32 * 32
    backward, _ = kernels.core_flops(step.model, step.recipe, "backward")
    assert backward == 2 * products


def test_the_largest_kernels_of_a_pass() -> None:
    found = [
        Launch("forward", "MLP", "aten::mm", "void ns::gemm<float>(int)", 3.0),
        Launch("forward", "MLP", "aten::mm", "void ns::gemm<float>(int)", 1.0),
        Launch("backward", "MLP", "aten::mm", "void ns::gemm<float>(int)", 2.0),
        Launch("optimizer", "optimizer", "aten::_fused_adamw_", "adam", 6.0),
    ]
    rows = {
        (str(row.point["top of"]), str(row.point["kernel"])): row.numbers
        for row in kernels.top_rows({}, found)
    }
    assert rows["forward", "gemm"] == {"calls": 2, "total_s": 4.0, "mean_s": 2.0, "share": 1.0}
    assert rows["whole step", "gemm"]["share"] == 0.5
    assert rows["whole step", "adam"]["share"] == 0.5
    assert ("forward", "adam") not in rows


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "std::array<char*, 3ul> >(int)",
            "vectorized_elementwise_kernel CUDAFunctor_add",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, 9>(float*)", "softmax_warp_forward"),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_tn_align1>(cutlass::Params)",
            "Kernel2 cutlass_80_simt_sgemm_128x256_8x4_tn_align1",
        ),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT"),
        ("Memset (Device)", "Memset"),
    ],
)
def test_a_kernels_short_name(name: str, expected: str) -> None:
    assert kernels.short(name) == expected


def test_a_step_under_held_clocks_is_profiled_again_and_then_given_up() -> None:
    step = tiny_step()
    built = kernels.Built(step, step.random_batches())
    point: kernels.Point = {"model": "m", "precision": "fp32", "context": 1}
    once = Held(1)
    assert isinstance(kernels._profiled(bench(once), built, point), list)
    assert once.rested == 1
    assert kernels._profiled(bench(Held(99)), built, point)[0] == "throttled"


def test_a_pass_is_the_sum_of_its_phases() -> None:
    laps = {"forward": [1.0] * 6, "backward": [2.0] * 6, "optimizer": [0.5] * 6, "total": [3.6] * 6}
    timing = Timing(laps=laps, runs=list(range(6)))
    found = [
        Launch("forward", "MLP", "aten::mm", "gemm", 0.5),
        Launch("optimizer", "optimizer", "x", "adam", 0.5),
    ]
    rows = {
        name: kernels._pass_row(bench(CpuStopwatch()), {}, timing, name, found) for name in kernels.PASSES
    }
    medians = {name: row.times.median for name, row in rows.items() if row.times}
    assert medians == {"forward": 1.0, "forward + backward": 3.0, "whole step": 3.6}
    assert "busy_share" not in rows["forward"].numbers  # A CPU's operations bear the profiler's cost.
    on_gpu = replace(bench(CpuStopwatch()), device=torch.device("cuda"))
    assert kernels._pass_row(on_gpu, {}, timing, "forward", found).numbers["busy_share"] == 0.5
    assert rows["whole step"].numbers["operations"] == 2
    assert rows["forward"].numbers["products_share"] == 1.0
    assert rows["whole step"].numbers["optimizer_share"] == 0.5


def test_the_tiny_run_has_its_shares_and_its_trace(tiny: tuple[BenchResult, Path]) -> None:
    result, folder = tiny
    assert {row.status for row in result.rows} <= {"done", "unsteady"}
    shares = [row.numbers for row in result.rows if "profiled" in row.point]
    assert [sum(map(float, numbers.values())) for numbers in shares] == pytest.approx([1.0, 1.0])
    core = [row.numbers for row in result.rows if "attention's core in" in row.point]
    assert [float(numbers["flops_ratio"]) for numbers in core] == pytest.approx([4 * 32 / 5, 8 * 32 / 4] * 2)
    trace = json.loads(gzip.decompress((folder / "kernels-tiny-llama-demo-fp32-64.json.gz").read_bytes()))
    assert {"part: softmax", "phase: optimizer"} <= {one.get("name") for one in trace["traceEvents"]}


def test_files_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="files"):
        run("accumulation", device="cpu", folder=tmp_path / "x")
