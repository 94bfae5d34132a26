"""Every figure in a sentence of bench.md and kernels.md (evidence/pages) is that of the records."""

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from evidence.scripts.tables import attention_grid as grid
from evidence.scripts.tables import bench, kernels
from page_claims import ROOT, check, sentences
from trainfit.bench.workloads.steps import SIZES
from trainfit.catalog.load import gpu, model_config
from trainfit.report.bench_plot import number
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.units import GIB

Figures = tuple[float, ...]
BENCH, KERNELS = "evidence/pages/bench.md", "evidence/pages/kernels.md"
FORWARD = {"pass": "forward"}
WHOLE = {"pass": "whole step"}


def row(experiment: str, **point: Cell) -> BenchRow:
    """Return the one row with these keys; ``_`` in a key stands for a space or a hyphen."""
    found = [
        one
        for one in bench.rows(experiment)
        if point.items() <= {re.sub("[ '-]", "_", key): cell for key, cell in one.point.items()}.items()
    ]
    assert len(found) == 1, (experiment, point, len(found))
    return found[0]


def value(experiment: str, name: str, scale: float = 1.0, **point: Cell) -> float:
    found = number(row(experiment, **point), name)
    assert found is not None
    return found * scale


def every(experiment: str, name: str, **point: Cell) -> dict[Cell, float]:
    """Return the numbers of all rows with these keys, by the rows' points."""
    rows = bench.having(bench.rows(experiment), point)
    return {json.dumps(one.point): found for one in rows if (found := number(one, name)) is not None}


def extremes(found: Sequence[float]) -> Figures:
    return min(found), max(found)


def step_ms(model: str, precision: str, *modes: str) -> Figures:
    at = partial(value, "transformer", "median_s", 1e3, model=model, precision=precision, warm_up=5)
    return tuple(at(compile=mode) for mode in modes)


def without_warm_up() -> Figures:
    at = partial(value, "transformer", "total_mean_s", model="small", precision="amp-bf16", compile="model")
    return (at(warm_up=0) / at(warm_up=5),)


def softmax_ratios() -> Figures:
    at = {"attention's core in": "forward"}
    fp32, amp = (
        list(every("kernels", "time_ratio", precision=x, **at).values()) for x in ("fp32", "amp-bf16")
    )
    return *extremes(fp32), *extremes(amp), *extremes(list(every("kernels", "flops_ratio", **at).values()))


def peak(context: int, precision: str, attention: str = "eager") -> float:
    at = {"context": context, "precision": precision, "attention": attention, "source": "measured"}
    return value("memory", "peak_bytes", 1 / GIB, **at, **WHOLE)


def predictions() -> list[BenchRow]:
    return [one for one in bench.rows("memory") if "off_by" in one.numbers]


def exact_peaks() -> Figures:
    assert {one.numbers["off_by"] for one in predictions()} == {"+0 bytes"}
    return (len(predictions()),)


def phase_errors() -> Figures:
    """Phases equal to the byte, those measured and predicted, and the bytes of the other."""
    off: list[int] = []
    for one in predictions():
        (measured,) = bench.having(bench.rows("memory"), {**one.point, "source": "measured"})
        for name in ("forward_bytes", "backward_bytes", "optimizer_bytes"):
            if name in measured.numbers:
                off.append(int(one.numbers[name]) - int(measured.numbers[name]))
    (wrong,) = [abs(error) for error in off if error]
    return off.count(0), len(off), wrong


def fp32_outputs(device: str, low: str = "bf16") -> list[str]:
    return [
        str(one.point["operation"]) for one in of_operations(device, low) if one.numbers["of_low"] == "fp32"
    ]


def of_operations(device: str, low: str = "bf16") -> list[BenchRow]:
    rows = bench.having(bench.rows("autocast"), {"device": device, "autocast": low})
    return [one for one in rows if "operation" in one.point]


def gain(case: str) -> float:
    return value("streams", "gain", case=case, streams="two")


def totals() -> Figures:
    at = partial(value, "accumulation", "total")
    return at(sum="fp32", addend="fp32"), at(sum="fp16"), at(sum="fp32", addend="fp16", cast=False)


def bucket_model() -> Figures:
    at = partial(value, "ddp", bucket_model_of="bucketed")
    assert at("best_measured_mb") == 100
    return at("best_predicted_mb"), at("r_squared")


def share(model: str, precision: str, name: str, **point: Cell) -> float:
    return value("kernels", name, 100.0, model=model, precision=precision, context=512, **point)


def attention_core() -> Figures:
    names = ("scores", "scale_and_mask", "softmax", "values")
    of_part = partial(share, precision="amp-bf16", profiled="whole step")
    return (max(sum(of_part(model, name=f"{name}_share") for name in names) for model in SIZES),)


