"""The figure of README.md: one recipe, predicted without a GPU and measured on one."""

from evidence.scripts.tables.joined import SUITE, join, records
from trainfit.report.compare import Comparison
from trainfit.report.plot import CATEGORY_COLORS, INK, MUTED, Panel, Series, draw
from trainfit.spec.units import GIB

MODEL, TECHNIQUE = "llama-3.1-8b", "bf16"
SIDES = {"predicted": "predicted, no GPU", "measured": "measured, H200"}


def found() -> Comparison:
    """Return the recipe of README's first command, with both sides."""
    (one,) = (one for one in join(records(SUITE)) if (one.model, one.technique) == (MODEL, TECHNIQUE)
              and one.batch == "1 x 4096" and one.predicted and one.measured)  # fmt: skip
    return one


def plot() -> str:
    """Draw memory at the peak by category, and the time of the step, predicted above measured."""
    one, names = found(), list(SIDES.values())
    held = [one.value(side, "breakdown") for side in SIDES]
    peaks = [f"{one.value(side, 'peak_allocated_bytes') / GIB:.2f} GiB" for side in SIDES]
    series = [
        Series(name, [getattr(each, name) / GIB for each in held], kind="bar", stack="peak", color=color)
        for name, color in CATEGORY_COLORS.items()
        if any(getattr(each, name) for each in held)
    ]
    series.append(Series("", [0.0, 0.0], kind="bar", stack="peak", text=peaks, color=INK))
    device = one.value("predicted", "device_bytes") / GIB
    memory = Panel(
        series, y_label="GiB allocated at the peak of a step", names=names, is_horizontal=True,
        y_limits=(0, 1.06 * device), limits={device: f"H200: {device:.1f} GiB"},
    )  # fmt: skip
    times = [1e3 * one.value(side, "step_s") for side in SIDES]
    colors = {"predicted": MUTED, "measured": INK}
    steps = [
        Series("", [value if at == index else None for index, value in enumerate(times)], kind="bar",
               text=[f"{value:,.0f} ms" if at == index else "" for index, value in enumerate(times)],
               stack="time", color=colors[side])
        for at, side in enumerate(SIDES)
    ]  # fmt: skip
    time = Panel(steps, y_label="milliseconds a step", names=names, is_horizontal=True, y_limits=(0, None))
    title = "Llama 3.1 8B, bf16, 1 x 4,096 tokens, AdamW"
    return draw([memory, time], "one-recipe", title=title, columns=1, size=(9.2, 3.6))
