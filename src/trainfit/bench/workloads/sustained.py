"""Sustained rates of a linear layer's three products, back to back for seconds on random data.

Single products with rests run at clocks that the power limit does not allow for long. Here the device works
without a pause and the limit sets the clocks, recorded as ``sm_mhz`` and ``watts``. A sample is the mean of
as many layers as take ``SAMPLE_S``; samples that begin within the first ``lead_s`` are not counted.

``bf16``: the products of ``nn.Linear``. ``fp8``: those of torchao's tensorwise float8 training with operands
cast beforehand (e4m3 with fast accumulation forward, e5m2 gradients without it backward). ``fp8-casts``:
torchao's layer, compiled, with casts in its time.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from trainfit.bench.harness.bench import Bench, Part, of_work
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.stopwatch import Stopwatch
from trainfit.bench.harness.timing import TOTAL, Lap, Rule, Timing, lap_seconds, steadied
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.hardware import PeakDtype
from trainfit.spec.optional import optional

Kind = Literal["bf16", "fp8", "fp8-casts"]
KINDS: dict[str, tuple[Kind, ...]] = {"cpu": ("bf16", "fp8"), "cuda": ("bf16", "fp8", "fp8-casts")}
SHAPES = {"tiny": ((64, 32, 48),), "full": ((16384, 4096, 14336), (16384, 14336, 4096), (16384, 4096, 4096))}
"""Tokens, inputs and outputs: the linear layers of Llama 3.1 8B with most of its FLOPs."""
PRODUCTS = ("forward", "input's gradient", "weight's gradient")
BOTH_GRADIENTS = "both gradients"  # Lap of a compiled layer's backward
EXPECTED_REASON = "software power cap"
"""The expected reason for lower clocks; any other is a fault of the machine."""
AHEAD = 2  # Samples issued before the first of them has ended, so that the device never waits for the host
SAMPLE_S = 0.02
RULES = {
    "tiny": Rule(min_samples=6, max_samples=40, spread=0.5),
    "full": Rule(min_samples=20, max_samples=10_000, spread=0.02),
}


@dataclass(frozen=True)
class Span:
    """Seconds for which the device works without a pause; the first ``lead_s`` are not counted."""

    lead_s: float
    counted_s: float


SPANS = {"tiny": Span(0.02, 0.15), "full": Span(0.5, 2.0)}


def rows(bench: Bench) -> Iterator[BenchRow]:
    """Yield each kind and shape; kinds of a shape follow each other and see the same temperature."""
    for shape in SHAPES[bench.form]:
        for kind in KINDS[bench.device.type]:
            yield from _rows(bench, kind, *shape)


def _rows(bench: Bench, kind: Kind, tokens: int, inputs: int, outputs: int) -> Iterator[BenchRow]:
    laps = {"forward": 1, BOTH_GRADIENTS: 2} if kind == "fp8-casts" else dict.fromkeys(PRODUCTS, 1)
    dtype: PeakDtype = "bf16" if kind == "bf16" else "fp8"
    peak = bench.gpu.peak_flops_per_s.get(dtype) if bench.gpu else None

    def part(name: str, lap: str, products: int) -> Part:
        flops = 2.0 * products * tokens * inputs * outputs
        shape: dict[str, Cell] = {"tokens": tokens, "inputs": inputs, "outputs": outputs}
        point: dict[str, Cell] = {"sustained": kind, **shape, "product": name}
        return Part(point, lap, Work(flops, dtype), of_work(flops, peak=peak))

    parts = [part(name, name, products) for name, products in laps.items()] + [part("all", TOTAL, 3)]

    def sample() -> tuple[Timing, dict[str, Cell]]:
        run = layer(kind, tokens, inputs, outputs, bench.device)
        return back_to_back(run, bench.stopwatch, SPANS[bench.form], RULES[bench.form])

    points = [part.point for part in parts]
    if bench.wanted(points):
        yield from bench.attempt(points, sample, lambda found: [bench.row(one, *found) for one in parts])


# -- back to back --


class _Issued(NamedTuple):
    """A sample issued to the device: when, and its marks."""

    at: float
    marks: list[tuple[str, Any]]


def back_to_back(
    run: Callable[[Lap], object],
    stopwatch: Stopwatch,
    span: Span,
    rule: Rule,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Timing, dict[str, Cell]]:
    """Return seconds of a layer's parts without pauses, and medians of the device's clocks and power.

    The Timing has no samples where anything but the power limit held the clocks down.
    """
    layers = _layers_per_sample(run, stopwatch)
    timing, states, pending = Timing(), dict[str, list[float]](), deque[_Issued]()
    held: set[str] = set()
    begun = clock()
    while True:
        now = clock()
        is_over = now - begun >= span.lead_s + span.counted_s and len(timing.runs) >= rule.min_samples
        # Where the first samples were slow, a sample has few layers, and the span many samples.
        is_over = is_over or len(timing.runs) >= rule.max_samples
        if not is_over:
            pending.append(_Issued(now, _issue(run, stopwatch, layers)))
        while pending and (is_over or len(pending) > AHEAD):
            sample = pending.popleft()
            held.update(stopwatch.held_until(sample.marks[-1][1]))
            if sample.at - begun < span.lead_s:
                continue
            for name, value in stopwatch.state().items():
                states.setdefault(name, []).append(value)
            seconds = lap_seconds(sample.marks, stopwatch.between)
            timing.keep(len(timing.runs), {name: all_s / layers for name, all_s in seconds.items()}, {})
        if is_over:
            break
    stopwatch.wait()
    wrong = sorted(held - {EXPECTED_REASON})
    if wrong:
        why = f"the clocks were held down ({', '.join(wrong)})"
        return Timing("throttled", why, reasons=tuple(wrong)), {}
    seen: dict[str, Cell] = {name: statistics.median(values) for name, values in states.items()}
    if held:
        seen["held_by"] = ", ".join(sorted(held))
    return steadied(timing, rule), seen


def _layers_per_sample(run: Callable[[Lap], object], stopwatch: Stopwatch) -> int:
    """Return the number of layers that take ``SAMPLE_S``; the first run may compile, the second is timed."""
    _issue(run, stopwatch, 1)
    stopwatch.wait()
    marks = _issue(run, stopwatch, 1)
    stopwatch.wait()
    return max(1, round(SAMPLE_S / max(stopwatch.between(marks[0][1], marks[-1][1]), 1e-6)))


def _issue(run: Callable[[Lap], object], stopwatch: Stopwatch, layers: int) -> list[tuple[str, Any]]:
    marks: list[tuple[str, Any]] = []
    for _ in range(layers):
        run(lambda name: marks.append((name, stopwatch.mark())))
    marks.append((TOTAL, stopwatch.mark()))
    return marks


# -- what runs --


def layer(
    kind: Kind, tokens: int, inputs: int, outputs: int, device: torch.device
) -> Callable[[Lap], object]:
    """Return a run of a linear layer's forward and backward, with a lap for each part."""
    generator = torch.Generator(device).manual_seed(tokens + inputs + outputs)

    def normal(rows: int, columns: int, deviation: float) -> Tensor:
        return torch.randn(rows, columns, device=device, generator=generator).mul_(deviation).bfloat16()

    x, w, g = normal(tokens, inputs, 1.0), normal(outputs, inputs, 0.02), normal(tokens, outputs, 1e-4)
    if kind == "fp8-casts":
        return _compiled_layer(x, w, g)
    return _in_turn(_fp8_products(x, w, g) if kind == "fp8" else _bf16_products(x, w, g))


