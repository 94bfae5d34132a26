"""Tables of published runs, of evidence/pages/accuracy.md."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from evidence.scripts.published_runs import FIGURES, LARGE, ONE_HOST, Figure, content, figures, is_learned
from trainfit.report.table import NOTHING, markdown_grid


def kind(one: Figure) -> str:
    """Return the kind of parallelism of a figure's run."""
    parallel = one.run["recipe"].get("parallel", {})
    inside = "FSDP2, tensor parallel" if "tensor" in parallel else "FSDP"
    return f"pipeline, {inside}" if "pipeline" in parallel else inside


def groups() -> str:
    """Errors of the predicted figures, by source, GPU and kind of parallelism, with likely causes."""
    found: dict[tuple[str, str, str], list[Figure]] = {}
    for one in figures():
        source = content()["sources"][one.run["source"]]
        gpu = one.run["recipe"]["hardware"]["gpu"].partition("-")[0].upper()
        found.setdefault((source["title"], gpu, kind(one)), []).append(one)
    lines = [[", ".join((_links(some), *key[1:])), *_cells(some)] for key, some in found.items()]
    heads = [
        "runs",
        "number",
        *(f"{title}: error" for title in FIGURES.values()),
        "causes of errors above 10 %",
    ]
    return markdown_grid(heads, lines)


def _links(some: Sequence[Figure]) -> str:
    """Return links to the pages of the runs: the first by its title, further ones by number."""
    sources = [content()["sources"][name] for name in dict.fromkeys(one.run["source"] for one in some)]
    names = [sources[0]["title"], *map(str, range(2, len(sources) + 1))]
    return " ".join(f"[{name}]({one['url']})" for name, one in zip(names, sources, strict=True))


def one_host() -> str:
    """Errors of runs on one GPU or one host, by GPU and source, and by half."""
    found: dict[tuple[str, str], list[Figure]] = {}
    for one in figures(ONE_HOST):
        found.setdefault((one.run["recipe"]["hardware"]["gpu"], one.run["source"]), []).append(one)
    heads = ["GPU", "runs", "held out: within 10 %", "median", "range", "other half: within 10 %", "median"]
    lines = []
    for (gpu, name), some in found.items():
        source = content(ONE_HOST)["sources"][name]
        lines.append([gpu, f"[{source['title']}]({source['url']})", *_halves(some)])
    return markdown_grid(heads, [*lines, ["all", NOTHING, *_halves(figures(ONE_HOST))]])


def held_out(some: Sequence[Figure]) -> list[float]:
    """Return the errors of the half that judges."""
    return [one.error for one in some if not is_learned(one.run["name"])]


def _halves(some: Sequence[Figure]) -> list[str]:
    judged, learned = held_out(some), [one.error for one in some if is_learned(one.run["name"])]
    return [_near(judged), _median(judged), _range(judged), _near(learned), _median(learned)]


def _near(errors: Sequence[float]) -> str:
    return f"{sum(abs(one) <= LARGE for one in errors)} of {len(errors)}" if errors else NOTHING


def _median(errors: Sequence[float]) -> str:
    return _percent(median(errors)) if errors else NOTHING


def _cells(some: Sequence[Figure]) -> list[str]:
    causes = dict.fromkeys(one.cause for one in some if abs(one.error) > LARGE)
    errors = ([one.error for one in some if one.name == name] for name in FIGURES)
    number = len({one.run["name"] for one in some})
    return [str(number), *map(_range, errors), "; ".join(causes)]


def _range(errors: Sequence[float]) -> str:
    ends = [_percent(one) for one in sorted(errors)]
    return " to ".join(dict.fromkeys((ends[0], ends[-1]))) if ends else NOTHING


def _percent(share: float) -> str:
    return f"{share:+.1%}".replace("%", " %")
