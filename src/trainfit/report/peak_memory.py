"""The page of the peak-memory experiment: every row predicted and measured, beside the published figures.

``python -m trainfit.report.peak_memory [--results results] [--recipes recipes] [--into docs/results/peak-memory.md]``

Reads ``RECIPES/peak-memory/sweep.yaml``, ``separate.yaml``, ``pareto.yaml`` and ``published.toml``, ``RECIPES/ladder/*.yaml``, and of each sweep
``RESULTS/NAME/records.jsonl``, which is what ``trainfit sweep FILE --out results/NAME`` leaves (with ``--predict-only`` the
predictions alone). Leaves the Markdown page, its plots in ``plots/`` beside it. What is not measured yet is said so; the
same records give the same bytes.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from trainfit.report import beat_it, budgets, sweep_plots
from trainfit.report import peak_memory_tables as tables
from trainfit.report.budget_plot import budget_plot
from trainfit.report.page_file import Page, on_white, read_and_write
from trainfit.report.published import Published, read_published
from trainfit.report.sweep_results import NOT_YET, SweepResult, read_result

CONTROL = tables.CONTROL
PARETO_CONTROL = "ours without a budget"
WARM_COMPILER = (
    "A compiled row whose programs were on the measuring machine already, from a row before it, is not tuned again and holds less in its "
    "first step than predicted: a prediction assumes that nothing was compiled there before."
)


def main(arguments: list[str] | None = None) -> int:
    """Write the page; exit code 0, or 65 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m trainfit.report.peak_memory", description="The page of the peak-memory experiment."
    )
    return read_and_write(parser, make_page, arguments)


def make_page(recipes: Path, results: Path) -> Page:
    """Read all that the page needs, and make it.

    Raises:
        InputError: a bad file.
    """
    folder = recipes / "peak-memory"
    published = read_published(folder / "published.toml")
    sweep = read_result(folder / "sweep.yaml", results)
    separate = read_result(folder / "separate.yaml", results)
    every = replace(sweep, rows=(*sweep.rows, *separate.rows))
    pareto = read_result(folder / "pareto.yaml", results)
    ladders = [read_result(file, results) for file in sorted((recipes / "ladder").glob("*.yaml"))]
    everything = [sweep, separate, pareto, *ladders]
    plots: dict[str, str] = {}
    parts = [
        "# The peak-memory experiment",
        _intro(published, everything),
        *_beat_it(every, ladders, published),
        *_experiment(every, sweep, published, plots),
        *_pareto(pareto, plots),
        *(part for ladder in ladders for part in _ladder(ladder, plots)),
        *_again(everything),
    ]
    return Page("\n\n".join(parts) + "\n", plots)


def _intro(published: Published, results: list[SweepResult]) -> str:
    states = "\n".join(f"- `{result.name}`: {result.sentence()}" for result in results)
    return (
        "Made from the records by `python -m trainfit.report.peak_memory --into docs/results/peak-memory.md`; do not edit. One model of "
        "1.6 billion parameters, 4 x 768 tokens, Adafactor, trained in fp32 and then with less and less memory "
        "(`recipes/peak-memory/`, each a change of `control.yaml`). The published figures are "
        f"[its authors']({published.source}), of **another GPU** ({published.gpu}, PyTorch {published.torch}) and other text: peaks "
        "of allocated memory can be set side by side, samples a second show the other GPU, perplexities the other text. GiB is 2^30 "
        "bytes; an error is predicted minus measured, over measured; *on the host*: pinned memory of the host, as predicted. Measured "
        f"under torch {', '.join(dict.fromkeys(v for result in results for v in result.torch_versions)) or NOT_YET}; "
        "predicted under another version, compiled rows differ, since another compiler writes their programs.\n\n"
        f"{states}"
    )


def _beat_it(sweep: SweepResult, ladders: list[SweepResult], published: Published) -> list[str]:
    control = published.rows[CONTROL]
    best = min(published.rows.values(), key=lambda row: row.peak_gib)
    parts = [
        "## Beat it",
        f"The published best, *{best.title}*: {1 - best.peak_gib / control.peak_gib:.1%} less memory, "
        f"{best.samples_per_s / control.samples_per_s:.2f} times the speed over all steps, perplexity "
        f"{best.perplexity / control.perplexity - 1:+.0%}.".replace("%", " %"),
        _lines(beat_it.verdicts(sweep, CONTROL)),
    ]
    for ladder in ladders:
        parts += [f"`{ladder.name}`:", _lines(beat_it.verdicts(ladder, CONTROL))]
    return parts


def _lines(verdicts: list[beat_it.Verdict]) -> str:
    return "\n".join(verdict.line() for verdict in verdicts)