def _in_turn(products: tuple[Callable[[], Tensor], ...]) -> Callable[[Lap], object]:
    def run(lap: Lap) -> None:
        for name, product in zip(PRODUCTS, products, strict=True):
            lap(name)
            product()

    return run


def _bf16_products(x: Tensor, w: Tensor, g: Tensor) -> tuple[Callable[[], Tensor], ...]:
    return lambda: x @ w.t(), lambda: g @ w, lambda: g.t() @ x


def _fp8_products(x: Tensor, w: Tensor, g: Tensor) -> tuple[Callable[[], Tensor], ...]:
    """Return products as torchao calls them: the first operand is row-major, the second column-major."""
    (x8, x_scale), (w8, w_scale) = (rounded(one, torch.float8_e4m3fn) for one in (x, w))
    g8, g_scale = rounded(g, torch.float8_e5m2)
    g8_rows, w8_columns, x8_columns = g8.t().contiguous(), _column_major(w8), _column_major(x8)

    def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast: bool) -> Callable[[], Tensor]:
        return lambda: torch._scaled_mm(
            a, b, a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
        )  # fmt: skip

    return (
        product(x8, w8.t(), x_scale, w_scale, True),
        product(g8, w8_columns, g_scale, w_scale, False),
        product(g8_rows, x8_columns, g_scale, x_scale, False),
    )


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``x`` scaled to the range of an fp8 format, and the fp32 factor that restores it."""
    scale = torch.finfo(dtype).max / x.abs().max().float()
    return (x.float() * scale).to(dtype), scale.reciprocal()


def _column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _compiled_layer(x: Tensor, w: Tensor, g: Tensor) -> Callable[[Lap], object]:
    """Return a run of torchao's tensorwise float8 layer, compiled."""
    float8: Any = optional("torchao.float8", "torchao", field="sustained", value="fp8-casts")
    linear = nn.Sequential(nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta"))
    linear.load_state_dict({"0.weight": w}, assign=True)
    config = float8.Float8LinearConfig(emulate=x.device.type == "cpu")
    converted = float8.convert_to_float8_training(linear.requires_grad_(), config=config)
    torch._dynamo.reset()
    compiled = torch.compile(converted, dynamic=False)
    wanted = (x.requires_grad_(), *converted.parameters())

    def run(lap: Lap) -> object:
        lap("forward")
        y = compiled(x)
        lap(BOTH_GRADIENTS)
        return torch.autograd.grad(y, wanted, g)

    return run
