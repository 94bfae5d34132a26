"""Table of published runs on several GPUs, of docs/results/accuracy.md."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.published_runs import FIGURES, LARGE, Figure, content, figures
from trainfit.report.table import NOTHING, markdown_grid


def is_tensor(one: Figure) -> bool:
    """Return whether a figure is of a run with tensor parallel."""
    return "tensor" in one.run["recipe"].get("parallel", {})


def groups() -> str:
    """Errors of the predicted figures, by source, GPU and kind of parallelism, with likely causes."""
    found: dict[tuple[str, str, str], list[Figure]] = {}
    for one in figures():
        source = content()["sources"][one.run["source"]]
        gpu = one.run["recipe"]["hardware"]["gpu"].partition("-")[0].upper()
        kind = "FSDP2, tensor parallel" if is_tensor(one) else "FSDP"
        found.setdefault((f"[{source['title']}]({source['url']})", gpu, kind), []).append(one)
    lines = [[", ".join(key), *_cells(some)] for key, some in found.items()]
    heads = [
        "runs",
        "number",
        *(f"{title}: error" for title in FIGURES.values()),
        "causes of errors above 10 %",
    ]
    return markdown_grid(heads, lines)


def _cells(some: Sequence[Figure]) -> list[str]:
    causes = dict.fromkeys(one.cause for one in some if abs(one.error) > LARGE)
    errors = ([one.error for one in some if one.name == name] for name in FIGURES)
    number = len({one.run["name"] for one in some})
    return [str(number), *map(_range, errors), "; ".join(causes)]


def _range(errors: Sequence[float]) -> str:
    ends = [f"{one:+.1%}".replace("%", " %") for one in sorted(errors)]
    return " to ".join(dict.fromkeys((ends[0], ends[-1]))) if ends else NOTHING
