"""Tables and figures of evidence/pages/peak-memory.md and evidence/pages/recompute-budget.md.

Each reads a sweep's file in ``recipes/`` and ``evidence/records/NAME/records.jsonl``, which ``trainfit
sweep`` writes. A row without a measurement shows its prediction alone, and is filled once it has one.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainfit.catalog.load import model_config
from trainfit.records import load
from trainfit.report.plot import CATEGORY_COLORS, MEASURED, MUTED, PREDICTED, Panel, Series, draw
from trainfit.report.table import NOTHING, Column, Table, markdown_grid, or_dash
from trainfit.spec.explanation import Explanation
from trainfit.spec.parsing.parse import parse
from trainfit.spec.parsing.recipe_file import load_recipe
from trainfit.spec.sweep import Row
from trainfit.spec.units import GIB
from trainfit.sweeps.read import read_sweep
from trainfit.sweeps.rows import rows_of

ROOT = Path(__file__).parents[3]
EXPERIMENT = ROOT / "recipes" / "peak-memory"
SWEEPS = {
    "trained": EXPERIMENT / "sweep.yaml",
    "measured": EXPERIMENT / "separate.yaml",
    "budgets": EXPERIMENT / "pareto.yaml",
    "bf16-quality": EXPERIMENT / "bf16-quality.yaml",
    "bf16-quality-docs": EXPERIMENT / "bf16-quality-docs.yaml",
    "bf16-quality-cpu": EXPERIMENT / "bf16-quality-cpu.yaml",
    "bf16-quality-cpu-docs": EXPERIMENT / "bf16-quality-cpu-docs.yaml",
    "soft-prompts": ROOT / "recipes" / "techniques" / "soft-prompts.yaml",
    "llama-3.2-1b": ROOT / "recipes" / "ladder" / "llama-3.2-1b.yaml",
    "qwen3-4b": ROOT / "recipes" / "ladder" / "qwen3-4b.yaml",
    "llama-3.1-8b": ROOT / "recipes" / "recompute-budget" / "llama-3.1-8b.yaml",
}
ENDINGS = {"waiting": "predicted only", "out-of-memory": "out of memory", "timeout": "out of time"}
EXPLAINED = ("control", "fused", "checkpoint", "fused_checkpoint")
COMPILED = ("compile", "fused_compile", "memory_budget_05", "fused_memory_budget_05")
BLOCKS = ("compile_block", "fused_compile_block", "block_budget_05", "fused_block_budget_05")
FEWEST_STEPS = 100
"""Shorter training runs show no perplexity."""
LONG = 3
"""Changes from which on another row refers to them by the name of the row."""
LADDERS = {"Llama": "llama-3.2-1b", "Qwen": "qwen3-4b"}


@cache
def sweep(name: str) -> dict[str, Row]:
    """Return the rows of a sweep of ``SWEEPS`` by variant."""
    read = read_sweep(SWEEPS[name])
    records = ROOT / "evidence" / "records" / read.name / "records.jsonl"
    return {row.variant: row for row in rows_of(read, load(records) if records.is_file() else [])}


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return the published figures by row."""
    return tomllib.loads((EXPERIMENT / "published.toml").read_text("utf-8"))["rows"]


@cache
def device_bytes() -> dict[str, int]:
    """Return the measured peak of the whole process on the device by recipe id, where it was measured."""
    records = load(ROOT / "evidence" / "records" / "peak-memory" / "device" / "h200.jsonl")
    return {one.recipe_id: one.measurement.peak_device_bytes or 0 for one in records if one.measurement}


@cache
def explained() -> dict[str, Explanation]:
    """Return the explanations of the experiment's recipes by row."""
    lines = (
        (ROOT / "evidence" / "records" / "peak-memory" / "explained.jsonl").read_text("utf-8").splitlines()
    )
    found = {one.recipe_id: one for one in (parse(Explanation, json.loads(line)) for line in lines)}
    files = [file for file in EXPERIMENT.glob("*.yaml") if file not in SWEEPS.values()]
    ids = {file.stem: load_recipe(file).id for file in sorted(files)}
    return {name: found[recipe_id] for name, recipe_id in ids.items() if recipe_id in found}


def late_samples_per_s(row: Row) -> float | None:
    """Return the measured speed without the first ten steps: of the training run, else of the median step."""
    if row.train is not None:
        return row.train["speed"]["late_samples_per_s"] if row.train.get("status") == "done" else None
    return row.samples_per_s


def reduction(row: Row, control: Row) -> float | None:
    """Return by which share a row's peak is below the control's: measured where both are, else predicted."""
    for name in ("measured_bytes", "predicted_bytes"):
        size, base = getattr(row, name), getattr(control, name)
        if size is not None and base:
            return 1 - size / base
    return None


