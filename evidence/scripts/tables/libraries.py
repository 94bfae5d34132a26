"""Tables of evidence/pages/libraries.md: scripts of real libraries, and layouts and optimizers of theirs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from evidence.scripts.tables.joined import RESULTS, describe, join, records
from trainfit.report.compare import Comparison
from trainfit.report.table import NOTHING, markdown_grid

SCRIPTS = RESULTS / "library-scripts"
UNTIMED_STEPS = 3
GIB = 2**30


@cache
def _lines(file: Path) -> dict[str, dict[str, Any]]:
    return {one["script"]: one for one in map(json.loads, file.read_text("utf-8").splitlines())}


def scripts() -> str:
    """Return peaks and steps of the scripts that were run; a step is the median without the first three."""
    heads = [
        "script",
        "on",
        "allocated, GiB",
        "error",
        "reserved",
        "a step, ms",
        "predicted",
        "of it waits for the host",
    ]
    predicted, measured = (_lines(SCRIPTS / f"{name}.jsonl") for name in ("predicted", "runs"))
    lines = [[f"`{name}`", *_cells(predicted[name]["estimate"], found)] for name, found in measured.items()]
    return markdown_grid(heads, lines, num_text=2)


def _cells(estimate: dict[str, Any], found: dict[str, Any]) -> list[str]:
    allocated, reserved = (
        estimate[f"peak_{name}_bytes"] / found[f"peak_{name}_bytes"] - 1 for name in ("allocated", "reserved")
    )
    step_s = median(found["step_s"][UNTIMED_STEPS:])
    return [
        _card(found["device"]),
        f"{found['peak_allocated_bytes'] / GIB:.2f}",
        f"{allocated:+.3%}",
        f"{reserved:+.1%}",
        f"{step_s * 1e3:.1f}",
        f"{estimate['step_s'] * 1e3:.1f}",
        f"{estimate['time']['host_s'] / estimate['step_s']:.0%}",
    ]


def _card(device: str) -> str:
    """Return the GPU's model of its driver's name: "NVIDIA H100 80GB HBM3" is an H100."""
    return device.removeprefix("NVIDIA ").split()[0]


def recipes() -> str:
    """Return peaks and steps of the recipes with adapters, layouts and optimizers of libraries."""
    heads = ["recipe", "on", "allocated, GiB", "error", "reserved", "a step, ms", "predicted"]
    return markdown_grid(
        heads, sorted(map(_recipe_cells, join(records("adapters-and-optimizers/*.jsonl")))), num_text=2
    )


def _recipe_cells(one: Comparison) -> list[str]:
    errors = (one.error(f"peak_{name}_bytes") for name in ("allocated", "reserved"))
    steps = (one.value(side, "step_s") for side in ("measured", "predicted"))
    return [
        describe(one.recipe),
        _card(one.device),
        f"{one.value('measured', 'peak_allocated_bytes') / GIB:.2f}",
        *(NOTHING if error is None else f"{error:+.3%}" for error in errors),
        *(NOTHING if step_s is None else f"{step_s * 1e3:.1f}" for step_s in steps),
    ]
