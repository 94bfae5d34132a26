"""Every figure in a sentence of docs/results/bench.md and docs/results/kernels.md is that of the records."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import pytest

from benchmarks.tables import bench, kernels
from page_claims import ROOT, figures, sentences
from trainfit.bench.experiments.autocast import OPERATIONS
from trainfit.report.bench_plot import number
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.units import GIB

Figures = tuple[float, ...]
BENCH, KERNELS = "docs/results/bench.md", "docs/results/kernels.md"


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


def values(
    experiment: str, name: str, *points: Mapping[str, Cell], scale: float = 1.0
) -> Callable[[], Figures]:
    return lambda: tuple(value(experiment, name, scale, **point) for point in points)


def step_ms(model: str, precision: str, *modes: str) -> Figures:
    points = [{"model": model, "precision": precision, "compile": mode, "warm_up": 5} for mode in modes]
    return values("transformer", "median_s", *points, scale=1e3)()


def speedups() -> Figures:
    return tuple(
        step_ms(model, "fp32", "false")[0] / step_ms(model, "bf16", "false")[0] for model in ("small", "2.7b")
    )


def without_warm_up() -> Figures:
    at: dict[str, Cell] = {"model": "small", "precision": "amp-bf16", "compile": "model"}
    return (
        value("transformer", "total_mean_s", **at, warm_up=0)
        / value("transformer", "total_mean_s", **at, warm_up=5),
    )


def some_rows(experiment: str, name: str, **point: Cell) -> Iterator[tuple[BenchRow, float]]:
    for one in bench.having(bench.rows(experiment), point):
        found = number(one, name)
        if found is not None:
            yield one, found


def extremes(found: Sequence[float]) -> Figures:
    return min(found), max(found)


def softmax_ratios() -> Figures:
    found: list[float] = []
    flops: list[float] = []
    for precision in ("fp32", "amp-bf16"):
        at: dict[str, Cell] = {"attention's core in": "forward", "precision": precision}
        rows = bench.having(bench.rows("kernels"), at)
        times = [float(one.numbers["time_ratio"]) for one in rows]
        flops += [float(one.numbers["flops_ratio"]) for one in rows]
        found += extremes(times)
    return (found[0], found[1], *extremes(flops), found[2], found[3])


def peak(context: int, precision: str, name: str = "peak_bytes", attention: str = "eager") -> float:
    at: dict[str, Cell] = {
        "attention": attention,
        "context": context,
        "precision": precision,
        "source": "measured",
    }
    return value("memory", name, **at, **{"pass": "whole step"}) / GIB


def predictions() -> list[BenchRow]:
    return [one for one in bench.rows("memory") if "off_by" in one.numbers]


def exact_peaks() -> Figures:
    assert {one.numbers["off_by"] for one in predictions()} == {"+0 bytes"}
    return (float(len(predictions())),)


def phase_errors() -> Figures:
    """Phases measured and predicted, those equal to the byte, and the bytes of the other."""
    off: list[int] = []
    for one in predictions():
        at = {**one.point, "source": "measured"}
        (measured,) = bench.having(bench.rows("memory"), at)
        for phase in ("forward", "backward", "optimizer"):
            name = f"{phase}_bytes"
            if name in measured.numbers:
                off.append(int(one.numbers[name]) - int(measured.numbers[name]))
    (wrong,) = [abs(error) for error in off if error]
    return len(off), off.count(0), wrong


def sustained(kind: str) -> Figures:
    return extremes([rate for _, rate in some_rows("gpu", "tflops_per_s", sustained=kind, product="all")])


def fp8_gains() -> Figures:
    gains = []
    for one, rate in some_rows("gpu", "tflops_per_s", sustained="fp8", product="all"):
        gains.append(rate / value("gpu", "tflops_per_s", **{**one.point, "sustained": "bf16"}))
    low, high = extremes(gains)
    assert f"{low:.1f}" == f"{high:.1f}"
    return (low,)


def of_copy(*bodies: str) -> Figures:
    return values("fusion", "of_a_copy", *({"body": body, "rows": 32768} for body in bodies), scale=100.0)()


def gain(case: str) -> Callable[[], Figures]:
    return values("streams", "gain", {"case": case, "streams": "two"})


def fp32_outputs(device: str, low: str = "bf16") -> list[str]:
    rows = bench.having(bench.rows("autocast"), {"device": device, "autocast": low})
    return [str(one.point["operation"]) for one in rows if one.numbers.get("of_low") == "fp32"]


def totals() -> Figures:
    sums = (
        {"sum": "fp32", "addend": "fp32"},
        {"sum": "fp16", "addend": "fp16"},
        {"sum": "fp32", "addend": "fp16", "cast": False},
    )
    return values("accumulation", "total", *sums)()


def unsynchronised() -> Figures:
    at: dict[str, Cell] = {"heads": 1, "dtype": "fp32", "head": 64, "seq": 16384, "body": "eager"}
    wrong = row("attention", **at, **{"pass": "forward, not synchronised"})
    assert wrong.status == "impossible"
    assert wrong.times is not None
    return wrong.times.median * 1e6, value("attention", "median_s", 1e3, **at, **{"pass": "forward"})


def small_forward() -> Figures:
    at: dict[str, Cell] = {
        "heads": 1,
        "dtype": "bf16",
        "head": 64,
        "seq": 256,
        "body": "eager",
        "pass": "forward",
    }
    return value("attention", "median_s", 1e6, **at), value("attention", "host_s", 1e6, **at)


def forward_softmax() -> Figures:
    return extremes(
        [100 * share for _, share in some_rows("kernels", "softmax_share", **{"pass": "forward"})]
    )


def share(model: str, precision: str, name: str, **point: Cell) -> float:
    return value("kernels", name, 100.0, model=model, precision=precision, context=512, **point)


def attention_core() -> Figures:
    names = ("scores", "scale_and_mask", "softmax", "values")
    cores = [
        sum(share(model, "amp-bf16", f"{name}_share", profiled="whole step") for name in names)
        for model in ("small", "medium", "large", "xl", "2.7b")
    ]
    return (max(cores),)


def workers() -> Figures:
    return tuple(
        value("dataloader", "waiting_share", 100.0, data="loaded", workers=2, prefetch=2, pinned=pinned)
        for pinned in (False, True)
    )


def flash(*cells: tuple[int, int, str], which: str = "both") -> Callable[[], Figures]:
    """TFLOP/s of (head size, tokens, body)."""
    points = [
        {"dtype": "bf16", "heads": 16, "head": head, "seq": seq, "body": body, "pass": which}
        for head, seq, body in cells
    ]
    return values("flash", "tflops_per_s", *points)


def one_head() -> Figures:
    at: dict[str, Cell] = {"heads": 1, "dtype": "fp32", "head": 128, "seq": 65536, "pass": "both"}
    return (value("flash", "median_s", **at, body="ours") / value("flash", "median_s", **at, body="pytorch"),)


def kernel(*cells: tuple[str, str, str, str], scale: float = 1.0) -> Callable[[], Figures]:
    """Numbers of (case, way, part, name)."""
    return lambda: tuple(kernels.timed(case, way, part)[name] * scale for case, way, part, name in cells)


def products_share() -> Figures:
    ms = kernels.timed("products", "cuBLAS, 4 chunks", "forward")["ms"]
    return ms, 100 * ms / kernels.timed("loss", "ours fused", "both")["ms"]


def loss_errors() -> Figures:
    ratios = {
        one["way"]: one["of_eager"]
        for one in kernels.rows()
        if one["case"] == "loss" and one["part"] == "errors"
    }
    assert max(ratios, key=lambda way: ratios[way]) == "ours fused, 32 chunks"
    return ratios["ours fused, 32 chunks"], ratios["ours fused"]


CLAIMS: list[tuple[str, str, Callable[[], Figures]]] = [
    (
        BENCH,
        r"mixed precision takes # ms instead of # ms",
        lambda: step_ms("medium", "amp-bf16", "model", "false"),
    ),
    (
        BENCH,
        r"for the 2\.7B model the gain is # ms against # ms",
        lambda: step_ms("2.7b", "amp-bf16", "model", "false"),
    ),
    (BENCH, r"measured one in all # runs that fit", exact_peaks),
    (
        BENCH,
        r"product alone reaches # % of the data sheet",
        values("gpu", "of_data_sheet", {"dtype": "bf16", "size": 8192}, scale=100.0),
    ),
    (
        BENCH,
        r"layers without a pause # %",
        lambda: (value("gpu", "of_data_sheet", 100.0, sustained="bf16", product="all", inputs=14336),),
    ),
    (BENCH, r"`bf16` is # times as fast for the small model and # times for", speedups),
    (BENCH, r"far too long: # times for the small model", without_warm_up),
    (
        BENCH,
        r"works only # % of the small model's step",
        lambda: (share("small", "amp-bf16", "busy_share", **{"pass": "whole step"}),),
    ),
    (BENCH, r"takes up to # % of the busy time", attention_core),
    (
        BENCH,
        r"AdamW takes # % of the 2\.7B model's step in mixed precision and # % in fp32",
        lambda: tuple(
            share("2.7b", mode, "optimizer_share", profiled="whole step") for mode in ("amp-bf16", "fp32")
        ),
    ),
    (
        BENCH,
        r"products take # to # times as long as softmax .* # to # times its FLOPs; in mixed precision # to #",
        softmax_ratios,
    ),
    (
        BENCH,
        r"fp32 it is # GiB, later steps take # GiB",
        lambda: (peak(512, "fp32", "first_peak_bytes"), peak(512, "fp32")),
    ),
    (BENCH, r"which adds # GiB at context 512", lambda: (peak(512, "amp-bf16") - peak(512, "fp32"),)),
    (
        BENCH,
        r"which removes # GiB at context 2,048",
        lambda: (peak(2048, "fp32", attention="sdpa") - peak(2048, "amp-bf16", attention="sdpa"),),
    ),
    (
        BENCH,
        r"Of # phase peaks .* predicted, # agree to the byte; one forward is off by # bytes",
        phase_errors,
    ),
    (BENCH, r"sustained rate: # to # TFLOP/s in bf16", partial(sustained, "bf16")),
    (BENCH, r"in bf16 and # to # in fp8", partial(sustained, "fp8")),
    (BENCH, r"fp8 products are # times as fast", fp8_gains),
    (BENCH, r"Eager PyTorch reaches # % of a copy's", lambda: of_copy("eager")),
    (
        BENCH,
        r"the compiler reaches # %, hand-written Triton # % and CUDA C\+\+ # %",
        lambda: of_copy("compiled", "Triton", "CUDA C++"),
    ),
    (BENCH, r"\(pinned memory, # times\)", gain("copy to the GPU, pinned, then products")),
    (BENCH, r"few blocks \(# times\)", gain("softmaxes of few rows")),
    (BENCH, r"fills the GPU \(# times\)", gain("two products that each fill the GPU")),
    (BENCH, r"launches are the limit \(# times\)", gain("additions of few numbers")),
    (BENCH, r"removes the latter \(# times\)", gain("additions of few numbers, in a CUDA graph")),
    (BENCH, r"does not overlap \(# times\)", gain("copy to the GPU, pageable, then products")),
    (BENCH, r"remains is the copy: # % with pageable memory, # % with pinned", workers),
    (BENCH, r"On CUDA # of # operations", lambda: (len(fp32_outputs("cuda")), len(OPERATIONS))),
    (BENCH, r"On a CPU only # do", lambda: (len(fp32_outputs("cpu")),)),
    (BENCH, r"a thousand times gives # in fp32, # in fp16 and # where", totals),
    (BENCH, r"fp32 forward reads # us here; it takes # ms", unsynchronised),
    (BENCH, r"the device needs # us for a bf16 forward of 256 tokens .* the host # us", small_forward),
    (BENCH, r"measured # to # %, by size", forward_softmax),
    (KERNELS, r"on: # against cuDNN's # TFLOP/s at 32,768", flash((64, 32768, "ours"), (64, 32768, "cudnn"))),
    (KERNELS, r"leads at 4,096 \(# against #\)", flash((128, 4096, "ours"), (128, 4096, "cudnn"))),
    (KERNELS, r"and 8,192 tokens \(# against #\)", flash((128, 8192, "ours"), (128, 8192, "cudnn"))),
    (
        KERNELS,
        r"heads of 128 at 1,024 tokens \(# against #\)",
        flash((128, 1024, "cudnn"), (128, 1024, "ours")),
    ),
    (KERNELS, r"and at 32,768 \(# against #\)", flash((128, 32768, "cudnn"), (128, 32768, "ours"))),
    (KERNELS, r"of 64 at 1,024 \(# against #\)", flash((64, 1024, "cudnn"), (64, 1024, "ours"))),
    (
        KERNELS,
        r"at 16,384 tokens: # against # TFLOP/s",
        flash((128, 16384, "cudnn"), (128, 16384, "ours"), which="backward"),
    ),
    (
        KERNELS,
        r"comes from the forward, # against #\.",
        flash((128, 16384, "ours"), (128, 16384, "cudnn"), which="forward"),
    ),
    (
        KERNELS,
        r"Hopper's features: # TFLOP/s where trainfit has #\.",
        flash((128, 8192, "flash"), (128, 8192, "ours")),
    ),
    (KERNELS, r"with heads of 128 by a factor of #:", one_head),
    (
        KERNELS,
        r"as the compiled loss \(# against # ms\)",
        kernel(("loss", "ours fused", "both", "ms"), ("loss", "compiled", "both", "ms")),
    ),
    (
        KERNELS,
        r"of its memory: # against # GB",
        kernel(
            ("loss", "ours fused", "both", "extra_bytes"),
            ("loss", "compiled", "both", "extra_bytes"),
            scale=1e-9,
        ),
    ),
    (KERNELS, r"cuBLAS needs # ms for the three products alone in as many chunks, so # %", products_share),
    (
        KERNELS,
        r"save more memory \(# GB\)",
        kernel(("loss", "ours fused, 32 chunks", "both", "extra_bytes"), scale=1e-9),
    ),
    (KERNELS, r"half again as much time, # ms", kernel(("loss", "ours fused, 32 chunks", "both", "ms"))),
    (
        KERNELS,
        r"SwiGLU takes # ms against # ms",
        kernel(("gates", "ours", "both", "ms"), ("gates", "compiled", "both", "ms")),
    ),
    (
        KERNELS,
        r"rotary embedding # against # ms",
        kernel(("rotation", "ours", "both", "ms"), ("rotation", "compiled", "both", "ms")),
    ),
    (
        KERNELS,
        r"forward is equal \(# against # ms\)",
        kernel(("gates", "ours", "forward", "ms"), ("gates", "compiled", "forward", "ms")),
    ),
    (
        KERNELS,
        r"AdamW takes # ms, torch's fused AdamW # ms",
        kernel(
            ("update", "ours, to nearest", "forward", "ms"),
            ("update", "torch fused, to nearest", "forward", "ms"),
        ),
    ),
    (KERNELS, r"The largest, #, is the loss in 32 chunks, .* default `fused` loss has #\.", loss_errors),
]


@pytest.mark.parametrize(("page", "pattern", "found"), CLAIMS, ids=[pattern for _, pattern, _ in CLAIMS])
def test_a_figure_is_that_of_the_records(page: str, pattern: str, found: Callable[[], Figures]) -> None:
    claimed = figures(page, pattern.replace(" ", r"\s+"))
    for text, exact in zip(claimed, found(), strict=True):
        digits = len(text.partition(".")[2])
        assert f"{exact:,.{digits}f}" == text, (pattern, exact)


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
    for seq in (2048, 16384):  # Within 1 %.
        ours, cudnn = flash((128, seq, "ours"), (128, seq, "cudnn"))()
        assert abs(ours / cudnn - 1) < 0.01
    for seq in (2048, 4096, 8192, 16384, 32768):  # Heads of 64: trainfit leads from 2,048 on.
        ours, cudnn = flash((64, seq, "ours"), (64, seq, "cudnn"))()
        assert ours > cudnn


def test_the_records_page_names_the_commits_that_do_not_exist() -> None:
    lines = [*bench.FILE.read_text().splitlines(), *kernels.FILE.read_text().splitlines()]
    named = {json.loads(line)["commit"] for line in lines}
    text = sentences(BENCH)
    assert all(commit in text for commit in named)
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    missing = {
        commit
        for commit in named
        if subprocess.run(
            ["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True
        ).returncode
    }
    absent = re.search(r"exist in this repository\. (.*?) do not:", text)
    assert absent is not None
    assert set(re.findall(r"[0-9a-f]{7}", absent[1])) == missing
