"""Fit what the power limit adds to attention, to steps of one H200 and H100 and to profiled ones.

    python -m evidence.scripts.attention_power STEPS.jsonl

Steps are those of the accuracy suite that may be learned from and in which the GPU decides, and those with
long attention of evidence/records/speed. A profiled step (step_kernels.py) gives attention's seconds
themselves. All values of a grid are tried; an error far above the others weighs little. Printed are the best
values, how little worse the best of every other ``attention_from`` are, and each step that is not of the
suite, measured over expected. Steps of attention-h200 and sdpa-h200 were predicted first, by an earlier fit
and by this one; they are not learned from. All steps are written to STEPS.jsonl. Ledgers come from the cache
or are traced.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf, log
from pathlib import Path
from typing import NamedTuple

from evidence.scripts.accuracy.held_out import is_held_out
from evidence.scripts.step_time import ledger_of, measured
from evidence.scripts.tables.joined import RESULTS, join
from trainfit.catalog.rates import PowerRates, TensorShares, rates
from trainfit.prediction.machine import Machine, machine_of
from trainfit.prediction.time.roofline import HOST_BOUND, roofline, tensor_shares
from trainfit.records import load
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import say
from trainfit.spec.recipe import Recipe

LEARNED = ("one-h200", "32b-h200", "long-h200", "one-h100-steps")
CHECKED, SUITE = ("attention-h200", "sdpa-h200"), "suite"
PROFILES = ("step-kernels-h200.jsonl", "step-kernels-bf16.jsonl", "step-kernels-blocks.jsonl")
"""Profiled steps whose attention is as the calibrations have it today."""
NOISE = 0.03
"""Standard deviation of the logarithm of a step, and of attention in a profile."""
LEAST_ATTENTION = 0.03
"""Share of attention in the step below which it says nothing."""
GRID = {
    "attention_from": (0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85),
    "attention_slope": (0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0),
    "attention_load": (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "fp8_load": (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6),
}

Values = tuple[float, ...]
"""A point of the grid."""


class Step(NamedTuple):
    """A measured step, or its attention alone, and what is expected of it at full clocks."""

    name: str
    kind: str
    shares: TensorShares
    measured_s: float
    rest_s: float  # Without attention
    attention_s: float

    def ratio(self, power: PowerRates) -> float:
        """Return the measured over the expected time."""
        return self.measured_s / (self.rest_s + power.attention_slowdown(self.shares) * self.attention_s)


def at_full_clocks(machine: Machine) -> Machine:
    """Return a machine whose attention the power limit leaves alone."""
    power = machine.known.rates.power.model_copy(update={"attention_from": inf})
    known = machine.known.rates.model_copy(update={"power": power})
    return replace(machine, known=replace(machine.known, rates=known))


def step_of(kind: str, name: str, recipe: Recipe, measured_s: float) -> Step | None:
    """Return a whole step; None where the host decides it."""
    ledger, machine = ledger_of(recipe, None), at_full_clocks(machine_of(recipe.hardware))
    found = roofline(ledger, machine)
    assert found is not None
    time = found.expected
    if time.host_s > HOST_BOUND * time.total:
        return None
    shares = tensor_shares(ledger, machine)
    return Step(name, kind, shares, measured_s, time.total - time.attention_s, time.attention_s)


def of_records(name: str) -> Iterator[tuple[str, Recipe, float]]:
    """Yield the name, recipe and seconds of each measured step of a file of evidence/records/speed."""
    for one in join(load(RESULTS / f"speed/{name}-measured.jsonl")):
        if one.measured and one.measured.step_s:
            recipe = one.recipe
            sequences = f"{recipe.batch.micro} x {recipe.batch.seq}"
            yield f"{recipe.model.config} {sequences} {recipe.precision}", recipe, one.measured.step_s


def steps() -> Iterator[Step]:
    """Yield whole steps and profiled attention."""
    for recipe, step_s in measured():
        if not is_held_out(recipe.id) and (found := step_of(SUITE, recipe.id, recipe, step_s)):
            yield found
    for name in (*LEARNED, *CHECKED):
        for title, recipe, step_s in of_records(name):
            if found := step_of(name, title, recipe, step_s):
                yield found
    for file in PROFILES:
        for record in map(json.loads, (RESULTS / "step-kernels" / file).read_text("utf-8").splitlines()):
            measured_s = next(kind["seconds"] for kind in record["kinds"] if kind["name"] == "attention")
            if whole := step_of("profile", record["name"], recipe_from(record["recipe"]), measured_s):
                yield whole._replace(rest_s=0.0)


def loss(learned: Sequence[Step], power: PowerRates) -> float:
    """Return the misfit of steps, in which one far off weighs little."""
    return sum(log(1 + (log(step.ratio(power)) / NOISE) ** 2 / 2) for step in learned)


def ranked(learned: Sequence[Step], known: PowerRates) -> list[tuple[float, Values]]:
    """Return the misfit of each point of the grid, best first."""
    points = list(product(*GRID.values()))
    return sorted((loss(learned, with_values(known, values)), values) for values in points)


def with_values(known: PowerRates, values: Values) -> PowerRates:
    return known.model_copy(update=dict(zip(GRID, values, strict=True)))


def is_learned_from(step: Step) -> bool:
    return step.kind not in CHECKED and step.shares.attention > LEAST_ATTENTION


def written(file: Path) -> list[Step]:
    """Return the steps of a file that ``main`` wrote."""
    rows = map(json.loads, file.read_text("utf-8").splitlines())
    return [Step(**row | {"shares": TensorShares(**row["shares"])}) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    known, found = rates().power, list(steps())
    lines = [json.dumps(step._asdict() | {"shares": step.shares._asdict()}) + "\n" for step in found]
    file.write_text("".join(lines), encoding="utf-8")
    learned = list(filter(is_learned_from, found))
    results = ranked(learned, known)
    say(f"{len(learned)} steps are learned from; the best of each {next(iter(GRID))}:")
    for start in GRID["attention_from"]:
        misfit, values = next(one for one in results if one[1][0] == start)
        say(f"{'  '.join(f'{name} {value}' for name, value in zip(GRID, values, strict=True))}: {misfit:.2f}")
    say(f"rates.toml: {loss(learned, known):.2f}")
    for step in found:
        if step.kind != SUITE:
            load_of, slowdown = known.load(step.shares), known.attention_slowdown(step.shares)
            say(
                f"{step.kind:15} {step.name:28} load {load_of:.2f}  attention {step.shares.attention:4.0%}, "
                f"{slowdown:.2f} times  measured / expected {step.ratio(known):.3f}"
            )


if __name__ == "__main__":
    main()
