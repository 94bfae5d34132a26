"""Tables and figures of evidence/pages/precision.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from evidence.scripts.tables import bench
from evidence.scripts.tables.joined import SMOOTHED, join, records, smoothed, trained_runs
from trainfit.bench.experiments.layer_norm import DTYPES, KERNEL, PARTS
from trainfit.bench.experiments.rounding import RATES
from trainfit.bench.workloads.autocast_list import OPERATIONS, Published
from trainfit.report.plot import Panel, Series, draw
from trainfit.report.table import NOTHING, markdown_grid
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.result import Estimate, Measurement, Record
from trainfit.spec.units import GIB

NAMES = {
    "fp32": "`fp32`", "amp-bf16": "`amp-bf16`", "amp-fp16": "`amp-fp16`", "bf16-master": "`bf16-master`",
    "fp16-master": "`fp16-master`", "bf16": "`bf16`", "bf16-rounded": "`bf16`, stochastic rounding",
    "fp16-pure": "`fp16-pure`", "fp8": "`fp8`",
}  # fmt: skip
"""Variant of the sweeps -> its name in the tables."""
BASES = {
    "lora": "`bf16`", "lora fp16": "`fp16-pure`", "lora fp8": "`quantize: fp8`",
    "lora int8": "`quantize: int8`", "lora nf4": "`quantize: nf4`",
}  # fmt: skip
GROUPS = {
    "": "AdamW, 1e-3", " seed 1": "AdamW, 1e-3, seed 1", " slow": "AdamW, 1e-4", " sgd": "SGD, 0.02",
}  # fmt: skip
"""Ending of a variant -> the column of its group; the other runs of a group differ in their precision."""
TRAINED = ("precision/records.jsonl", "precision-rates/records.jsonl", "precision-bases/records.jsonl")
MEMORY = "precision-memory/records.jsonl"
NOT_YET = "not yet"
TRAINED_STEPS = 1000
FARTHEST = 1.0  # From fp32's loss; runs beyond it are not drawn


@cache
def runs() -> dict[str, Record]:
    """Return the newest finished or diverged training run by variant."""
    return trained_runs(*TRAINED)


def held_out_loss(variant: str) -> float | None:
    """Return the loss of held-out text after the last step; infinite where the run diverged."""
    record = runs().get(variant)
    if record is None:
        return None
    run = record.train or {}
    if record.outcome is not None and record.outcome.status == "diverged":
        return math.inf
    return run["evaluations"][-1]["loss"]


def quality() -> str:
    """Loss of held-out text by precision and group, and how far it is from that of fp32."""
    if not runs():
        return bench.NOT_MEASURED
    lines = []
    for name, shown in NAMES.items():
        cells = [_loss(f"{name}{end}", f"fp32{end}") for end in GROUPS]
        if any(cell != NOTHING for cell in cells):
            lines.append((shown, *cells))
    return markdown_grid(["precision", *GROUPS.values()], lines)


def bases() -> str:
    """Loss of held-out text after LoRA, by the dtype of the frozen base."""
    lines = [(shown, _loss(name, "lora")) for name, shown in BASES.items() if name in runs()]
    return markdown_grid(["base", "loss"], lines) if lines else bench.NOT_MEASURED


def _loss(variant: str, control: str) -> str:
    loss, of_control = held_out_loss(variant), held_out_loss(control)
    if loss is None:
        return NOTHING
    if math.isinf(loss):
        return "diverged"
    if variant == control or of_control is None:
        return f"{loss:.4f}"
    return f"{loss:.4f} ({loss - of_control:+z.4f})"


def curves() -> str:
    """Loss of training minus that of the same run in fp32, by step."""
    panels = []
    for end, title in GROUPS.items():
        control = runs().get(f"fp32{end}")
        if control is None:
            continue
        exact = smoothed((control.train or {})["losses"])
        steps = [min(SMOOTHED * (at + 1), TRAINED_STEPS) for at in range(len(exact))]
        series = []
        for name in NAMES:
            losses = smoothed(_losses(f"{name}{end}"))
            apart = [mine - own for mine, own in zip(losses, exact, strict=False)]
            if name != "fp32" and apart and max(map(abs, apart)) < FARTHEST:
                series.append(Series(name, apart, x=steps))
        if series:
            panels.append(Panel(series, title, "step", "loss minus that in fp32", lines=[0.0]))
    if not panels:
        return bench.PLACEHOLDER
    return draw(panels, "precision-curves", size=(9, 3.2 * math.ceil(len(panels) / 2)), columns=2)


def _losses(variant: str) -> list[float]:
    """Return the losses of a finished run by step; a run that diverged is not drawn."""
    record = runs().get(variant)
    is_done = record is not None and record.outcome is not None and record.outcome.status == "done"
    return (record.train or {})["losses"] if record is not None and is_done else []


def tradeoff() -> str:
    """Memory and step time of a 1B model, and loss of a small one, by precision and by base."""
    lines = []
    pairs = {one.recipe.id: one for one in join(records(MEMORY))}
    all_names = {**NAMES, **{key: f"LoRA, {base}" for key, base in BASES.items()}}
    for name, shown in all_names.items():
        record = _newest(name)
        if record is None or record.estimate is None:
            continue
        pair = pairs.get(record.recipe_id)
        measured = None if pair is None else pair.measured
        control = "lora" if name in BASES else "fp32"
        loss = _loss(name, control) if runs() else NOT_YET
        lines.append((shown, *_held(record.estimate, measured), loss))
    heads = ("precision", "allocated, GiB", "measured", "step, ms", "measured", "loss after 1,000 steps")
    return markdown_grid(heads, lines)


def _newest(variant: str) -> Record | None:
    """Return the newest prediction of a variant."""
    found = [one for one in records(MEMORY) if one.estimate is not None and f"variant:{variant}" in one.tags]
    return max(found, key=lambda one: one.created_at, default=None)


def _held(estimate: Estimate, measured: Measurement | None) -> tuple[str, ...]:
    predicted = estimate.peak_allocated_bytes / GIB
    step_s = estimate.step_s
    cells = [f"{predicted:.2f}", NOT_YET, NOTHING if step_s is None else f"{step_s * 1e3:.1f}", NOT_YET]
    if measured is not None and measured.status == "done":
        cells[1] = f"{(measured.peak_allocated_bytes or 0) / GIB:.2f}"
        cells[3] = NOTHING if measured.step_s is None else f"{measured.step_s * 1e3:.1f}"
    return tuple(cells)


def _arithmetic(name: str, key: str) -> Sequence[BenchRow]:
    found = bench.newest(name, key, needs_gpu=False)
    assert found is not None, f"bench.jsonl has no record of {name}"
    return found.rows


def rounding() -> str:
    """What each quantity of a training step loses, by dtype."""
    lines = []
    for row in _arithmetic("rounding", "quantity"):
        if "lr" in row.point:
            continue
        at, numbers = row.point, row.numbers
        zero = numbers.get("zero_share")
        error = numbers.get("relative_error")
        lines.append(
            (
                str(at["quantity"]),
                str(at["dtype"]),
                _scientific(error),
                NOTHING if zero is None else f"{zero:.1%}",
            )
        )
    return markdown_grid(["quantity", "dtype", "relative error", "became 0"], lines, 2)


def updates() -> str:
    """Part of AdamW's update that reaches the weights, by dtype and learning rate."""
    rows = [row for row in _arithmetic("rounding", "quantity") if "lr" in row.point]
    heads: dict[Cell, str] = {rate: f"lr {rate:g}" for rate in RATES}
    return bench.pivot(rows, {"dtype": "weights"}, "lr", heads, bench.of_number("kept_share", ".0%"))