def perplexity_change(row: Row, control: Row) -> float | None:
    """Return the row's perplexity over the control's, minus 1."""
    if not row.perplexity or not control.perplexity or row.train is None:
        return None
    return row.perplexity / control.perplexity - 1 if row.train["run"]["steps"] >= FEWEST_STEPS else None


def changes(recipe: dict[str, Any], control: dict[str, Any]) -> list[str]:
    """Return the fields in which a recipe differs from the control."""
    found = [f"{path}: {_plain(value)}" for path, value in _leaves(recipe, control)]
    model, other = recipe["model"], control["model"]
    if model["implementation"] != other["implementation"]:
        found.insert(0, f"model.implementation: {model['implementation']}")
    elif model != other:
        # Keys of the control's config: another file may only write out more defaults.
        config, before = model_config(model["config"]), model_config(other["config"])
        keys = [key for key, value in before.items() if config.get(key) != value]
        found = [f"model.config.{key}: {_plain(config.get(key))}" for key in keys] + found
    return [f"`{one}`" for one in found]


def _changes_of(rows: Sequence[Row], control: Row) -> dict[str, str]:
    """Return the changes of each row by variant; a row that adds to an earlier long one names that one."""
    every = {row.variant: changes(row.recipe, control.recipe) for row in rows}
    shown: dict[str, str] = {}
    for variant, found in every.items():
        bases = [name for name in shown if LONG <= len(every[name]) < len(found)]
        bases = [name for name in bases if {*every[name]} < {*found}]
        base = max(bases, key=lambda name: len(every[name]), default="")
        own = [one for one in found if not base or one not in every[base]]
        shown[variant] = ", ".join([f"as `{base}`"] * bool(base) + own) or NOTHING
    return shown


def _leaves(recipe: dict[str, Any], control: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in recipe.items():
        other = control.get(name)
        if value == other or (not path and name in ("model", "batch", "hardware", "seed")):
            continue
        if not path and name in ("optimizer", "offload", "loader") and isinstance(other, dict):
            found += _leaves(value, other, f"{name}.")
        else:
            found.append((f"{path}{name}", value))
    return found


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(one)}" for key, one in value.items()) + "}"
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, bool) or value is None else f"{value:g}"


REPETITIONS = frozenset(
    "bf16_fused_offload_checkpoint bf16_only bf16_checkpoint compile_block bf16_chunked_loss".split()
)
LADDERS_SHOW_NOTHING_NEW_IN = frozenset(
    "memory_budget_60 fused_memory_budget_05 bf16_memory_budget_60".split()
)


def memory(name: str) -> str:
    """Return memory, speed and perplexity of a sweep's rows."""
    rows = _without_repetitions(name)
    control = sweep(name)["control"]
    shown = _changes_of(rows, control)
    columns = [
        NAME,
        Column("changes", lambda row: shown[row.variant], False),
        ALLOCATED,
        Column("device GiB, predicted", _device),
        *_training_columns(control),
    ]
    return _markdown(columns, rows)


def perplexities() -> str:
    """Return the perplexities of the published rows, ours and theirs, and what each adds to its control's."""
    theirs, control = published(), sweep("trained")["control"]

    def published_perplexity(row: Row) -> str:
        return f"{theirs[row.variant]['perplexity']:.1f}"

    def published_change(row: Row) -> str:
        return _per_cent(theirs[row.variant]["perplexity"] / theirs["control"]["perplexity"] - 1, "+z.1f")

    columns = [
        NAME,
        Column("allocated GiB", ALLOCATED.cell),
        Column("published", lambda row: f"{theirs[row.variant]['peak_gib']:.3f}"),
        Column("perplexity", lambda row: or_dash(row.perplexity, "{:.1f}")),
        Column("published", published_perplexity),
        Column("over control, %", lambda row: _per_cent(perplexity_change(row, control), "+z.1f")),
        Column("published", published_change),
    ]
    return _markdown(columns, [sweep("trained")[variant] for variant in theirs])


QUALITY = {
    "scaled_fp32": ("fp32 weights", "scaled_fp32"),
    "torch_bf16": ("bf16 weights, torch's Adafactor", "scaled_fp32"),
    "scaled_bf16": ("and epsilon of fp32 (`implementation: fused`)", "scaled_fp32"),
    "scaled_bf16_rounded": ("and stochastic rounding", "scaled_fp32"),
    "absolute_fp32": ("fp32 weights, absolute steps", "absolute_fp32"),
    "absolute_bf16": ("and bf16 weights: the published optimizer's rule", "absolute_fp32"),
    "absolute_bf16_rounded": ("and stochastic rounding", "absolute_fp32"),
}
"""Row of the sweep -> its change from the row above, and its control."""


