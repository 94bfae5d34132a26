"""Tables of evidence/pages/kernels.md from records/kernels/attention-grid-GPU.jsonl, and whole steps."""

import json
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from evidence.scripts.tables.bench import BODIES, having
from trainfit.bench.harness.discovery import experiment
from trainfit.explanation.trace.kernels import kind_of_kernel
from trainfit.records import load
from trainfit.report.bench_plot import number, plot_of
from trainfit.report.table import markdown_grid
from trainfit.spec.bench import BenchResult, BenchRow

RECORDS = Path(__file__).parents[2] / "records"
STEPS = (RECORDS / "step-kernels/step-kernels.jsonl", RECORDS / "step-kernels/step-kernels-faster.jsonl")
OURS, OTHERS = "ours", ("cudnn", "flash", "efficient")
PASSES = ("forward", "backward")


@cache
def result(name: str = "attention_grid", gpu: str = "h200") -> BenchResult:
    """Return the result of an experiment: ``attention_grid``, or on the H200 ``flash`` in fp32."""
    records = load(RECORDS / f"kernels/attention-grid-{gpu}.jsonl")
    (found,) = [one.bench for one in records if one.bench is not None and one.bench.experiment == name]
    return found


def shapes() -> list[tuple[int, int]]:
    """Return the head sizes and lengths, in order."""
    return sorted({(int(row.point["head"]), int(row.point["seq"])) for row in result().rows if row.times})


def rates(head: int, seq: int, which: str, gpu: str = "h200") -> dict[str, float]:
    """Return the TFLOP/s of a pass by kernel."""
    rows = having(result(gpu=gpu).rows, {"head": head, "seq": seq, "pass": which})
    return {str(row.point["body"]): float(row.numbers["tflops_per_s"]) for row in rows if row.times}


def ratio(head: int, seq: int, which: str, gpu: str = "h200") -> float:
    """Return trainfit's rate over the fastest other kernel's."""
    found = rates(head, seq, which, gpu)
    return found[OURS] / max(found[name] for name in OTHERS if name in found)


def mean_ratio(which: str, most: int = 512, gpu: str = "h200") -> float:
    """Return the geometric mean of the ratios of heads of up to ``most``."""
    logs = [math.log(ratio(head, seq, which, gpu)) for head, seq in shapes() if head <= most]
    return math.exp(math.fsum(logs) / len(logs))


def rates_table() -> str:
    """TFLOP/s on an H200 of trainfit's kernels and the fastest of PyTorch's, forward and backward apart."""
    return _rates_table("h200")


def h100_rates_table() -> str:
    """The same on an H100."""
    return _rates_table("h100")


def _rates_table(gpu: str) -> str:
    lines = []
    for head, seq in shapes():
        cells, names = list[str](), dict[str, None]()
        for which in PASSES:
            found = rates(head, seq, which, gpu)
            fastest = max((name for name in OTHERS if name in found), key=lambda name: found[name])
            names[BODIES.get(fastest, f"`{fastest}`")] = None
            cells += [f"{found[name]:.0f}{_mark(head, seq, gpu)}" for name in (OURS, fastest)]
            cells.append(f"{ratio(head, seq, which, gpu):.2f}")
        lines.append((str(head), f"{seq:,}", ", ".join(names), *cells))
    means = [f"{mean_ratio(which, gpu=gpu):.2f}" for which in PASSES]
    lines.append(("geometric mean", "", "", "", "", means[0], "", "", means[1]))
    heads = (
        "head size", "tokens", "fastest other",
        "forward", "other", "ratio", "backward", "other", "ratio",
    )  # fmt: skip
    return markdown_grid(heads, lines, 3)


def _mark(head: int, seq: int, gpu: str) -> str:
    rows = having(result(gpu=gpu).rows, {"head": head, "seq": seq})
    return "*" if any(row.status == "unsteady" for row in rows) else ""


def plot() -> str:
    """Plot of the rates by length, a panel for each head size and pass."""
    drawn = plot_of(result(), experiment("attention_grid").plots)
    assert drawn is not None
    return drawn.decode()


def fp32_ms(head: int) -> tuple[float, float]:
    """Return milliseconds of forward and backward in fp32 at 2,048 tokens: trainfit's, `efficient`'s."""
    at = {"dtype": "fp32", "head": head, "seq": 2048, "pass": "both"}
    rows = result("flash").rows
    return _ms(having(rows, {**at, "body": OURS})), _ms(having(rows, {**at, "body": "pytorch"}))


def _ms(rows: Iterable[BenchRow]) -> float:
    (row,) = rows
    seconds = number(row, "median_s")
    assert seconds is not None
    return 1e3 * seconds


# -- attention in whole steps, on an H100


def step_ms(name: str) -> float:
    """Return milliseconds of attention in a step, of its recorded kernels: the longest."""
    (step,) = [step for step in _steps() if step["name"] == name]
    kernels = step["kernels"]
    return 1e3 * sum(one["seconds"] for one in kernels if kind_of_kernel(one["name"]) == "attention")


@cache
def _steps() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for file in STEPS for line in file.read_text("utf-8").splitlines())