def flash(*cells: tuple[int, int, str], which: str = "both") -> Callable[[], Figures]:
    """TFLOP/s of (head size, tokens, body)."""
    at = partial(value, "flash", "tflops_per_s", dtype="bf16", heads=16, **{"pass": which})
    return lambda: tuple(at(head=head, seq=seq, body=body) for head, seq, body in cells)


def one_head_bf16() -> Figures:
    at = partial(every, "flash", "median_s", heads=1, dtype="bf16", seq=65536, **{"pass": "both"})
    return tuple(1e3 * ms for body in ("ours", "pytorch") for ms in extremes(list(at(body=body).values())))


def masked() -> Figures:
    at = partial(every, "attention", "tflops_per_s", mask="additive", seq=8192, **{"pass": "both"})
    kinds = (("cudnn", "bf16"), ("efficient", "bf16"), ("efficient", "fp32"))
    rates = [list(at(body=body, dtype=dtype).values()) for body, dtype in kinds]
    return tuple(rate for some in rates for rate in extremes(some))


def wide_in_passes() -> Figures:
    seconds = {n: kernels.backward_s(256, n, deterministic=True) for n in (1024, 2048, 8192, 16384)}
    return extremes([5 * 32768 * 2048 * n / one / 1e12 for n, one in seconds.items()])


def kernel(case: str, part: str, *ways: str, name: str = "ms") -> Callable[[], Figures]:
    """Numbers of ways of a case."""
    return lambda: tuple(kernels.timed(case, way, part)[name] for way in ways)


def products_share() -> Figures:
    ms = kernels.timed("products", "cuBLAS, 4 chunks", "forward")["ms"]
    return ms, 100 * ms / kernels.timed("loss", "ours fused", "both")["ms"]


def loss_errors() -> Figures:
    errors = [one for one in kernels.rows() if one["case"] == "loss" and one["part"] == "errors"]
    ratios = {one["way"]: one["of_eager"] for one in errors}
    assert max(ratios, key=lambda way: ratios[way]) == "ours fused, 32 chunks"
    return ratios["ours fused, 32 chunks"], ratios["ours fused"]


BENCH_CLAIMS: dict[str, Callable[[], Figures]] = {
    r"mixed precision takes # ms instead of # ms": lambda: step_ms("medium", "amp-bf16", "model", "false"),
    r"for the 2\.7B model the gain is # ms against # ms":
        lambda: step_ms("2.7b", "amp-bf16", "model", "false"),
    r"measured one in all # runs that fit": exact_peaks,
    r"buckets of 100 MiB, the best size measured, # %":
        lambda: (value("ddp", "exposed_share", 100.0, model="xl", buckets_of="bucketed", bucket_mb=100),),
    r"product alone reaches # % of the data sheet":
        lambda: (value("gpu", "of_data_sheet", 100.0, dtype="bf16", size=8192),),
    r"without a pause # % are left in bf16":
        lambda: (value("gpu", "of_data_sheet", 100.0, sustained="bf16", product="all", inputs=14336),),
    r"are left in bf16 and # % in fp8":
        lambda: (value("gpu", "of_data_sheet", 100.0, sustained="fp8", product="all", outputs=14336),),
    r"before products: # times as fast": lambda: (gain("copy to the GPU, pinned, then products"),),
    r"few rows: # times": lambda: (gain("softmaxes of few rows"),),
    r"fill the GPU gain nothing \(#\)": lambda: (gain("two products that each fill the GPU"),),
    r"is not hidden \(#\)": lambda: (gain("copy to the host, pageable, then products"),),
    r"compiled whole in mixed precision is # times as long": without_warm_up,
    r"works only # % of the small model's step and # % of the xl model's":
        lambda: tuple(share(model, "amp-bf16", "busy_share", **WHOLE) for model in ("small", "xl")),
    r"In fp32 it works at least # %":
        lambda: (min(share(model, "fp32", "busy_share", **WHOLE) for model in SIZES),),
    r"the 2\.7B model's MLP alone takes # %":
        lambda: (share("2.7b", "fp32", "MLP_share", profiled="whole step"),),
    r"takes up to # % of the busy time": attention_core,
    r"products take # to # times as long in fp32 and # to # times in mixed precision, with # to # times":
        softmax_ratios,
    r"which adds # GiB at context 512": lambda: (peak(512, "amp-bf16") - peak(512, "fp32"),),
    r"which removes # GiB at context 2,048":
        lambda: (peak(2048, "fp32", attention="sdpa") - peak(2048, "amp-bf16", attention="sdpa"),),
    r"as were # of # phase peaks; one forward is off by # bytes": phase_errors,
    r"On CUDA # of # operations": lambda: (len(fp32_outputs("cuda")), len(of_operations("cuda"))),
    r"On a CPU only # do": lambda: (len(fp32_outputs("cpu")),),
    r"a thousand times gives # in fp32, # in fp16 and # where": totals,
    r"gives # MiB \(R² #\)": bucket_model,
}  # fmt: skip


def least_on_h100(which: str) -> float:
    return min(grid.ratio(*shape, which, "h100") for shape in grid.shapes())


