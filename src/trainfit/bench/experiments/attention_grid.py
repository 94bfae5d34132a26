"""``attention_grid``: causal attention of grouped heads by head size and length, all kernels side by side.

bf16, 32,768 tokens in all, heads of 2,048 columns together, four query heads for each key head. The kernels
of a shape take turns: a sample is one forward and backward of each, and the next begins with another kernel,
so that a clock which falls falls for all.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainfit.bench.harness.bench import Bench, Failure, Part, Point, failure_of, failures, of_work, value
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.timing import Lap, Rule, Timing
from trainfit.bench.workloads import attention
from trainfit.bench.workloads.attention import BODY_NOTE, LAP, PASSES, PRODUCTS, Case
from trainfit.spec.bench import BenchRow, Cell

TOKENS = {"tiny": 128, "full": 32768}
WIDTH = {"tiny": 64, "full": 2048}  # Columns of all query heads of a token
GROUP = 4  # Query heads for each key head
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "tiny": ((16, 64), (16, 50)),
    "full": tuple((d, n) for n in (1024, 2048, 8192, 16384) for d in (128, 64, 256, 512)),
}
"""Head size and length; short ones first, which take least time."""
OURS = "ours"
BODIES = {"tiny": (OURS, "pytorch"), "full": (OURS, "cudnn", "flash")}
WIDE, WIDE_BODIES = 256, (OURS, "efficient")
"""cuDNN and flash end at this head size; above it PyTorch has its efficient kernel."""
BEHIND = 0.9  # Ours counts as behind below this share of the fastest other kernel's rate
RULE = Rule(warmup=2, min_samples=10, max_samples=12, spread=0.03, cap_s=8.0, hide=True, rest_s=0.02)


@dataclass
class Turns:
    """Forward and backward of several kernels of one shape; each call runs all, each time another first.

    Attributes:
        failed: why a kernel is left out.
    """

    runs: dict[str, Callable[[Lap], object]]
    failed: dict[str, Failure] = field(default_factory=dict)
    count: int = 0

    def __call__(self, lap: Lap) -> None:
        names = list(self.runs)
        first = self.count % len(names)
        for name in names[first:] + names[:first]:
            self.runs[name](lambda which, name=name: lap(_lap(name, which)))
        self.count += 1


def _lap(name: str, which: str) -> str:
    return f"{name} {which}"


def cases(form: str) -> Iterator[list[Case]]:
    """Yield the cases of each shape, one a kernel."""
    for d, n in SHAPES[form]:
        heads = WIDTH[form] // d
        batch = max(1, TOKENS[form] // n)
        bodies = WIDE_BODIES if d > WIDE else BODIES[form]
        yield [
            Case(name, "bf16", batch, heads, n, d, is_causal=True, kv_heads=heads // GROUP) for name in bodies
        ]


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield the rows of every shape, then those that compare, then the summary of each pass."""
    rates: dict[tuple[int, int, str], dict[str, float]] = {}
    for shape in cases(bench.form):
        for row in side_by_side(bench, shape):
            at, rate = row.point, row.numbers.get("tflops_per_s")
            if isinstance(rate, float):
                key = (int(at["head"]), int(at["seq"]), str(at["pass"]))
                rates.setdefault(key, {})[str(at["body"])] = rate
            yield row
    compared = {key: found for key, found in rates.items() if OURS in found and len(found) > 1}
    for (head, seq, which), found in compared.items():
        fastest = max(rate for name, rate in found.items() if name != OURS)
        numbers: dict[str, Cell] = {**found, "of_fastest": found[OURS] / fastest}
        yield value({"head": head, "seq": seq, "which": which}, **numbers)
    for which in PASSES:
        ratios = [_of_fastest(found) for (_, _, one), found in compared.items() if one == which]
        if ratios:
            yield value({"summary": which}, **summary(ratios))


def _of_fastest(found: dict[str, float]) -> float:
    return found[OURS] / max(rate for name, rate in found.items() if name != OURS)


def summary(ratios: Sequence[float]) -> dict[str, Cell]:
    """Return the geometric mean of ratios of rates, the least, and how many are behind."""
    return {
        "geometric_mean": math.exp(math.fsum(map(math.log, ratios)) / len(ratios)),
        "least": min(ratios),
        "points": len(ratios),
        "behind": sum(ratio < BEHIND for ratio in ratios),
    }


