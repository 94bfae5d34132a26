"""``layer_norm``: error and range of each part of a layer norm in fp16, bf16 and fp32, against fp64.

Every part is computed exactly from its operands and rounded once to the dtype, as hardware rounds a single
operation; sums have a wide accumulator, as CUDA's reductions have. So an error here is what storing a part in
that dtype costs. The order of additions is the subject of ``accumulation``.

For inputs of standard deviation s, the square of the difference is near s^2. fp16 ends at 65,504, so squares
overflow from s = 60 on (some elements are four deviations away), and their sum over 1,024 features from s = 8
on. An infinite mean of squares has a reciprocal root of 0, so the output is 0, not NaN.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from trainfit.bench.harness.bench import Bench, Point
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.spec.bench import BenchRow, Cell

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHAPE = {"tiny": (8, 1024), "full": (64, 1024)}
EPS = 1e-5
POWERS = {"tiny": (-8, 0, 4, 8), "full": tuple(range(-12, 13, 2))}
"""Standard deviations of the inputs: these powers of two."""
OFFSETS = (0, 16)  # Means of the inputs, in standard deviations
SEARCHED = range(-16, 14)  # Powers of two that are tried as a part's range
TOLERANCE = 0.01  # Largest error within a part's range
KERNEL = "kernel"

PARTS: dict[str, Callable[[Mapping[str, Tensor]], Tensor]] = {
    "mean": lambda v: v["x"].mean(-1, keepdim=True),
    "difference": lambda v: v["x"] - v["mean"],
    "square": lambda v: v["difference"].square(),
    "sum of squares": lambda v: v["square"].sum(-1, keepdim=True),
    "mean of squares": lambda v: v["square"].mean(-1, keepdim=True),
    "reciprocal root": lambda v: (v["mean of squares"] + EPS).rsqrt(),
    "product": lambda v: v["difference"] * v["reciprocal root"],
}
"""Each part from the earlier ones, all fp64 [rows, features] or [rows, 1]. Nothing uses the sum."""


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield each part's error and range alone, then the errors of the whole chain over scales and offsets."""
    shape = SHAPE[bench.form]
    for name in DTYPES:
        for part in PARTS:
            point: Point = {"part": part, "dtype": name}
            yield from bench.find(point, lambda part=part, name=name: ranges(DTYPES[name], shape)[part])
    for name in DTYPES:
        for offset in OFFSETS:
            for power in POWERS[bench.form]:
                point = {"dtype": name, "offset": offset, "power": power}
                inputs = (2.0**power, offset, DTYPES[name])
                yield from bench.find(point, lambda inputs=inputs: chained(*inputs, shape))


def inputs_of(scale: float, offset: float, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    """Return normal inputs, fp64, that ``dtype`` holds exactly; equal draws for every scale and dtype."""
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return rounded(scale * (normal + offset), dtype)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest to ``dtype``; values beyond its range become infinite."""
    return values.to(dtype).double()


def parts_of(x: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return ``x`` and every part, each rounded to ``dtype``; None: in fp64 throughout."""
    values = {"x": x}
    for name, part in PARTS.items():
        found = part(values)
        values[name] = found if dtype is None else rounded(found, dtype)
    return values


def relative_error(found: Tensor, exact: Tensor, size: Tensor) -> float:
    """Return the root mean square of the error over that of ``size``."""
    return ((found - exact).square().mean().sqrt() / size.square().mean().sqrt()).item()


@cache
def ranges(dtype: torch.dtype, shape: tuple[int, int]) -> dict[str, dict[str, Cell]]:
    """Return each part's error at scale 1, and the scales of inputs for which it stays within TOLERANCE.

    A part's operands are exact, so the error is that part's alone.
    """
    errors: dict[str, dict[float, float]] = {part: {} for part in PARTS}
    for power in SEARCHED:
        exact = parts_of(inputs_of(2.0**power, 0, dtype, shape), None)
        for part, found in errors.items():
            size = exact["x"] if part == "mean" else exact[part]
            found[2.0**power] = relative_error(rounded(exact[part], dtype), exact[part], size)
    within = {
        part: [scale for scale, error in found.items() if error < TOLERANCE] for part, found in errors.items()
    }
    return {
        part: {"own_error": errors[part][1.0], "least_scale": min(good), "greatest_scale": max(good)}
        for part, good in within.items()
    }


def chained(scale: float, offset: float, dtype: torch.dtype, shape: tuple[int, int]) -> dict[str, Cell]:
    """Return the error of each part of a chain that is in ``dtype`` throughout, and where it breaks.

    ``kernel`` is the output's error where only input and output are in ``dtype``, as in PyTorch's kernel.
    """
    x = inputs_of(scale, offset, dtype, shape)
    if lost := _lost("inputs", x, x):
        return {"std": scale, "breaks": lost}
    found, exact = parts_of(x, dtype), parts_of(x, None)
    numbers: dict[str, Cell] = {"std": scale}
    breaks: list[str] = []
    for part in PARTS:
        breaks += [lost] if (lost := _lost(part, found[part], exact[part])) else []
        if found[part].isfinite().all():
            size = x if part == "mean" else exact[part]
            numbers[part] = relative_error(found[part], exact[part], size)
    output = rounded(F.layer_norm(x.float(), x.shape[-1:], eps=EPS).double(), dtype)
    numbers[KERNEL] = relative_error(output, exact["product"], exact["product"])
    return {**numbers, "breaks": "; ".join(dict.fromkeys((*breaks[:1], *breaks[-1:])))}


def _lost(part: str, found: Tensor, exact: Tensor) -> str:
    """Return which share of a part became infinite, or zero where it is not; empty: at most TOLERANCE."""
    infinite = (~found.isfinite()).double().mean().item()
    zero = ((found == 0) & (exact != 0)).double().mean().item()
    if infinite:
        return f"{part} {100 * infinite:.3g}% infinite"
    return f"{part} {100 * zero:.3g}% zero" if zero > TOLERANCE else ""


EXPERIMENT = Experiment(
    title="A layer norm in 16 bits",
    question="Where does a layer norm in fp16 or bf16 break, and how far is each part from fp64?",
    run=run,
    limit_s=60,
    on_host=True,
    columns=(
        Column("power", note="base-2 logarithm of std, the standard deviation of the inputs"),
        Column("std", format=".3g"),
        Column("offset", note="mean of the inputs, in standard deviations"),
        *(Column(part, format=".0e") for part in PARTS),
        Column(KERNEL, format=".0e", note="input and output in the dtype, all between in fp32"),
        Column("breaks", note="first and last part of which a share became infinite, or over 1% became zero"),
        Column("own_error", format=".1e", note="of the part alone, from exact operands, at a deviation of 1"),
        Column("least_scale", "from std", format=".1e", note=f"error below {TOLERANCE:.0%} from this"),
        Column("greatest_scale", "to std", format=".1e", note="to this deviation (2^-16 to 2^13 were tried)"),
    ),
    plots=(
        Plot(
            x=("power",), y="product", series="dtype", panels=("offset",), y_log=True,
            names={0: "mean 0", 16: "mean of 16 deviations"},
            title="Error of a layer norm whose parts are all in one dtype",
            x_label="base-2 logarithm of the inputs' deviation", y_label="relative error of the output",
        ),
    ),
)  # fmt: skip
