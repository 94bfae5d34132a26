"""Tables and figures of evidence/pages/batch-size.md, and the rows on it in techniques.md.

Measured rows are of the newest record of ``trainfit bench batch``. Without one, tables hold what is known
before: the data sheet's roofline, and the predictions of ``recipes/batch/micro.yaml``.
"""

from dataclasses import replace
from typing import NamedTuple

from evidence.scripts.tables import bench
from evidence.scripts.tables.joined import recipe_of, records
from trainfit.bench.experiments.batch import BLOCK, TOKENS, TOLERANCE
from trainfit.bench.harness.discovery import experiment
from trainfit.bench.workloads import few_tokens, token_budget
from trainfit.catalog.load import gpu, model_config
from trainfit.flops.shape import shape_of
from trainfit.report.bench_plot import number, panels_of
from trainfit.report.plot import MEASURED, PREDICTED, Panel, Series, draw
from trainfit.report.table import NOTHING, markdown_grid
from trainfit.spec.bench import BenchResult, BenchRow
from trainfit.spec.result import Estimate
from trainfit.spec.units import GIB, format_seconds

MODEL = BLOCK["full"]
WEIGHTS = few_tokens.block_of(shape_of(model_config(MODEL)), 2)
CARD = "h100-sxm"
"""Of the roofline and the predictions where nothing is measured."""
CARDS = ("a100-sxm4-80gb", "h100-sxm", "h200", "b200", "mi300x", "rtx-4090")
PRODUCTS, STEPS, BUDGET, RATE = "tokens", "step of", "seen", "rate"
"""Keys that only points of this part have."""
REFERENCE_MICRO, SEQ = 4, 2048
"""Of the techniques' reference recipe."""


def _rows(key: str) -> list[BenchRow]:
    found = bench.newest("batch", key)
    return [] if found is None else [row for row in found.rows if key in row.point]


def _trained() -> BenchResult | None:
    """Return the newest losses: on a GPU, or else on a CPU."""
    return bench.newest("batch", BUDGET) or bench.newest("batch", BUDGET, needs_gpu=False)


def _losses(key: str = BUDGET) -> list[BenchRow]:
    """Return the rows of the training on a fixed number of tokens."""
    found = _trained()
    return [] if found is None else [row for row in found.rows if key in row.point]


def machine() -> str:
    """Return the device and the versions."""
    return bench.machine(bench.newest("batch", PRODUCTS))


def crossovers() -> str:
    """Return the tokens from which a block's products are compute-bound, by the data sheet of each card."""
    by_times = {row.point["crossover by"]: number(row, "crossover_tokens") for row in _rows("crossover by")}
    found = bench.newest("batch", "crossover by")
    card = found.gpu if found is not None else None
    lines = []
    for name in CARDS:
        sheet = few_tokens.sheet_rates(gpu(name))
        assert sheet is not None
        crossover = WEIGHTS.crossover(*sheet)
        measured = by_times.get("times") if name == card else None
        lines.append([
            name, f"{sheet[0] / 1e12:,.0f}", f"{sheet[1] / 1e12:.2f}", f"{sheet[0] / sheet[1]:.0f}",
            NOTHING if crossover is None else f"{crossover:.0f}",
            NOTHING if measured is None else f"{measured:.0f}",
        ])  # fmt: skip
    heads = ["card", "bf16, TFLOP/s", "memory, TB/s", "C / W", "crossover, tokens", "by measured times"]
    return markdown_grid(heads, lines)


def products() -> str:
    """Return time and rate of a block's products by tokens, or their roofline."""
    rows = {int(row.point["tokens"]): row for row in _rows(PRODUCTS)}
    lines = []
    for tokens in TOKENS["full"]:
        arithmetic, memory = _least(tokens)
        row = rows.get(tokens)
        median = row.times.median if row is not None and row.times is not None else None
        lines.append([
            f"{tokens:,}", "compute" if arithmetic >= memory else "memory",
            format_seconds(max(arithmetic, memory)),
            NOTHING if median is None else format_seconds(median),
            NOTHING if median is None else f"{max(arithmetic, memory) / median:.0%}",
            NOTHING if row is None else bench.of_number("tflops_per_s", ".3g")(row),
        ])  # fmt: skip
    heads = ["tokens", "bound by", "roofline", "measured", "of roofline", "TFLOP/s"]
    return markdown_grid(heads, lines, num_text=2)


def _least(tokens: int) -> tuple[float, float]:
    found = bench.newest("batch", PRODUCTS)
    sheet = few_tokens.sheet_rates(gpu((found.gpu if found is not None else None) or CARD))
    assert sheet is not None
    return WEIGHTS.least_s(tokens, *sheet)


