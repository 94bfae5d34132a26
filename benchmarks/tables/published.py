"""Tables of published runs on several GPUs, of docs/results/accuracy.md."""

from __future__ import annotations

from benchmarks.published_runs import FIGURES, LARGE, Figure, content, figures
from trainfit.report.table import markdown_grid


def by_run() -> dict[str, dict[str, Figure]]:
    """Return each run's figures by name."""
    found: dict[str, dict[str, Figure]] = {}
    for one in figures():
        found.setdefault(one.run["name"], {})[one.name] = one
    return found


def runs() -> str:
    """Published and predicted figures, by run."""
    heads = ["run", "GPU", "tokens/s a GPU", "predicted", "error", "memory, GiB", "predicted", "error"]
    lines = []
    for number, found in enumerate(by_run().values(), 1):
        run = next(iter(found.values())).run
        source = content()["sources"][run["source"]]
        title = f"{number}. {run['settings']} ([{source['title']}]({source['url']}))"
        cells = [cell for name in FIGURES for cell in _cells(found.get(name))]
        lines.append([title, run["recipe"]["hardware"]["gpu"], *cells])
    return markdown_grid(heads, lines)


def causes() -> str:
    """Causes of errors above 10 %, with the numbers of the runs."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for number, run in enumerate(by_run().values(), 1):
        for one in run.values():
            if abs(one.error) > LARGE:
                found.setdefault((one.cause, FIGURES[one.name]), []).append((number, one.error))
    lines = [
        [cause, figure, ", ".join(f"{number}: {_percent(error)}" for number, error in errors)]
        for (cause, figure), errors in found.items()
    ]
    return markdown_grid(["cause", "figure", "run: error"], lines)


def _cells(one: Figure | None) -> list[str]:
    if one is None:
        return ["–", "–", "–"]
    digits = 0 if one.name == "tokens_per_s_per_gpu" else 1
    return [f"{one.published:,.{digits}f}", f"{one.predicted:,.{digits}f}", _percent(one.error)]


def _percent(share: float) -> str:
    return f"{share:+.1%}".replace("%", " %")