def side_by_side(bench: Bench, shape: Sequence[Case]) -> Iterator[BenchRow]:
    """Yield forward, backward and both of every kernel of a shape, from one series of samples."""
    parts = {case.body: [_part(case, which) for which in PASSES] for case in shape}
    points = [part.point for each in parts.values() for part in each]
    made: list[Turns] = []

    def build() -> Turns:
        made.append(turns(bench, shape))
        return made[0]

    def rows(timing: Timing) -> Iterator[BenchRow]:
        for name, each in parts.items():
            if name in made[0].failed:
                yield from failures([part.point for part in each], *made[0].failed[name])
                continue
            _add_both(timing, name)
            for part in each:
                yield bench.row(part, timing, {})

    compared: list[Point] = [{"head": shape[0].head, "seq": shape[0].seq, "which": which} for which in PASSES]
    summaries: list[Point] = [{"summary": which} for which in PASSES]
    rule = replace(bench.rule, flush=False) if bench.tiny else rule_of(shape)
    yield from bench.series(points, build, rule, rows, needed_by=(*compared, *summaries))


def rule_of(shape: Sequence[Case]) -> Rule:
    """Return the sampling rule of a shape in full form: it rests twice as long as its kernels likely work."""
    likely_s = sum(attention.flops(case, PRODUCTS["both"]) for case in shape) / attention.LIKELY_PER_S["bf16"]
    return replace(RULE, rest_s=max(RULE.rest_s, 2 * likely_s))


def turns(bench: Bench, shape: Sequence[Case]) -> Turns:
    """Return a run of the kernels of a shape that this device has; each runs once, which compiles it.

    Raises:
        Exception: what the last kernel raised, where none runs.
    """
    tensors = attention.tensors(shape[0], bench.device)
    made, last = Turns({}), None
    for case in shape:
        try:
            attention.check(case, bench.device)
            one = attention.forward_and_backward(attention.body(case.body), *tensors, case.is_causal)
            one(lambda name: None)
            bench.stopwatch.wait()
        except Exception as error:  # Any error is this kernel's result.
            made.failed[case.body], last = failure_of(error), error
        else:
            made.runs[case.body] = one
    if last is not None and not made.runs:
        raise last
    return made


def _part(case: Case, which: str) -> Part:
    rates = of_work(attention.flops(case, PRODUCTS[which]))
    work = attention.work_of(case, which)
    lap = _lap(case.body, which)
    return Part({**case.point, "pass": which}, lap, replace(work, cold_read_bytes=0.0), rates)


def _add_both(timing: Timing, name: str) -> None:
    """Add a kernel's forward and backward of each sample, together."""
    for laps in (timing.laps, timing.host):
        parts = [laps.get(_lap(name, LAP[which]), []) for which in ("forward", "backward")]
        if all(parts):
            laps[_lap(name, "both")] = [sum(pair) for pair in zip(*parts, strict=True)]


NAMES: dict[Any, str] = {
    "cudnn": "cuDNN",
    "flash": "PyTorch's flash",
    OURS: "trainfit",
    "efficient": "efficient",
}
EXPERIMENT = Experiment(
    title="Attention by head size and length, side by side",
    question="Which kernel of causal attention is the fastest at each head size and length?",
    run=run,
    limit_s=150,
    columns=(
        Column("body", note=BODY_NOTE),
        Column("tflops_per_s", "TFLOP/s"),
        Column("which", "pass"),
        *(Column(name, format=".3g") for name in (OURS, "cudnn", "flash", "efficient", "pytorch")),
        Column("of_fastest", "of fastest", format=".2f", note="rate of ours over the fastest other kernel's"),
        Column("geometric_mean", "geometric mean", format=".3f"),
        Column("least", format=".2f"),
        Column("points"),
        Column("behind", note=f"points where ours has less than {BEHIND} of the fastest other's rate"),
    ),
    plots=(
        Plot(
            x=("seq",), y="tflops_per_s", series="body", panels=("head", "pass"), x_log=True,
            where={"pass": ("forward", "backward")},
            order={"head": (64, 128, 256, 512), "pass": ("forward", "backward"), "seq": ()},
            names=NAMES, title="Causal attention, four query heads for each key head, bf16",
            x_label="tokens in a sequence (1K is 1,024)", y_label="TFLOP/s",
        ),
    ),
)  # fmt: skip
