"""Tables of published runs, of docs/results/accuracy.md."""

from __future__ import annotations

from statistics import median

from benchmarks.published_runs import FIGURES, LARGE, ONE_HOST, Figure, content, figures, is_learned
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


def one_host() -> str:
    """Errors of runs on one GPU or one host, by GPU and source, and by half."""
    found: dict[tuple[str, str], list[Figure]] = {}
    for one in figures(ONE_HOST):
        found.setdefault((one.run["recipe"]["hardware"]["gpu"], one.run["source"]), []).append(one)
    heads = [
        "GPU",
        "source",
        "held out: within 10 %",
        "median",
        "range",
        "learned from: within 10 %",
        "median",
    ]
    lines = [
        [gpu, _source(source), *_errors(held_out(rows), ranged=True), *_errors(learned(rows))]
        for (gpu, source), rows in found.items()
    ]
    every = [one for rows in found.values() for one in rows]
    lines.append(["all", "", *_errors(held_out(every), ranged=True), *_errors(learned(every))])
    return markdown_grid(heads, lines)


def held_out(rows: list[Figure]) -> list[float]:
    """Return the errors of the half that judges."""
    return [one.error for one in rows if not is_learned(one.run["name"])]


def learned(rows: list[Figure]) -> list[float]:
    """Return the errors of the half that shares may be learned from."""
    return [one.error for one in rows if is_learned(one.run["name"])]


def _source(name: str) -> str:
    source = content(ONE_HOST)["sources"][name]
    return f"[{source['title']}]({source['url']})"


def _errors(errors: list[float], *, ranged: bool = False) -> list[str]:
    if not errors:
        return ["–"] * (3 if ranged else 2)
    near = f"{sum(abs(error) <= LARGE for error in errors)} of {len(errors)}"
    spread = [f"{_percent(min(errors))} to {_percent(max(errors))}"] if ranged else []
    return [near, _percent(median(errors)), *spread]


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