KERNEL_CLAIMS: dict[str, Callable[[], Figures]] = {
    r"together trainfit has # times the fastest other's rate \(geometric mean; least #\)":
        lambda: (grid.mean_ratio("both"), min(grid.ratio(*shape, "both") for shape in grid.shapes())),
    r"beside cuDNN alone: # forward, # backward, # together":
        lambda: tuple(grid.mean_ratio(which, 256) for which in ("forward", "backward", "both")),
    r"forward and backward together have # times the fastest other's rate \(geometric mean; least #\)":
        lambda: (grid.mean_ratio("both", gpu="h100"), least_on_h100("both")),
    r"beside cuDNN alone, # forward, # backward and # together \(H100\)":
        lambda: tuple(grid.mean_ratio(which, 256, "h100") for which in ("forward", "backward", "both")),
    r"trainfit's kernels take # ms where cuDNN's take # ms \(0\.5B, 32 sequences\), but # ms for # ms":
        lambda: tuple(
            grid.step_ms(f"{size}-{kind}") for size in ("0.5b", "7b") for kind in ("bf16-attention", "bf16")
        ),
    r"heads of 64 take # ms forward and backward where `efficient` takes # ms, heads of 128 # and # ms":
        lambda: (*grid.fp32_ms(64), *grid.fp32_ms(128)),
    r"these are # and # ms, # and # ms": lambda: (*kernels.fp32_ms(64), *kernels.fp32_ms(128)),
    r"With deterministic algorithms heads of 256 reach # to # TFLOP/s backward": wide_in_passes,
    r"takes # to # ms in bf16, by head size, where PyTorch's choice takes # to # ms": one_head_bf16,
    r"cuDNN reaches # to # TFLOP/s .* `efficient` # to # \(fp32: # to #\)": masked,
    r"cuBLAS needs # ms for the three products alone in as many chunks, so # %": products_share,
    r"AdamW takes # ms, torch's fused AdamW # ms":
        kernel("update", "forward", "ours, to nearest", "torch fused, to nearest"),
    r"but for the loss in 32 chunks: # times, .* default `fused` loss has #\.": loss_errors,
}  # fmt: skip


@pytest.mark.parametrize(
    ("page", "pattern"),
    [*((BENCH, pattern) for pattern in BENCH_CLAIMS), *((KERNELS, pattern) for pattern in KERNEL_CLAIMS)],
)
def test_a_figure_is_that_of_the_records(page: str, pattern: str) -> None:
    check(page, pattern, (BENCH_CLAIMS if page == BENCH else KERNEL_CLAIMS)[pattern]())


def test_out_of_memory_was_predicted() -> None:
    lost = [one for one in bench.rows("memory") if one.status == "out-of-memory"]
    assert len(lost) == 2
    for one in lost:
        (predicted,) = bench.having(bench.rows("memory"), {**one.point, "source": "predicted"})
        assert predicted.numbers["fits"] is False


def test_statements_without_a_figure() -> None:
    assert {"softmax", "layer_norm", "cross_entropy", "sum", "norm"} <= set(fp32_outputs("cuda"))
    components = bench.having(bench.rows("autocast"), {"device": "cuda", "autocast": "fp16"})
    dtypes = {one.point.get("component"): one.numbers.get("dtype") for one in components}
    assert (dtypes["fc2 (logits)"], dtypes["loss"]) == ("fp16", "fp32")
    for seq in (1024, 2048, 8192, 16384):  # Ungrouped, before the configurations of today.
        ours, cudnn = flash((128, seq, "ours"), (128, seq, "cudnn"), which="backward")()
        assert (cudnn > ours) is (seq != 8192)


def test_statements_on_the_grid_without_a_figure() -> None:
    for card in ("h100", "h200"):
        cases = [(*shape, which) for shape in grid.shapes() for which in grid.PASSES]
        assert [case for case in cases if grid.ratio(*case, card) < 0.98] == [(64, 1024, "forward")]
    rows = grid.result().rows
    assert {(row.status, len(row.times.samples)) for row in rows if row.times} == {
        ("done", 10),
        ("unsteady", 9),
    }
    model, (micro, seq, keys) = model_config("qwen2.5-7b"), (4, 1024, 128)
    programs = model["num_key_value_heads"] * micro * seq // keys
    assert (programs, gpu("h100-sxm").num_sms) == (128, 132)


def test_the_records_page_names_the_commits_that_do_not_exist() -> None:
    lines = [*bench.FILE.read_text().splitlines(), *kernels.FILE.read_text().splitlines()]
    named = {json.loads(line)["commit"] for line in lines}
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    missing = {
        commit
        for commit in named
        if subprocess.run(
            ["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True
        ).returncode
    }
    absent = re.search(r"do not exist in this repository: (.*)", sentences(BENCH))
    assert absent is not None
    assert set(re.findall(r"[0-9a-f]{7}", absent[1])) == missing
