"""Traces of torch.profiler, synthetic ones whose answer is known and a CPU's, and logs of a Trainer."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from synthetic_trace import (
    ALL_REDUCE,
    GEMM,
    H100,
    Kernel,
    busy_and_fast,
    busy_and_slow,
    events_of,
    saved,
    sync,
)  # fmt: skip
from trainfit.cli.main import main
from trainfit.explanation.kinds import kind_of
from trainfit.explanation.trace.explain import explain_trace
from trainfit.explanation.trace.kernels import kind_of_kernel
from trainfit.explanation.trace.read import Trace, read_trace
from trainfit.explanation.trainer_log import read_log, read_state
from trainfit.spec.errors import InputError
from trainfit.spec.profile import TraceFacts


def explained(path: Path, **options: Any) -> TraceFacts:
    return explain_trace(read_trace(path), path, **options)


@pytest.mark.parametrize("name", ["a.json", "a.pt.trace.json.gz"])
def test_ninety_percent_busy_is_not_ninety_percent_used(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / name, busy_and_slow())
    assert kind_of(str(path)) == "trace"
    found = explained(path)
    assert found.gpu == H100
    assert (found.num_steps, found.num_kernels, found.step_s) == (3, 270, 900e-6)
    assert found.busy == pytest.approx(0.9, abs=0.01)
    assert found.products == pytest.approx(1 / 30, rel=1e-6)
    assert found.waits_for_host_s + found.busy_s == pytest.approx(found.window_s)
    assert found.num_unqueued == found.num_kernels
    at = found.utilisation
    assert at is not None
    flops = 3 * 2 * 128 * 1024 * 1024
    assert (at.flops, at.dtype) == (flops, "bf16")
    assert at.peak_flops_per_s == pytest.approx(989.4e12, rel=0.01)
    assert at.mfu == pytest.approx(flops / (found.window_s / 3) / at.peak_flops_per_s)
    assert at.mfu < 0.002
    whole = sum(one.seconds for one in found.kinds)
    assert at.mfu == pytest.approx(whole / found.window_s * found.products * at.products_rate)


def test_long_products_issued_ahead_are_no_launch_bound_run(tmp_path: Path) -> None:
    found = explained(saved(tmp_path / "a.json", busy_and_fast()))
    assert found.busy > 0.99
    assert found.products == 1.0
    assert not found.stretches
    assert found.num_unqueued < found.num_kernels / 5
    assert found.utilisation is not None
    assert found.utilisation.mfu == pytest.approx(
        2 * 8192 * 8192 * 4096 / 1e-3 / found.utilisation.peak_flops_per_s, rel=0.01
    )


def test_an_idle_gpu_waits_for_the_host_or_for_something_else(tmp_path: Path) -> None:
    kernels = [
        Kernel(0, 10, 100),
        Kernel(20, 110, 100),  # Issued ahead: no gap
        Kernel(300, 310, 100, op="aten::copy_"),  # 100 us idle: launched 90 us after the GPU fell idle
        Kernel(310, 415, 10),  # 5 us: the latency of a launch
        Kernel(320, 500, 10),  # 75 us after a launch that was there: a dependency
    ]
    found = explained(saved(tmp_path / "a.json", events_of(kernels, [])))
    assert found.num_steps == 0
    assert found.step_s is None
    assert found.window_s == pytest.approx(500e-6)
    assert found.waits_for_host_s == pytest.approx(100e-6)
    assert found.between_kernels_s == pytest.approx(5e-6)
    assert found.other_idle_s == pytest.approx(75e-6)
    assert [one.op for one in found.stretches][:1] == ["aten::copy_"]


def test_kernels_of_the_step_before_are_not_of_the_first_step(tmp_path: Path) -> None:
    """Their launches came before the trace began; they still run while the first step is issued."""
    steps = [(0.0, 1000.0), (1000.0, 1000.0)]
    events = events_of([Kernel(0, 5, 500, GEMM)], [])  # Of the step before
    late = [event for event in events if event.get("cat") == "kernel"]
    own = [Kernel(10, 505, 500, GEMM), Kernel(1010, 1505, 500, GEMM)]
    found = explained(saved(tmp_path / "a.json", [*late, *events_of(own, steps, first=2)]))
    assert (found.num_steps, found.num_kernels) == (2, 2)
    assert found.window_s == pytest.approx(1500e-6)  # From the first kernel's begin to the last step's end
    assert found.busy_s == pytest.approx(1000e-6)


def test_a_stretch_is_of_the_step_that_issued_most_of_it(tmp_path: Path) -> None:
    ahead = [Kernel(900 + i, 1000 + i, 1) for i in range(3)]  # Issued at the end of the first step
    late = [Kernel(1100 + 100 * i, 1105 + 100 * i, 1) for i in range(8)]
    events = events_of([Kernel(0, 5, 995, GEMM), *ahead, *late], [(0.0, 1000.0), (1000.0, 1000.0)])
    found = explained(saved(tmp_path / "a.json", events))
    assert found.stretches[0].step == 4


def test_exposed_communication_is_what_no_other_kernel_hides(tmp_path: Path) -> None:
    kernels = [
        Kernel(0, 10, 100, GEMM),
        Kernel(1, 60, 100, ALL_REDUCE, stream=20),  # 50 us behind the product, 50 alone
        Kernel(2, 160, 40, GEMM),
        Kernel(3, 200, 30, "Memcpy DtoH (Device -> Pinned)", cat="gpu_memcpy"),
    ]
    found = explained(saved(tmp_path / "a.json", events_of(kernels, [])))
    assert found.communication_s == pytest.approx(100e-6)
    assert found.exposed_communication_s == pytest.approx(50e-6)
    assert (found.copies_s, found.exposed_copies_s) == (pytest.approx(30e-6), pytest.approx(30e-6))
    assert {one.name: one.num_kernels for one in found.kinds} == {
        "matrix products": 2, "communication": 1, "copies and fills": 1,
    }  # fmt: skip


def test_waits_of_the_host_are_named_by_their_operation(tmp_path: Path) -> None:
    events = [*busy_and_fast(), *sync(9000, 900), *sync(19000, 800), *sync(50_000, 9000, "after the steps")]
    found = explained(saved(tmp_path / "a.json", events))
    assert [(one.call, one.op, one.num_calls) for one in found.syncs] == [
        ("cudaStreamSynchronize", "aten::_local_scalar_dense", 2)
    ]
    assert found.syncs[0].seconds == pytest.approx(1700e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_192x192_64x3_1x2_h_bz_coopB_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "matrix products"),
        ("void gemvx::kernel<int, int, __nv_bfloat16>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)", "attention"),
        ("forward_gluon_kernel", "attention"),
        ("query_gradient_tma_kernel", "attention"),
        ("swiglu_backward_kernel", "other"),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolutions"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("void at::native::(anonymous)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, BUnaryFunctor<float>>", "elementwise"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "norms"),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", "softmax and loss"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reductions"),
        ("void at::native::convert_to_half", "other"),
        ("triton_poi_fused_add_mul_2", "elementwise"),
    ],
)  # fmt: skip
def test_kernels_have_their_kind(name: str, kind: str) -> None:
    assert kind_of_kernel(name) == kind


def test_a_cpus_trace_is_read_and_has_no_kernels(tmp_path: Path) -> None:
    """Of the real profiler: its header, its events; shapes say the FLOPs of its products."""
    model = torch.nn.Linear(64, 32)
    path = tmp_path / "cpu.json"
    plan = schedule(wait=0, warmup=1, active=2)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan,
        on_trace_ready=lambda seen: seen.export_chrome_trace(str(path)),
    ) as seen:  # fmt: skip
        for _ in range(3):
            model(torch.randn(16, 64)).sum().backward()
            seen.step()
    trace = read_trace(path)
    assert [one.number for one in trace.steps] == [1, 2]
    assert sum(trace.flops) == 2 * 2 * (2 * 16 * 64 * 32), "forward, and the weight's gradient"
    assert trace.dtypes.keys() == {"fp32"}
    assert kind_of(str(path)) == "trace"
    with pytest.raises(InputError, match=r"cpu\.json: it has no kernels of a GPU; profile with"):
        explain_trace(trace, path)


# -- files that are no traces


def forged(path: Path, text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


KERNEL = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": %s, "dur": %s, "args": {%s}}'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"traceEvents": [', "it ends within its events"),
        ('{"traceEvents": [{"ph": "X", "cat', "it ends within an event"),
        ('{"traceEvents": [1]}', "an event is no object"),
        ('{"traceEvents": []}', "it has no kernels of a GPU"),
        ('{"traceEvents": [%s]}' % (KERNEL % ("-1", "1", "")), "ts of an event is no time"),
        ('{"traceEvents": [%s]}' % (KERNEL % ("1", '"1"', "")), "dur of an event is no time"),
        ('{"traceEvents": [%s]}' % (KERNEL % ("1", "NaN", "")), "NaN is no number of JSON"),
        ('{"traceEvents": [%s]}' % (KERNEL % ("1e400", "1", "")), "ts of an event is no time"),
        ('{"traceEvents": [%s]}' % (KERNEL % ("1", "1", '"device": "0"')), "no whole number"),
        ('{"traceEvents": [%s]}' % (KERNEL % ("9" * 5000, "1", "")), "no trace of torch.profiler"),
        ('{"traceEvents": [{"args": ' + "[" * 200_000, "it is nested too deeply"),
        (b'{"traceEvents": [\xff\xfe\x00]}', "an event is no object"),
    ],
)
def test_what_is_no_trace_ends_with_65(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, problem: str
) -> None:
    for name in ("a.json", "a.json.gz"):
        assert main(["explain", forged(tmp_path / name, text)]) == 65
        errors = capsys.readouterr().err
        assert problem in errors
        assert "Traceback" not in errors


def test_a_trace_that_is_cut_off_ends_with_65(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = saved(tmp_path / "a.json.gz", busy_and_slow()).read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    assert main(["explain", str(tmp_path / "cut.json.gz")]) == 65
    assert "no trace of torch.profiler" in capsys.readouterr().err


def test_a_large_trace_is_read_in_little_memory(tmp_path: Path) -> None:
    """40 MB of events whose arguments are dropped; the reader holds one part of the file at a time."""
    path = tmp_path / "a.json"
    padded = [event | {"stack": "x" * 4000} for event in busy_and_slow(num_steps=30)]
    saved(path, padded)
    assert path.stat().st_size > 40e6
    tracemalloc.start()
    trace = read_trace(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trace.num_events == len(padded)
    assert peak < 32e6


def test_text_of_several_bytes_may_be_cut_between_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = events_of([Kernel(0, 10, 5, "größe→𝔊" * 9), Kernel(1, 20, 5, "größe→𝔊" * 9)], [])
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"traceEvents": events}, ensure_ascii=False))
    for size in range(30, 60):
        monkeypatch.setattr("trainfit.explanation.trace.read.CHUNK", size)
        trace = read_trace(path)
        assert trace.names.count("größe→𝔊" * 9) == 1
        assert len(trace.kernels[0]) == 2


# -- the command


def test_the_command_says_what_would_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(saved(tmp_path / "a.json", busy_and_slow()))
    assert main(["explain", path]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "90.0% busy and 0.09% MFU" in out
    assert "the host sets the pace" in out
    assert "busy counts the time in which any kernel runs, as nvidia-smi does" in out
    assert "of the kernels' time is no product (elementwise first)" in out
    assert main(["explain", path, "--json"]) == 0
    assert TraceFacts.model_validate_json(capsys.readouterr().out).num_kernels == 270
    assert main(["explain", path, "--gpu", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["utilisation"]["peak_flops_per_s"] > 0
    assert main(["explain", path, "--plot", str(tmp_path / "x.svg")]) == 65
    assert "has no step to write" in capsys.readouterr().err
    assert main(["explain", path, "--device", "3"]) == 65
    assert "it has no kernels of this device; use one of 0" in capsys.readouterr().err


def test_a_recipe_gives_the_model_flops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(saved(tmp_path / "a.json", busy_and_slow()))
    assert main(["explain", path, "--recipe", "tiny-cpu", "--gpu", "h100-sxm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["predict", "tiny-cpu", "--gpu", "h100-sxm", "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert found["utilisation"]["flops"] == predicted["model_flops"]
    assert found["utilisation"]["flops_are"] == "the recipe's model FLOPs"


# -- a Trainer's log

LOG = """
{'loss': '4.5', 'grad_norm': '2.1', 'learning_rate': '4e-05', 'epoch': '0.1'}
 50%|█████     | 20/40 [00:05<00:05]{'loss': 3.25, 'grad_norm': 1.9, 'learning_rate': 2e-05, 'epoch': 0.2}
{'train_runtime': '10.0', 'train_samples_per_second': '64.0', 'train_steps_per_second': '4.0', 'epoch': '1'}
"""


def test_a_trainers_log_gives_tokens_a_second_and_mfu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_log(LOG)
    assert found is not None
    assert (found.first_loss, found.last_loss) == (4.5, 3.25)
    assert (found.num_steps, found.step_s, found.runtime_s) == (40, 0.25, 10.0)
    path = tmp_path / "run.log"
    path.write_text(LOG)
    assert main(["explain", str(path), "--recipe", "tiny-cpu", "--gpu", "h100-sxm", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert main(["predict", "tiny-cpu", "--gpu", "h100-sxm", "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert run["mfu"] == pytest.approx(predicted["model_flops"] / 0.25 / run["peak_flops_per_s"])
    assert run["tokens_per_s"] == pytest.approx(predicted["tokens_per_s"] * predicted["step_s"] / 0.25)
    assert main(["explain", str(path)]) == 0
    assert "MFU: name the run's recipe" in capsys.readouterr().out


def test_a_trainers_state_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = [
        {"epoch": 0.1, "loss": 2.0, "step": 10},
        {"epoch": 0.2, "step": 20, "train_runtime": 8.0, "train_steps_per_second": 2.5, "total_flos": 4e15,
         "train_loss": 1.9},
    ]  # fmt: skip
    state = {"epoch": 0.2, "global_step": 20, "log_history": history, "num_input_tokens_seen": 163_840,
             "total_flos": 4e15}  # fmt: skip
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(state))
    found = read_state(path)
    assert (found.num_steps, found.step_s, found.tokens_per_s) == (20, 0.4, 20_480)
    assert main(["explain", str(path), "--recipe", "tiny-cpu", "--gpu", "h100-sxm", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert run["mfu_by_total_flos"] == pytest.approx(4e15 / 8 / run["peak_flops_per_s"])


@pytest.mark.parametrize(
    "text",
    [
        '{"log_history": [',
        '{"log_history": []}',
        '{"log_history": [1]}',
        '{"log_history": ["a", {"loss": "x"}]',
    ],
)
def test_what_is_no_state_ends_with_65(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["explain", forged(tmp_path / "trainer_state.json", text)]) == 65
    assert "trainer_state.json" in capsys.readouterr().err


def test_a_log_without_either_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", forged(tmp_path / "run.log", "nothing {'loss': } here")]) == 65
    assert "no OutOfMemoryError of PyTorch in it, nor a Trainer's log" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "dims", "flops"),
    [
        # Compiled code gives the output, too.
        ("aten::mm", [[8, 16], [16, 4], [8, 4]], 2 * 8 * 16 * 4),
        ("aten::bmm", [[3, 8, 16], [3, 16, 4], [3, 8, 4]], 2 * 3 * 8 * 16 * 4),
        ("aten::addmm", [[4], [8, 16], [16, 4], [8, 4]], 2 * 8 * 16 * 4),
        ("aten::addmm", [[4], [8, 16], [16, 4], [], []], 2 * 8 * 16 * 4),
        ("aten::addmm", [[8, 4], [8, 16], [16, 4], [], []], 2 * 8 * 16 * 4),
        ("aten::baddbmm", [[3, 8, 4], [3, 8, 16], [3, 16, 4]], 2 * 3 * 8 * 16 * 4),
        # Row-wise scales have two dimensions, too.
        ("aten::_scaled_mm", [[8, 16], [16, 4], [8, 1], [1, 4], [], []], 2 * 8 * 16 * 4),
        ("aten::_grouped_mm", [[8, 16], [2, 16, 4], [2]], 2 * 8 * 16 * 4),
    ],
)
def test_flops_of_a_product_follow_from_its_factors(name: str, dims: list[list[int]], flops: int) -> None:
    trace = Trace()
    trace.take({"ph": "X", "cat": "cpu_op", "name": name, "ts": 1, "dur": 1, "args": {"Input Dims": dims}})
    assert list(trace.flops) == [flops]
