"""Speed beside the best other program: README.md and evidence/pages/kernels.md.

Ours are measured records. Others are measured records too, or what their authors published for the same work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from evidence.scripts.tables import plan_choices
from evidence.scripts.tables.joined import RESULTS
from trainfit.report.table import markdown_grid

LLMQ = "llm.q"
CITED: dict[str, dict[str, float]] = {
    "qwen2.5-0.5b": {"bf16": 149_500, "fp8": 164_000},
    "qwen2.5-1.5b": {"bf16": 59_100, "fp8": 73_000},
    "qwen2.5-3b": {"bf16": 30_900, "fp8": 40_400},
    "qwen2.5-7b": {"bf16": 13_850, "fp8": 19_150},
    "qwen2.5-14b": {"bf16": 6_320, "fp8": 9_365},
}
"""Tokens/s of one H100, 1,024 tokens a sequence: benchmarks/H100x1.md of github.com/IST-DASLab/llmq. Where
it was run here, its measured speed counts instead."""
RUN_HERE = "speed/llmq-h100.jsonl"
STEPS = ("step-kernels/step-kernels*.jsonl", "speed/*-measured.jsonl")
"""Whole steps of recipes that were planned or written for speed."""
BY_TRAINER = (
    ("qwen3-14b", "lora", plan_choices.GOALS, "trainer.jsonl"),
    ("llama-3.1-8b", "full", plan_choices.SEVERAL, "trainer-several-gpus.jsonl"),
)
"""Model, what trains, the plans it is one of, and the Trainer's runs."""
FSDP2 = "several-gpus/speed-measured.jsonl"
TWO = "speed/two-h200-measured.jsonl"


class Row(NamedTuple):
    """One kind of work, ours and the best other."""

    work: str
    gpus: str
    tokens_per_s: float
    other: str
    other_tokens_per_s: float
    is_cited: bool
    versions: str
    made_by: str
    """Records below ``evidence/records/``."""

    @property
    def ratio(self) -> float:
        return self.tokens_per_s / self.other_tokens_per_s

    def cells(self) -> list[str]:
        """Return the cells that both pages have."""
        mark = "*" * self.is_cited
        other = f"{self.other_tokens_per_s:,.0f}{mark}"
        return [self.work, self.gpus, f"{self.tokens_per_s:,.0f}", self.other, other, f"{self.ratio:.2f}"]


HEADS = ["work", "GPU", "ours, tokens/s", "best other", "tokens/s", "ours / other"]


def readme() -> str:
    """Return the table of README.md."""
    rows = [one.cells() for one in every()]
    return markdown_grid(HEADS, rows, is_number=[False, False, True, False, True, True])


def table() -> str:
    """Return the same with versions and records."""
    rows = [[*one.cells(), one.versions, f"`{one.made_by}`"] for one in every()]
    heads = [*HEADS, "torch", "records"]
    return markdown_grid(heads, rows, is_number=[False, False, True, False, True, True, False, False])


@cache
def every() -> tuple[Row, ...]:
    """Return all rows with measured records."""
    return (*against_llmq(), *against_trainer(), *against_fsdp2())


def against_llmq() -> Iterator[Row]:
    """Yield Qwen2.5 by size and precision: the fastest measured recipe, as llm.q's benchmark trains it."""
    measured = list(_steps())
    rows = _lines(RESULTS / RUN_HERE)
    here = dict[tuple[str, str], float]()
    for row in rows:
        key = (row["model"], row["precision"])
        here[key] = max(here.get(key, 0.0), row["tokens_per_s"])
    for model, cited in CITED.items():
        for precision, theirs in cited.items():
            alike = [one for one in measured if (one["model"], one["precision"]) == (model, precision)]
            if alike:
                best = max(alike, key=lambda one: one["tokens_per_s"])
                size = model.removeprefix("qwen2.5-").upper()
                run = here.get((model, precision))
                work = f"Qwen2.5 {size}, {precision}"
                yield Row(
                    work, "H100", best["tokens_per_s"], LLMQ, run or theirs, run is None, best["torch"],
                    f"{best['file']}, llmq-h100.jsonl" if run else best["file"],
                )  # fmt: skip