def updates_plot() -> str:
    """Plot of the same."""
    return bench.plotted("rounding", "quantity", needs_gpu=False)


def layer_norm_parts() -> str:
    """Each part's own error, and the inputs' deviations for which it stays below 1 %."""
    rows = [row for row in _arithmetic("layer_norm", "power") if "part" in row.point]
    lines = []
    for part in PARTS:
        cells = []
        for dtype in DTYPES:
            (row,) = bench.having(rows, {"part": part, "dtype": dtype})
            cells.append(_scientific(row.numbers["own_error"]))
        (half,) = bench.having(rows, {"part": part, "dtype": "fp16"})
        least, greatest = (math.log2(float(half.numbers[key])) for key in ("least_scale", "greatest_scale"))
        lines.append((part, *cells, f"2^{least:.0f} to 2^{greatest:.0f}"))
    heads = ["part", *(f"error in {dtype}" for dtype in DTYPES), "inputs that fp16 stands"]
    return markdown_grid(heads, lines)


POWERS = (-12, -8, 0, 4, 6, 8, 12)


def layer_norm_output() -> str:
    """Error of the output by the inputs' deviation, all in one dtype and with fp32 inside."""
    rows = [row for row in _arithmetic("layer_norm", "power") if "power" in row.point]
    lines = []
    for offset in (0, 16):
        for dtype in DTYPES:
            for number, how in (("product", f"all {dtype}"), (KERNEL, f"{dtype}, fp32 inside")):
                if dtype == "fp32" and number == KERNEL:
                    continue
                some = bench.having(rows, {"dtype": dtype, "offset": offset})
                by_power: dict[Cell, BenchRow] = {row.point["power"]: row for row in some}
                cells = [_scientific(by_power[power].numbers.get(number)) for power in POWERS]
                lines.append((f"{offset} deviations", how, *cells))
    heads = ["mean", "computed in", *(f"2^{power}" for power in POWERS)]
    return markdown_grid(heads, lines, 2)


def layer_norm_plot() -> str:
    """Plot of the same, all in one dtype."""
    return bench.plotted("layer_norm", "power", needs_gpu=False)


def _scientific(value: Cell | None) -> str:
    return NOTHING if value is None else f"{value:.1e}"


RULES: dict[Published, str] = {
    "low": "autocast's dtype", "fp32": "fp32", "widest": "the widest of its operands", "error": "refused",
}  # fmt: skip


def autocast_list() -> str:
    """Every operation of PyTorch's list, by the dtype that it gets."""
    lines = []
    for rule, shown in RULES.items():
        names = [f"`{name}`" for name, one in OPERATIONS.items() if one.published == rule]
        lines.append((shown, str(len(names)), ", ".join(names)))
    return markdown_grid(["runs in", "operations", "names"], lines, 3)


def autocast() -> str:
    """How many operations gave the dtypes of the list, and of the virtual GPU, on CUDA."""
    found = bench.newest("autocast", "operation")
    rows = [] if found is None else [row for row in found.rows if "as_predicted" in row.numbers]
    if not rows:
        return bench.NOT_MEASURED
    lines = []
    for low in dict.fromkeys(str(row.point["autocast"]) for row in rows):
        mine = bench.having(rows, {"autocast": low})
        listed = [row for row in mine if "as_published" in row.numbers]
        wrong = [f"`{row.point['operation']}`" for row in mine if not row.numbers["as_predicted"]]
        other = [f"`{row.point['operation']}`" for row in listed if not row.numbers["as_published"]]
        lines.append((low, str(len(mine)), ", ".join(wrong) or "none", ", ".join(other) or "none"))
    heads = ["autocast", "operations", "other than predicted", "other than the list"]
    return markdown_grid(heads, lines, 4)
