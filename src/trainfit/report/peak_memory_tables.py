"""The peak-memory page's tables: memory, speed and quality of every row beside its control and, if there is one, the
published row. Enters: a SweepResult and the published figures. Leaves: Markdown."""

from typing import Any

from trainfit.catalog.load import model_config
from trainfit.report.published import Published
from trainfit.report.sweep_results import (
    NOT_PREDICTED,
    Compared,
    SweepResult,
    late_samples_per_s,
    not_there,
)
from trainfit.report.sweep_table import overall_samples_per_s
from trainfit.report.table import NOTHING, markdown_grid, percent
from trainfit.spec.sweep import Row
from trainfit.spec.units import GIB

CONTROL = "control"
OWN_NAMES = ("model", "batch", "hardware", "seed")
"""Fields whose change is told by the whole, or is none of a technique."""


def changes(recipe: dict[str, Any], control: dict[str, Any]) -> str:
    """What a recipe asks that the control does not, by field; of another model its implementation or its name."""
    found = [f"{path}: {_plain(value)}" for path, value in _leaves(recipe, control) if path not in OWN_NAMES]
    model, other = recipe["model"], control["model"]
    if model["implementation"] != other["implementation"]:
        found.insert(0, f"model.implementation: {model['implementation']}")
    elif model != other:
        config, before = model_config(model["config"]), model_config(other["config"])
        # What the control's config writes down: another file may only write out more defaults.
        keys = [key for key, value in before.items() if config.get(key) != value]
        found = [f"model.config.{key}: {_plain(config.get(key))}" for key in keys] + found
    return ", ".join(f"`{one}`" for one in found) or NOTHING


def _leaves(recipe: dict[str, Any], control: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """Fields that differ, optimizer and offload field by field."""
    found: list[tuple[str, Any]] = []
    for name, value in recipe.items():
        other = control.get(name)
        if value == other:
            continue
        if not path and name in ("optimizer", "offload", "loader") and isinstance(other, dict):
            found += _leaves(value, other, f"{name}.")
        else:
            found.append((f"{path}{name}", value))
    return found


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(one)}" for key, one in value.items()) + "}"
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if not isinstance(value, float | int) or isinstance(value, bool) else f"{value:g}"  # fmt: skip


def memory_table(result: SweepResult, published: Published | None = None) -> str:
    """Predicted and measured peaks of every row."""
    control = result.row(CONTROL)
    heads = [
        "row",
        "what it changes",
        "predicted GiB",
        "measured GiB",
        "error",
        "less, predicted",
        "less, measured",
        "on the host, GiB",
    ]
    if published is not None:
        heads += ["published GiB", "less, published", "measured / published"]
    lines = []
    for row in result.rows:
        against = Compared(row, control)
        cells = [
            f"`{row.variant}`", changes(row.recipe, control.recipe), predicted_gib(row), measured_gib(row),
            percent(row.error), _less(against.predicted_reduction), _less(against.reduction), host_gib(row),
        ]  # fmt: skip
        lines.append(cells + (_published_memory(row, published) if published is not None else []))
    return markdown_grid(heads, lines, num_text=2)


def _published_memory(row: Row, published: Published) -> list[str]:
    figure = published.rows.get(row.variant)
    if figure is None:
        return [NOTHING] * 3
    measured = row.measured_bytes
    less = 1 - figure.peak_gib / published.rows[CONTROL].peak_gib
    return [
        f"{figure.peak_gib:.3f}",
        _less(less),
        NOTHING if measured is None else f"{measured / GIB / figure.peak_gib:.3f}",
    ]


def speed_table(result: SweepResult, published: Published | None = None) -> str:
    """Samples a second of every row, and how well it uses the GPU."""
    control = result.row(CONTROL)
    heads = ["row", "predicted samples/s", "x control", "samples/s, all steps", "x control", "from step 10", "x control",
             "MFU", "HFU"]  # fmt: skip
    if published is not None:
        heads += ["published, all steps", "x control", "from step 10", "x control", "measured / published"]
    lines = []
    for row in result.rows:
        against = Compared(row, control)
        overall = overall_samples_per_s(row)
        cells = [
            f"`{row.variant}`", number(row.predicted_samples_per_s), times(against.predicted_speed),
            not_there(row) if overall is None else number(overall), times(against.overall_speed),
            number(late_samples_per_s(row)), times(against.late_speed), _share(row.mfu), _share(row.hfu),
        ]  # fmt: skip
        lines.append(cells + (_published_speed(row, overall, published) if published is not None else []))
    return markdown_grid(heads, lines)


def _published_speed(row: Row, overall: float | None, published: Published) -> list[str]:
    figure, control = published.rows.get(row.variant), published.rows[CONTROL]
    if figure is None:
        return [NOTHING] * 5
    late = published.late_samples_per_s(row.variant)
    return [
        number(figure.samples_per_s),
        times(figure.samples_per_s / control.samples_per_s),
        number(late),
        times(late / published.late_samples_per_s(CONTROL)),
        NOTHING if overall is None else f"{overall / figure.samples_per_s:.1f}",
    ]


def quality_table(result: SweepResult, published: Published | None = None) -> str:
    """Evaluation perplexity of every row."""
    control = result.row(CONTROL)
    heads = ["row", "perplexity", "change"]
    if published is not None:
        heads += ["published", "change"]
    lines = []
    for row in result.rows:
        found = not_there(row) if row.perplexity is None else f"{row.perplexity:.3f}"
        cells = [f"`{row.variant}`", found, percent(Compared(row, control).perplexity_change)]
        if published is not None:
            figure = published.rows.get(row.variant)
            base = published.rows[CONTROL].perplexity
            cells += [NOTHING] * 2 if figure is None else [f"{figure.perplexity:.1f}", percent(figure.perplexity / base - 1)]  # fmt: skip
        lines.append(cells)
    return markdown_grid(heads, lines)


def predicted_gib(row: Row) -> str:
    """The predicted peak, or how predicting ended."""
    if row.predicted_bytes is not None:
        fits = row.estimate is None or row.estimate.fits
        return f"{row.predicted_bytes / GIB:.3f}" + ("" if fits else " (does not fit)")
    outcome = row.outcomes.get("predict")
    return NOT_PREDICTED if outcome is None else outcome.status


def host_gib(row: Row) -> str:
    """Pinned host memory that the step keeps, as predicted."""
    num_bytes = row.estimate.host_bytes if row.estimate else None
    return NOTHING if not num_bytes else f"{num_bytes / GIB:.2f}"


def measured_gib(row: Row) -> str:
    """The measured peak, or why there is none."""
    return not_there(row) if row.measured_bytes is None else f"{row.measured_bytes / GIB:.3f}"


def number(value: float | None) -> str:
    """Four digits."""
    return NOTHING if value is None else f"{value:.4g}"


def times(value: float | None) -> str:
    """A ratio."""
    return NOTHING if value is None else f"{value:.2f}"


def _less(value: float | None) -> str:
    return NOTHING if value is None else f"{round(value * 100, 1) + 0.0:.1f} %"  # + 0.0: no "-0.0"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}".replace("%", " %")