def products_plot() -> str:
    """Plot the products' rate against the tokens, with the roofline and its crossover."""
    found = bench.newest("batch", PRODUCTS)
    card = (found.gpu if found is not None else None) or CARD
    sheet = few_tokens.sheet_rates(gpu(card))
    assert sheet is not None
    crossover = WEIGHTS.crossover(*sheet)
    assert crossover is not None
    tokens = TOKENS["full"]
    corners = sorted([*map(float, tokens), crossover])
    roof = [WEIGHTS.flops(one) / max(WEIGHTS.least_s(one, *sheet)) / 1e12 for one in corners]
    series = [Series(f"roofline of {card}", roof, x=corners, color=PREDICTED)]
    measured = [(int(row.point["tokens"]), number(row, "tflops_per_s")) for row in _rows(PRODUCTS)]
    if measured:
        series.append(
            Series("measured", [rate for _, rate in measured], x=[at for at, _ in measured], color=MEASURED)
        )
    ticks = {float(one): f"{one:,}" for one in tokens[::2]}
    title = f"Products by the weights of a block of {MODEL}{'' if measured else f': roofline of {card}'}"
    panel = Panel(
        series, title, "tokens", "TFLOP/s", x_log=True, y_log=True, y_limits=(None, 3 * sheet[0] / 1e12),
        x_ticks=ticks, events={crossover: f"crossover: {crossover:.0f} tokens"},
    )  # fmt: skip
    return draw([panel], "batch-products", title="Products of few tokens")


class Step(NamedTuple):
    """A step of one batch: measured, and predicted."""

    micro: int
    seq: int
    row: BenchRow | None
    estimate: Estimate

    @property
    def tokens(self) -> int:
        return self.micro * self.seq

    def measured(self, name: str) -> float | None:
        return None if self.row is None else number(self.row, name)

    def predicted(self, name: str) -> float | None:
        """Return the prediction that was made beside the measurement, or before one."""
        beside = self.measured(f"predicted_{name}")
        step_s, peak = self.estimate.step_s, self.estimate.peak_allocated_bytes
        before = {"tokens_per_s": self.tokens / step_s if step_s else None, "mfu": self.estimate.mfu,
                  "peak_bytes": float(peak)}  # fmt: skip
        return before[name] if beside is None else beside


def _steps() -> list[Step]:
    measured = {(row.point["micro"], row.point["seq"]): row for row in _rows(STEPS)}
    found = []
    for record in records("batch/predicted.jsonl"):
        batch = recipe_of(record).batch
        assert record.estimate is not None
        found.append(Step(batch.micro, batch.seq, measured.get((batch.micro, batch.seq)), record.estimate))
    return sorted(found, key=lambda one: one.tokens)


def steps() -> str:
    """Return tokens a second, MFU and peak by micro-batch."""
    lines = []
    for one in _steps():
        cells = []
        for name, scale, form in (
            ("tokens_per_s", 1, ",.0f"),
            ("mfu", 100, ".1f"),
            ("peak_bytes", GIB, ".2f"),
        ):
            for value in (one.predicted(name), one.measured(name)):
                shown = None if value is None else value / scale if scale == GIB else value * scale
                cells.append(NOTHING if shown is None else f"{shown:{form}}")
        lines.append([f"{one.micro} x {one.seq:,}", f"{one.tokens:,}", *cells])
    heads = ["batch", "tokens", "tokens/s, predicted", "measured", "MFU, %, predicted", "measured",
             "peak, GiB, predicted", "measured"]  # fmt: skip
    return markdown_grid(heads, lines)


def steps_plot() -> str:
    """Plot tokens a second and MFU by tokens of the micro-batch."""
    found = _steps()
    x = [one.tokens for one in found]
    ticks = {float(tokens): f"{tokens:,}" for tokens in x}
    panels = []
    is_measured = any(one.row is not None for one in found)
    title = "" if is_measured else f"Predicted for {CARD}"
    for name, scale, label in (("tokens_per_s", 1.0, "tokens a second"), ("mfu", 100.0, "MFU, %")):
        sides = {
            "predicted": [one.predicted(name) for one in found],
            "measured": [one.measured(name) for one in found],
        }
        colors = {"predicted": PREDICTED, "measured": MEASURED}
        series = [
            Series(side, [None if y is None else y * scale for y in ys], x=x, color=colors[side])
            for side, ys in sides.items()
            if any(y is not None for y in ys)
        ]
        panels.append(
            Panel(
                series, title, "tokens of a micro-batch", label, x_log=True, x_ticks=ticks, y_limits=(0, None)
            )
        )
    return draw(panels, "batch-steps", title="Steps by micro-batch", columns=2, size=(9.5, 3.6))


