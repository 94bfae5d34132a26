"""The page of the recomputation budget: full checkpointing's memory without its cost.

``python -m trainfit.report.recompute_budget [--results results] [--recipes recipes] [--into docs/results/recompute-budget.md]``

Reads ``RECIPES/recompute-budget/*.yaml`` and of each ``RESULTS/NAME/records.jsonl``, which is what
``trainfit sweep FILE --out results/NAME`` leaves. Leaves the Markdown page and its plots in ``plots/`` beside it.
"""

import argparse
import sys
from pathlib import Path

from trainfit.report import budgets
from trainfit.report.beat_it import peaks_verdict
from trainfit.report.budget_plot import budget_plot
from trainfit.report.page_file import Page, on_white, read_and_write
from trainfit.report.sweep_results import SweepResult, read_result

NONE, FULL = "none", "full"
"""What every sweep of the folder calls its rows without recomputation and with all of it."""

WHAT_IT_IS = """\
`recompute: {budget_gib: 20}` keeps the step's peak of allocated memory at or under 20 GiB, by the fastest plan that is found. Every decoder block
recomputes nothing, its elementwise work or everything, and lets a share of what it keeps wait in pinned host memory; which block
does what is planned from one short trace on the virtual GPU (`planning/recompute.py`).

- The budget bounds the highest allocated bytes at every point of the executed step, not the sum of what is saved. The plan's own
  prediction, traced whole, is within it, or the plan is not given out.
- A larger budget is never predicted slower: the candidates and their order do not depend on the budget.
- A budget that no plan reaches is refused, and the least reachable one is named.
- Gradients do not change: what is recomputed is computed alike.
- Planning is meant to take under two seconds for 80 layers, imports aside: `tests/prediction/test_plan_speed.py` times it, docs/log.md has what it took."""


def main(arguments: list[str] | None = None) -> int:
    """Write the page; exit code 0, or 65 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m trainfit.report.recompute_budget", description="The page of the recomputation budget."
    )
    return read_and_write(parser, make_page, arguments)


def make_page(recipes: Path, results: Path) -> Page:
    """Read all that the page needs, and make it.

    Raises:
        InputError: a bad file.
    """
    found = [read_result(file, results) for file in sorted((recipes / "recompute-budget").glob("*.yaml"))]
    plots: dict[str, str] = {}
    parts = [
        "# A memory budget in GiB",
        "Made from the records by `python -m trainfit.report.recompute_budget --into docs/results/recompute-budget.md`; do not edit.",
        WHAT_IT_IS,
        *(part for result in found for part in _sweep(result, plots)),
        "Against the compiler's solver, which is given a share instead: [peak-memory.md](peak-memory.md).",
        "## Make it again",
        "```\n" + "\n".join(
            [*(result.command for result in found), "python -m trainfit.report.recompute_budget --into docs/results/recompute-budget.md"]
        ) + "\n```",
    ]  # fmt: skip
    return Page("\n\n".join(parts) + "\n", plots)


def _sweep(result: SweepResult, plots: dict[str, str]) -> list[str]:
    recipe = result.row(NONE).recipe
    batch = recipe["batch"]
    verdicts = [
        budgets.full_at_no_cost(result, NONE, FULL),
        budgets.never_over(result.rows),
        peaks_verdict(result.rows),
    ]
    parts = [
        f"## {result.name.removeprefix('recompute-budget-')}",
        f"{batch['micro']} x {batch['seq']} tokens, {recipe['precision']}, {recipe['optimizer']['name']}, {recipe['loss']} loss. "
        f"{result.sentence()} Less and slower: than without recomputation. On the host: pinned memory, as predicted.",
        "\n".join(verdict.line() for verdict in verdicts),
        budgets.budget_table(result, NONE),
    ]
    svg = budget_plot(result.rows, result.name)
    if svg is not None:
        name = f"{result.name}.svg"
        plots[name] = on_white(svg)
        parts.append(f"![Memory budget against the time of a step](plots/{name})")
    return parts


if __name__ == "__main__":
    sys.exit(main())