def bf16_quality(name: str) -> str:
    """Return the perplexity of each change on the way from fp32 to bf16 weights, by steps and by data."""
    found, on_docs = sweep(name), sweep(f"{name}-docs")
    if found["scaled_fp32"].perplexity is None:
        return "Not measured yet on a GPU."
    lines = []
    for variant, (change, control) in QUALITY.items():
        row, base, other = found[variant], found[control], on_docs.get(variant)
        more = [_per_cent(one - 1, "+z.1f") for one in over_control(row, base)] if row is not base else []
        docs = perplexity_change(other, on_docs[control]) if other is not None and more else None
        cells = (or_dash(row.perplexity, "{:.1f}"), " / ".join(more) or NOTHING, _per_cent(docs, "+z.1f"))
        lines.append((f"`{variant}`", change, *cells))
    heads = ("row", "change", "perplexity", "over fp32 after 25 / 50 / 75 / 100 steps, %", "on other text, %")
    return markdown_grid(heads, lines, 2)


def over_control(row: Row, control: Row) -> list[float]:
    """Return the row's perplexity over the control's at each evaluation."""
    mine, theirs = (one.train["evaluations"] if one.train else () for one in (row, control))
    return [math.exp(a["loss"] - b["loss"]) for a, b in zip(mine, theirs, strict=True)]


def _without_repetitions(name: str) -> list[Row]:
    """Return the rows of a sweep without those that combine two others and show nothing new."""
    return [row for variant, row in sweep(name).items() if variant not in REPETITIONS]


def _memory_columns(control: Row) -> list[Column]:
    return [
        ALLOCATED,
        Column("less, %", lambda row: _per_cent(reduction(row, control), "z.1f")),
    ]


def _allocated(row: Row) -> str:
    """Return the measured peak, and the predicted one where it differs or there is no other."""
    predicted = _gib(row.predicted_bytes)
    if row.measured_bytes is None:
        return f"{predicted}, {ENDINGS.get(row.status, row.status)}"
    measured = _gib(row.measured_bytes)
    return measured if measured == predicted else f"{measured} (predicted {predicted})"


def _training_columns(control: Row) -> list[Column]:
    def speed(row: Row) -> str:
        ours, base = late_samples_per_s(row), late_samples_per_s(control)
        return or_dash(ours / base if ours and base else None, "{:.2f}")

    return [
        Column("speed", speed),
        Column("perplexity, %", lambda row: _per_cent(perplexity_change(row, control), "+z.2f")),
    ]


def _device(row: Row) -> str:
    measured = device_bytes().get(row.recipe_id)
    return _gib(row.predicted_device_bytes, 2) + (f" (measured {_gib(measured, 2)})" if measured else "")


NAME = Column("row", lambda row: f"`{row.variant}`", False)
ALLOCATED = Column("allocated GiB", lambda row: _allocated(row))
HOST = Column("host GiB", lambda row: _gib(row.estimate.host_bytes or None, 2) if row.estimate else NOTHING)


def ladders() -> str:
    """Return the rows of both ladders, which are the same techniques on two models."""
    rows = [
        row
        for row in _without_repetitions(LADDERS["Llama"])
        if row.variant not in LADDERS_SHOW_NOTHING_NEW_IN
    ]
    columns = [NAME]
    for title, name in LADDERS.items():
        found = [ALLOCATED, *_training_columns(sweep(name)["control"])]
        columns += [_of_ladder(column, title, name) for column in found]
    return _markdown(columns, rows)


def _of_ladder(column: Column, title: str, name: str) -> Column:
    return Column(f"{title}: {column.title}", lambda row: column.cell(sweep(name)[row.variant]))


