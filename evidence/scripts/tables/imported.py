"""Table of imported configurations, of evidence/pages/imported-configs.md."""

from __future__ import annotations

from typing import Any

from evidence.scripts.imported_configs import results
from trainfit.report.table import NOTHING, markdown_cell, markdown_grid
from trainfit.spec.units import format_seconds


def table() -> str:
    """Return the configs, what became of their fields, and the predictions of their recipes."""
    heads = ["config", "GPUs", "fields", "without a counterpart", "GiB a GPU", "fits", "a step"]
    lines = [_cells(one) for one in results().values()]
    return markdown_grid(heads, lines, num_text=2)


def _cells(one: dict[str, Any]) -> list[str]:
    step = NOTHING if one["step_s"] is None else format_seconds(one["step_s"])
    gib = f"{one['peak_device_bytes'] / 2**30:.2f}"
    fits = "yes" if one["fits"] else "no"
    if not one["fits"] and one["not_in_memory"]:
        fits = f"no, without {', '.join(map(markdown_cell, one['not_in_memory']))}"
    gpus = f"{one['count']} x {one['gpu']}"
    return [markdown_cell(one["origin"]), gpus, str(one["fields"]), str(len(one["without"])), gib, fits, step]