def _steps() -> Iterator[dict[str, Any]]:
    """Yield measured steps of all weights on one H100 with 1,024 tokens a sequence."""
    for file in sorted({path for pattern in STEPS for path in RESULTS.glob(pattern)}):
        for row in _lines(file):
            recipe = row.get("recipe")
            if recipe is None:
                continue  # Products of a step, by shape.
            measured = row.get("measurement") or row
            hardware = recipe["hardware"]
            is_work = (hardware["gpu"], hardware.get("count", 1), recipe["batch"]["seq"]) == (
                "h100-sxm",
                1,
                1024,
            )
            is_work &= (
                not recipe.get("adapter") and recipe.get("optimizer", {}).get("name", "adamw") == "adamw"
            )
            if is_work and measured.get("tokens_per_s"):
                versions = measured.get("environment") or {"torch": row.get("torch", "")}
                yield {
                    "model": recipe["model"]["config"], "precision": recipe["precision"],
                    "tokens_per_s": measured["tokens_per_s"], "torch": versions["torch"].partition("+")[0],
                    "file": file.relative_to(RESULTS).as_posix(),
                }  # fmt: skip


def against_trainer() -> Iterator[Row]:
    """Yield planned recipes beside the fastest settings of transformers' Trainer."""
    for model, tune, goals, file in BY_TRAINER:
        ((ours, goal),) = [
            (one.first, one.goal)
            for one in plan_choices.choices(goals)
            if (one.goal.model, one.goal.tune, one.cap_gib) == (model, tune, max(one.goal.caps_gib))
        ]
        assert ours is not None
        runs = [one for one in plan_choices.trainer_rows(file) if one["model"] == model]
        best = max(runs, key=lambda one: one.get("tokens_per_s", 0.0))
        kind = " and Liger" * best["liger"]
        kind = f", {best['strategy'].upper()}{kind}" if "strategy" in best else kind.replace(" and", " with")
        what = "LoRA" if tune == "lora" else "all weights"
        work = f"{_title(model)}, {what}, {goal.seq:,} tokens"
        yield Row(
            work, _gpus(goal.count, "H200"), ours.tokens_per_s or 0.0, f"Trainer{kind}",
            best["tokens_per_s"], False, "2.11.0",
            f"plan-choices/measured-{goal.name}.jsonl, {file}",
        )  # fmt: skip


def against_fsdp2() -> Iterator[Row]:
    """Yield 14B over two GPUs: transformers' model, which recomputes, and ours with the same batch."""
    rows = [
        (one["recipe"], one["measurement"]["tokens_per_s"], file)
        for file in (FSDP2, TWO)
        for one in _lines(RESULTS / file)
        if one["recipe"]["model"]["config"] == "qwen3-14b" and one["measurement"]
    ]
    ((others, theirs, _),) = [row for row in rows if row[0]["model"]["implementation"] == "hf"]
    ours, file = max(
        (speed, file)
        for recipe, speed, file in rows
        if recipe["model"]["implementation"] == "native" and recipe["batch"] == others["batch"]
    )
    yield Row(
        "Qwen3 14B, all weights, 4,096 tokens", _gpus(2, "H200"), ours,
        "transformers, FSDP2, all blocks recomputed", theirs, False, "2.11.0", f"{file}, {FSDP2}",
    )  # fmt: skip


def planned() -> str:
    """Return recipes of recipes/speed/ that were measured, beside what had been predicted of them before."""
    rows = []
    for file in sorted((RESULTS / "speed").glob("*-measured.jsonl")):
        predicted = {one["recipe_id"]: one["estimate"] for one in _lines(RESULTS / "speed" / _before(file))}
        for record in _lines(file):
            estimate, measured = predicted.get(record["recipe_id"]), record["measurement"]
            if not estimate or not measured or not measured["tokens_per_s"]:
                continue
            name = next(tag for tag in record["tags"] if tag.startswith("variant:")).removeprefix("variant:")
            off = estimate["tokens_per_s"] / measured["tokens_per_s"] - 1
            bytes_off = estimate["peak_allocated_bytes"] / measured["peak_allocated_bytes"] - 1
            rows.append((
                file.name.removesuffix("-measured.jsonl"), name, f"{estimate['tokens_per_s']:,.0f}",
                f"{measured['tokens_per_s']:,.0f}", f"{off:+z.1%}",
                f"{measured['peak_allocated_bytes'] / 2**30:.2f}", f"{bytes_off:+z.3%}",
                f"{estimate['mfu'] / (1 + off):.1%}",
            ))  # fmt: skip
    heads = (
        "recipes/speed", "recipe", "predicted, tokens/s", "measured", "off", "peak, GiB", "peak off", "MFU",
    )  # fmt: skip
    return markdown_grid(heads, rows, is_number=[False, False, *[True] * 6])


def _before(measured: Path) -> str:
    return measured.name.replace("-measured", "-predicted")


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, file.read_text("utf-8").splitlines())


def _title(model: str) -> str:
    name, _, size = model.rpartition("-")
    return f"{name.replace('-', ' ').replace('llama', 'Llama').replace('qwen', 'Qwen')} {size.upper()}"


def _gpus(count: int, name: str) -> str:
    return name if count == 1 else f"{count} x {name}"
