"""Table and figure of training in fp8 beside bf16 (``recipes/speed/loss-matched-0.5b.yaml``)."""

from __future__ import annotations

import json
from functools import cache
from statistics import fmean
from typing import Any

from evidence.scripts.tables import bench
from evidence.scripts.tables.joined import RESULTS, SMOOTHED, smoothed, trained_runs
from trainfit.report.plot import Panel, Series, draw
from trainfit.report.table import NOTHING, markdown_grid

FOLDER = "loss-matched"
NAMES = {
    "bf16": "bf16", "fp8": "fp8", "fp8 delayed": "fp8, delayed scaling",
    "bf16 kernels": "bf16, other kernels", "bf16 seed 1": "bf16, another seed",
}  # fmt: skip
"""Variant of the sweep -> its name in the table, in its order; the first is what others are compared with."""
CONTROL = next(iter(NAMES))
LAST = 100
"""Steps at the end whose mean loss is compared."""
FIRST_DRAWN = 100
"""Steps whose losses are not drawn: they fall by several nats."""


@cache
def runs() -> dict[str, dict[str, Any]]:
    """Return the summary of each finished run by variant, those that diverged too."""
    return {name: record.train or {} for name, record in trained_runs(f"{FOLDER}/records.jsonl").items()}


def corpus() -> dict[str, Any]:
    """Return what is known of the text: its source, the tokens and the SHA-256 of each file."""
    return json.loads((RESULTS / FOLDER / "corpus.json").read_text("utf-8"))


def apart(name: str) -> list[float]:
    """Return how far the mean loss of each SMOOTHED steps is above the control's."""
    losses, control = (smoothed(runs()[one]["losses"]) for one in (name, CONTROL))
    return [mine - own for mine, own in zip(losses, control, strict=False)]


def table() -> str:
    """Loss at the end of training and of held-out text, and how far each is from that of bf16."""
    found = runs()
    if CONTROL not in found:
        return bench.NOT_MEASURED
    rows = []
    for name, shown in NAMES.items():
        run = found.get(name)
        if run is None:
            continue
        if run["status"] == "diverged":
            rows.append((shown, f"diverged after {run['steps']:,} steps", *[NOTHING] * 3))
            continue
        farthest = NOTHING if name == CONTROL else f"{max(apart(name), key=abs):+.4f}"
        speed = NOTHING if run["tokens_per_s"] is None else f"{run['tokens_per_s']:,.0f}"
        rows.append((shown, _compared(name, at_the_end), farthest, _compared(name, held_out), speed))
    heads = (
        "run", f"training loss, last {LAST} steps", f"farthest from bf16, mean of {SMOOTHED} steps",
        "held-out loss", "tokens/s",
    )  # fmt: skip
    return markdown_grid(heads, rows)


def at_the_end(name: str) -> float:
    """Return the mean training loss of the last steps."""
    return fmean(runs()[name]["losses"][-LAST:])


def held_out(name: str) -> float:
    """Return the loss of held-out text after the last step."""
    return float(runs()[name]["evaluations"][-1]["loss"])


def _compared(name: str, loss: Any) -> str:
    value = loss(name)
    return f"{value:.4f}" if name == CONTROL else f"{value:.4f} ({value - loss(CONTROL):+z.4f})"


def curves() -> str:
    """Losses of training by step, and how far they are above those of bf16, as means of SMOOTHED steps."""
    finished = [name for name in NAMES if name in runs() and runs()[name]["status"] == "done"]
    if CONTROL not in finished:
        return bench.PLACEHOLDER
    losses, differences = list[Series](), list[Series]()
    for name in finished:
        values = smoothed(runs()[name]["losses"])
        steps = [SMOOTHED * (at + 1) for at in range(len(values))]
        first = sum(step <= FIRST_DRAWN for step in steps)
        losses.append(Series(NAMES[name], values[first:], x=steps[first:]))
        differences.append(Series(NAMES[name], apart(name)[first:], x=steps[first:]))
    panels = [
        Panel(losses, f"training loss, mean of {SMOOTHED} steps", "step", "loss"),
        Panel(differences, "the same minus that of bf16", "step", "difference", lines=[0.0]),
    ]
    return draw(panels, "loss-matched", title="Training losses of fp8 and bf16", size=(9, 3.6), columns=2)