def _experiment(
    every: SweepResult, trained: SweepResult, published: Published, plots: dict[str, str]
) -> list[str]:
    """Memory and speed of every row, quality of those that are trained."""
    figures = [published.rows.get(row.variant) for row in every.rows]
    qualities = [published.rows.get(row.variant) for row in trained.rows]
    kept = {
        "peak-memory-bars.svg": sweep_plots.memory_bars(
            every.rows, published_gib=[figure and figure.peak_gib for figure in figures]
        ),
        "peak-memory-speed.svg": sweep_plots.speed_bars(
            every.rows, published_samples_per_s=[figure and published.late_samples_per_s(row.variant) for figure, row in zip(figures, every.rows, strict=True)]
        ),
        "peak-memory-perplexity.svg": sweep_plots.perplexity_bars(
            trained.rows, published=[figure and figure.perplexity for figure in qualities]
        ),
    }  # fmt: skip
    shown = {name: _keep(plots, name, svg) for name, svg in kept.items()}
    notes = [f"- `{row.variant}`: {figure.note}" for row, figure in zip(every.rows, figures, strict=True) if figure and figure.note]  # fmt: skip
    return [
        "## Memory",
        tables.memory_table(every, published),
        "*Less*: than the control. Where a published row is not what its name says:\n\n" + "\n".join(notes),
        WARM_COMPILER,
        f"![Peak memory of every row, predicted, measured and published](plots/{shown['peak-memory-bars.svg']})",
        "Where each row's peak stands, what is alive there, and why the optimizer in the backward alone saves nothing: "
        "[optimizer-in-backward.md](optimizer-in-backward.md).",
        "## Speed",
        tables.speed_table(every, published),
        "*All steps* include compiling; a row that is not trained has its median step under *from step 10*. MFU and HFU are shares of the GPU's dense peak in the recipe's own dtype.",
        f"![Samples a second from step 10 on, predicted, measured and published](plots/{shown['peak-memory-speed.svg']})",
        "## Perplexity",
        tables.quality_table(trained, published),
        "Of documents kept from training, after the last step.",
        f"![Perplexity of every row](plots/{shown['peak-memory-perplexity.svg']})",
        *_front(every, plots, "peak-memory-front.svg"),
    ]


def _front(result: SweepResult, plots: dict[str, str], name: str) -> list[str]:
    """The front of memory against speed: measured, and until there is anything measured as predicted."""
    svg = sweep_plots.front_scatter(result.rows)
    told = "measured" if svg else "predicted"
    svg = svg or sweep_plots.front_scatter(result.rows, predicted=True)
    if svg is None:
        return []
    return ["## Memory against speed", f"![Memory against speed, {told}](plots/{_keep(plots, name, svg)})"]


def _pareto(pareto: SweepResult, plots: dict[str, str]) -> list[str]:
    parts = [
        "## Memory budget against the time of a step",
        "The control with nothing changed but what is kept for the backward, and where: the compiler's solver recomputes, given a share of what it would keep "
        "of a whole compiled model, and by [ours](recompute-budget.md), which is given the step's peak in GiB. "
        "*Slower*: than without recomputation, not compiled.",
        budgets.budget_table(pareto, PARETO_CONTROL),
        _lines([budgets.never_over(pareto.rows), beat_it.peaks_verdict(pareto.rows)]),
        "Ours lets kept tensors wait on the host, the compiler's cannot: the two are not alike, and the column *on the host* tells by how much. "
        + WARM_COMPILER,
    ]
    svg = budget_plot(pareto.rows, "pareto")
    if svg is not None:
        name = _keep(plots, "peak-memory-pareto.svg", svg)
        parts.append(f"![Memory budget against the time of a step](plots/{name})")
    return parts


def _ladder(ladder: SweepResult, plots: dict[str, str]) -> list[str]:
    recipe = ladder.row(CONTROL).recipe
    batch = recipe["batch"]
    steps = ladder.trained_steps
    few = steps is not None and steps < beat_it.FEWEST_STEPS
    parts = [
        f"## The ladder: {ladder.name.removeprefix('ladder-')}",
        f"{batch['micro']} x {batch['seq']} tokens, {recipe['optimizer']['name']}. {ladder.sentence()}",
        tables.memory_table(ladder),
        tables.speed_table(ladder),
        f"Trained for {steps} steps, too few for perplexities." if few else tables.quality_table(ladder),
    ]
    svg = sweep_plots.memory_bars(ladder.rows)
    if svg is not None:
        name = _keep(plots, f"peak-memory-{ladder.name}.svg", svg)
        parts.append(f"![Peak memory of every row, predicted and measured](plots/{name})")
    return parts


def _again(results: list[SweepResult]) -> list[str]:
    lines = [result.command for result in results]
    lines.append("python -m trainfit.report.peak_memory --into docs/results/peak-memory.md")
    note = "With `--predict-only` a sweep needs no GPU; run again without it, the rest follows. Stopped, it goes on where it was."
    return ["## Make it again", "```\n" + "\n".join(lines) + "\n```", note]


def _keep(plots: dict[str, str], name: str, svg: str | None) -> str:
    """The plot's file name; kept if there is anything to draw."""
    if svg is not None:
        plots[name] = on_white(svg)
    return name


if __name__ == "__main__":
    sys.exit(main())