def _markdown(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Return the filled columns as a Markdown table of cells that are Markdown."""
    table = Table(columns, rows).filled()
    cells = [[column.cell(row) for column in table.columns] for row in rows]
    numbers = [column.is_number for column in table.columns]
    return markdown_grid([column.title for column in table.columns], cells, is_number=numbers)


def budgets(name: str, control: str) -> str:
    """Return memory and step time of rows with memory budgets, against the row that recomputes nothing."""
    rows, base = list(sweep(name).values()), sweep(name)[control]
    columns = [
        NAME,
        *_memory_columns(base),
        HOST,
        Column("step ms, predicted", lambda row: _ms(predicted_step_s(row))),
        Column("measured", lambda row: _ms(measured_step_s(row))),
        Column("slower, %", lambda row: _per_cent(slower(row, base), "+z.2f")),
    ]
    return _markdown(columns, rows)


def predicted_step_s(row: Row) -> float | None:
    """Return the expected time of a step."""
    return row.estimate.step_s if row.estimate else None


def measured_step_s(row: Row) -> float | None:
    """Return the median of the measured steps."""
    return row.measurement.step_s if row.measurement and row.measurement.status == "done" else None


def slower(row: Row, base: Row, step_s: Callable[[Row], float | None] = measured_step_s) -> float | None:
    """Return by which share the row's step takes longer than ``base``'s."""
    seconds, other = step_s(row), step_s(base)
    return seconds / other - 1 if seconds and other else None


def bars() -> str:
    """Draw the experiment's peaks: predicted, measured and published."""
    rows = [*sweep("trained").values(), *sweep("measured").values()]
    theirs = [published().get(row.variant, {}).get("peak_gib") for row in rows]
    series = [
        Series("predicted", [_over_gib(row.predicted_bytes) for row in rows], kind="bar", color=PREDICTED),
        Series("measured, H200", [_over_gib(row.measured_bytes) for row in rows], kind="bar", color=MEASURED),
        Series("published, RTX 4090", theirs, kind="bar", color="#9aa5b1"),
    ]
    panel = Panel(series, y_label="GiB allocated", names=[row.variant for row in rows], is_horizontal=True)
    return draw([panel], "bars", title="Peak allocated memory of a step")


def curves() -> str:
    """Draw allocated memory through the step with the peak, of the explained rows."""
    panels = [_curve(name) for name in (*EXPLAINED, *COMPILED, *BLOCKS)]
    title = "Memory through the step with the peak (in the titles, GiB)"
    return draw(panels, "curves", title=title, columns=4, size=(10.4, 7.2), share_y=True)


def _curve(name: str) -> Panel:
    one = explained()[name]
    used = [part for part in CATEGORY_COLORS if any(getattr(point.alive, part) for point in one.curve)]
    series = [
        Series(
            part,
            [getattr(point.alive, part) / GIB for point in one.curve],
            kind="area",
            color=CATEGORY_COLORS[part],
        )
        for part in used
    ]
    begin = next((index for index, point in enumerate(one.curve) if point.phase == "backward"), 0)
    title = f"{name}: {one.peak_allocated_bytes / GIB:.2f}"
    return Panel(series, title=title, y_label="GiB", events={begin: "backward"}, x_ticks={0: ""})


def budget_plot(name: str) -> str:
    """Draw memory against the time of a step: a line for the budgets of each solver."""
    sides: Sequence[tuple[str, Callable[[Row], int | None], Callable[[Row], float | None]]] = (
        ("measured", lambda row: row.measured_bytes, measured_step_s),
        ("predicted", lambda row: row.predicted_bytes, predicted_step_s),
    )
    series = []
    for side, size, step_s in sides:
        groups: dict[str, list[Row]] = {}
        for row in sweep(name).values():
            if size(row) is not None and step_s(row) is not None:
                groups.setdefault(_solver(row), []).append(row)
        for solver, rows in groups.items():
            color = {"budget in GiB": MEASURED, "compiler's budget": PREDICTED}.get(solver, MUTED)
            series.append(
                Series(
                    f"{solver}, {side}", [(step_s(row) or 0) * 1e3 for row in rows],
                    [(size(row) or 0) / GIB for row in rows], "scatter" if color == MUTED else "line",
                    text=[_budget(row) for row in rows] if side == "measured" else (), color=color,
                    marker={MEASURED: "o", PREDICTED: "s"}.get(color, "D"), is_hollow=side == "predicted",
                )
            )  # fmt: skip
    panel = Panel(series, x_label="peak allocated, GiB", y_label="milliseconds a step")
    return draw([panel], f"budget-{name}", title="Memory against the time of a step", size=(8.2, 5.0))


def _solver(row: Row) -> str:
    recompute = row.recipe["recompute"]
    kind = next(iter(recompute), "") if isinstance(recompute, dict) else ""
    return {"budget_gib": "budget in GiB", "budget": "compiler's budget"}.get(kind, "without a budget")


def _budget(row: Row) -> str:
    recompute = row.recipe["recompute"]
    value = recompute.get("budget_gib", recompute.get("budget")) if isinstance(recompute, dict) else None
    return row.variant if value is None else f"{value:g}"


def _gib(size: float | None, digits: int = 3) -> str:
    return or_dash(_over_gib(size), f"{{:,.{digits}f}}")


def _over_gib(size: float | None) -> float | None:
    return None if size is None else size / GIB


def _per_cent(share: float | None, spec: str) -> str:
    return NOTHING if share is None else format(share * 100, spec)


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds * 1e3:,.1f}"