def technique_rows() -> list[list[str]]:
    """Return rows of the techniques' table: other micro-batches against the reference's.

    Cells: name, allocated bytes, device bytes, time of a token, perplexity. Device bytes are not measured in
    one process with other batches, and a perplexity depends on the steps that a budget of tokens leaves.
    """
    found = [one for one in _steps() if one.seq == SEQ]
    if not found:
        return []
    is_measured = all(one.measured("tokens_per_s") is not None for one in found)

    def figure(one: Step, name: str) -> float:
        value = one.measured(name) if is_measured else one.predicted(name)
        assert value is not None
        return value

    (reference,) = (one for one in found if one.micro == REFERENCE_MICRO)
    rows = []
    for one in found:
        if one is not reference:
            allocated = figure(one, "peak_bytes") / figure(reference, "peak_bytes") - 1
            time = figure(reference, "tokens_per_s") / figure(one, "tokens_per_s") - 1
            name = f"`batch.micro: {one.micro}`, time of a token{'' if is_measured else ', predicted'}"
            rows.append([name, f"{100 * allocated:+z.1f}%", NOTHING, f"{100 * time:+z.1f}%", NOTHING])
    return rows


def losses() -> str:
    """Return the loss by batch and tokens seen."""
    rows = _losses()
    if not rows:
        return bench.NOT_MEASURED
    seen = sorted({int(row.point["seen"]) for row in rows})
    shown = seen[1::2]
    lines = []
    for batch in sorted({int(row.point["batch"]) for row in rows}):
        mine = {int(row.point["seen"]): row for row in rows if row.point["batch"] == batch}
        last = mine[seen[-1]]
        cells = [bench.of_number("loss", ".3f")(mine[at]) for at in shown]
        lines.append([f"{batch:,}", str(seen[-1] // batch), bench.of_number("lr", ".2g")(last), *cells])
    heads = ["batch, tokens", "steps", "learning rate", *(f"{at / 2**20:g}M tokens" for at in shown)]
    return markdown_grid(heads, lines)


def rates() -> str:
    """Return the loss after the budget by batch and learning rate, as a factor of the square-root rule's."""
    rows = _losses(RATE)
    if not rows:
        return bench.NOT_MEASURED
    factors = sorted({float(row.point[RATE]) for row in rows})
    lines = []
    for batch in sorted({int(row.point["batch"]) for row in rows}):
        mine = {float(row.point[RATE]): row for row in rows if row.point["batch"] == batch}
        losses = [bench.of_number("loss", ".3f")(mine[factor]) for factor in factors]
        seconds = [number(row, "step_s") for row in mine.values()]
        known = [one for one in seconds if one is not None]
        lines.append([f"{batch:,}", *losses, format_seconds(min(known)) if known else NOTHING])
    return markdown_grid(["batch, tokens", *(f"{factor:g} x" for factor in factors), "a step"], lines)


def useful() -> str:
    """Return the largest useful batch of the newest losses, as a sentence."""
    rows = _losses()
    if not rows:
        return bench.NOT_MEASURED
    budget = max(int(row.point["seen"]) for row in rows)
    losses = {int(row.point["batch"]): number(row, "loss") for row in rows if row.point["seen"] == budget}
    found = {batch: loss for batch, loss in losses.items() if loss is not None}
    largest = token_budget.largest_useful(found, TOLERANCE)
    best = min(found, key=lambda batch: found[batch])
    source = token_budget.source_loss(token_budget.held_out())
    return (
        f"Beyond **{largest:,} tokens** ({budget // largest:,} steps) a larger batch makes the loss of this "
        f"budget more than {100 * TOLERANCE:g} % worse than the best, {found[best]:.3f} nats a token, of "
        f"batches of {best:,} tokens. The source itself has {source:.3f} nats. "
        f"{bench.machine(_trained())}"
    )


def losses_plot() -> str:
    """Plot the loss against the tokens seen, a line for each batch."""
    (plot,) = (one for one in experiment("batch").plots if BUDGET in one.x)
    rows = sorted(_losses(), key=lambda row: int(row.point["batch"]))
    panels = [replace(panel, y_limits=(None, None)) for panel in panels_of(rows, plot)]
    return draw(panels, "batch-losses", title=plot.title) if panels else bench.plotted("batch", BUDGET)
