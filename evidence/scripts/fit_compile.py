"""Fit what torch.compile takes before the first step to the kernels that it compiles.

    python -m evidence.scripts.fit_compile count FILE    write a line for each measured compilation (minutes)
    python -m evidence.scripts.fit_compile fit [FILE]    fit the constants of [compile], and print the errors

``start_s`` and ``kernel_s``: first steps of ``bench transformer`` and ``bench compile``
(evidence/records/bench.jsonl), many in one process, with an empty cache; a median step is subtracted.
``process_s``: what a process of its own adds, of trials of a sweep with compiled blocks, whose whole duration
was recorded; steps, and what the sweep's eager trials take besides, are subtracted. The sweep's models that
were compiled whole are held out. Kernels are counted by a prediction of the same recipe.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RECORDS = Path(__file__).parents[1] / "records"
FILE = RECORDS / "compile-times.jsonl"
HELD_OUT = RECORDS / "techniques" / "measured.jsonl"
UNTIMED = 3 + 1  # Warm-up steps of ``measure``, and the step for the breakdown


class Compilation(NamedTuple):
    """One measured compilation."""

    name: str
    own_process: bool
    graphs: int
    kernels: int
    seconds: float

    @property
    def held_out(self) -> bool:
        """No constant is fitted to it."""
        return self.own_process and self.name.endswith(", model")


def measured() -> Iterator[tuple[str, bool, dict[str, Any], float]]:
    """Yield name, whether it had a process of its own, recipe and seconds of each measured compilation."""
    yield from _of_bench()
    yield from _of_sweep()


def _of_bench() -> Iterator[tuple[str, bool, dict[str, Any], float]]:
    from trainfit.bench.experiments import compile as experiment
    from trainfit.bench.workloads.steps import PRECISIONS

    cases = {experiment.model_name(case): case for case in experiment.CASES["full"]}
    for line in (RECORDS / "bench.jsonl").read_text("utf-8").splitlines():
        bench = json.loads(line)["bench"]
        for row in bench["rows"] if bench["form"] == "full" else ():
            point, times = row["point"], row["times"]
            if bench["experiment"] == "transformer" and point["compile"] != "false" and times:
                # A first step that was throttled is missing, and its row begins with a later one.
                first_s, later_s = times["samples"][0], statistics.median(times["samples"][1:])
                if point["warm-up"] == 0 and first_s > 2 * later_s:
                    recipe = {
                        "model": {"config": point["model"], "implementation": "native"},
                        "batch": {"micro": 4, "seq": 512},
                        "precision": PRECISIONS[point["precision"]].recipe,
                        "compile": point["compile"],
                    }
                    name = f"{point['model']} {point['precision']}, {point['compile']}"
                    yield name, False, recipe, first_s - later_s
            elif bench["experiment"] == "compile" and point.get("cache") == "empty" and row["numbers"]:
                recipe = experiment.recipe_of(cases[point["model"]], point["compile"], "cuda").content()
                yield f"{point['model']}, {point['compile']}", False, recipe, row["numbers"]["compile_s"]


def _of_sweep() -> Iterator[tuple[str, bool, dict[str, Any], float]]:
    from trainfit.spec.parsing.recipe_file import recipe_from
    from trainfit.techniques import registry

    besides: dict[bool, list[tuple[dict[str, Any], float]]] = {False: [], True: []}
    for line in HELD_OUT.read_text("utf-8").splitlines():
        record = json.loads(line)
        found, outcome = record["measurement"], record["outcome"]
        if outcome is None or found["step_times"] is None or found["message"]:
            continue  # Not a sweep's, throttled, or compiled by an earlier process.
        steps_s = (len(found["step_times"]["samples"]) + UNTIMED) * found["step_s"]
        recipe, rest_s = record["recipe"], outcome["seconds"] - steps_s
        besides[bool(recipe["compile"])].append((recipe, rest_s))
    eager_s = statistics.median(seconds for _, seconds in besides[False])
    for recipe, seconds in besides[True]:
        described = registry.describe(recipe_from(recipe).model_copy(update={"compile": False}))
        yield (
            f"{recipe['model']['config']}, {described}, {recipe['compile']}",
            True,
            recipe,
            seconds - eager_s,
        )


def count(file: Path) -> None:
    """Write a line for each measured compilation, with the graphs and kernels of its prediction."""
    from trainfit.prediction.predict import ledger_of
    from trainfit.spec.parsing.recipe_file import recipe_from

    lines: list[str] = []
    for name, own_process, recipe, seconds in measured():
        graphs, kernels = ledger_of(recipe_from({**recipe, "hardware": {"gpu": "h200"}})).compiled
        lines.append(json.dumps(Compilation(name, own_process, graphs, kernels, round(seconds, 3))._asdict()))
        print(lines[-1], flush=True)
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def compilations(file: Path = FILE) -> list[Compilation]:
    """Return the counted compilations."""
    return [Compilation(**json.loads(line)) for line in file.read_text("utf-8").splitlines()]


class Fitted(NamedTuple):
    """Constants of [compile] in catalog/constants.toml."""

    process_s: float
    start_s: float
    kernel_s: float

    def seconds(self, row: Compilation) -> float:
        """Return the time of a compilation."""
        return self.process_s * row.own_process + self.start_s + self.kernel_s * row.kernels


def fit(rows: Sequence[Compilation]) -> Fitted:
    """Return the constants: of the least relative squares, and the median of what an own process adds."""
    shared = [row for row in rows if not row.own_process]
    # Each equation (start + kernel * n) / t = 1.
    ones = [1 / row.seconds for row in shared]
    counts = [row.kernels / row.seconds for row in shared]
    a, b, c = (sum(x * y for x, y in zip(p, q, strict=True))
               for p, q in ((ones, ones), (ones, counts), (counts, counts)))  # fmt: skip
    u, v = sum(ones), sum(counts)
    start_s, kernel_s = (u * c - v * b) / (a * c - b * b), (v * a - u * b) / (a * c - b * b)
    alone = [row for row in rows if row.own_process and not row.held_out]
    more = (row.seconds - start_s - kernel_s * row.kernels for row in alone)
    return Fitted(statistics.median(more), start_s, kernel_s)


def ratios(rows: Sequence[Compilation], fitted: Fitted) -> list[float]:
    """Return measured over fitted seconds, in ascending order."""
    return sorted(row.seconds / fitted.seconds(row) for row in rows)


def describe(found: Sequence[float]) -> str:
    """Return median error and range of ratios."""
    off = statistics.median(abs(ratio - 1) for ratio in found)
    return (
        f"{len(found)} compilations: median error {off:.0%}, {found[0]:.2f} to {found[-1]:.2f} times the fit"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", choices=("count", "fit"))
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    options = parser.parse_args(arguments)
    if options.task == "count":
        count(options.file)
        return 0
    rows = compilations(options.file)
    fitted = fit(rows)
    print(f"process_s {fitted.process_s:.2f}, start_s {fitted.start_s:.2f}, kernel_s {fitted.kernel_s:.4f}")
    for name, some in groups(rows).items():
        print(f"{name}: {describe(ratios(some, fitted))}")
    return 0


def groups(rows: Sequence[Compilation]) -> dict[str, list[Compilation]]:
    """Return the compilations that are judged together."""
    return {
        "in one process": [row for row in rows if not row.own_process],
        "in a process each": [row for row in rows if row.own_process and not row.held_out],
        "in a process each, held out": [row for row in rows if row.held_out],
    }


if __name__ == "__main__":
    raise SystemExit(main())
