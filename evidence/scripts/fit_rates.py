"""Fit the rates of catalog/rates.toml to the measured steps that may be learned from, and print them.

    python -m evidence.scripts.fit_rates [--iterations N] [--ledgers FOLDER] [--jobs N]
        [--bounds] [--small-steps]

Weighted least squares of the logarithms of predicted over measured steps (Gauss-Newton; the derivatives are
differences of whole predictions; a step far off weighs little). Each rate is held near its present value, as
far as the steps say nothing of it. Held-out recipes are not read. The steps' ledgers come from the cache or
are traced, or are those of a folder (evidence/scripts/step_time.py). Steps are those of the accuracy suite,
of the planner's choices (evidence/records/plan-choices), which are mostly products, and of machines whose
host was calibrated (evidence/records/step-time): the small steps of the calibration and recipes measured
beside it. How much longer each such host takes is fitted too, so that a user's ratio of small steps is that
of other steps.

With ``--bounds`` each step is predicted with rates fitted without its tenth of the recipes, and the ranges of
measured over predicted steps are printed.

With ``--small-steps`` nothing is fitted: what the rates of the catalog expect of the small steps of its
calibration is written into that file, with which the hosts of users' calibrations are compared. To be run
after each change of the rates.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain, product, repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evidence.scripts.accuracy.held_out import is_held_out
from evidence.scripts.step_time import ledger_of, measured
from evidence.scripts.tables.joined import RESULTS, join, records
from trainfit.catalog.load import FOLDER, gpu
from trainfit.catalog.rates import HostRates, Rates
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.machine import machine_with
from trainfit.prediction.time.roofline import HOST_BOUND, roofline
from trainfit.records import load
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import say
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import StepTime

CARD = gpu("h200")
CALIBRATION = FOLDER / "calibrations" / f"{CARD.name}.json"
STEP = 0.02
"""Relative change of a rate by which its derivative is taken."""
PRIOR = 0.5
"""Standard deviation of a rate's logarithm around its present value."""
NOISE = {False: 0.03, True: 0.08}
"""Standard deviation of a step's logarithm, by whether the host decides it: hosts differ from day to day."""
SMALL_NOISE = 0.15
"""That of a small step of a calibration: the same forward takes 4 to 6 ms within a minute."""
STEP_TIME = RESULTS / "step-time"
HOSTS: dict[str, tuple[tuple[Path, ...], tuple[Path, ...]]] = {
    "catalog": ((FOLDER / "calibrations" / f"{CARD.name}.json",), ()),
    "other": ((STEP_TIME / "other-host-calibration.json",), ()),
    "blind": (
        (STEP_TIME / "blind-host-calibration.json",),
        (STEP_TIME / "blind-measured.jsonl", STEP_TIME / "small-measured.jsonl"),
    ),
    **{
        name: (
            (STEP_TIME / f"{name}-calibration-before.json", STEP_TIME / f"{name}-calibration-after.json"),
            (STEP_TIME / f"{name}-measured.jsonl",),
        )
        for name in ("host1", "host2")
    },
}
"""A machine -> calibrations of its host, and records of recipes that were measured beside them."""
NOT_FITTED = (
    "wrapped", "wrapped_tensor", "collective", "unshard", "unshard_parameter", "reduce", "reduce_parameter",
    "in_mode", "scaled_product", "python_update",
)  # fmt: skip
"""Costs of the host that the steps do not have."""
HELD = ("kernel_s",)
"""Rates left as they are: the least time of a launch, fitted, makes up for what small kernels lack."""
FOLDS = 10
RATIO = 1.5
"""Of a calibrated host over that of the catalog, before it is fitted."""
CHOICES = "plan-choices/measured-*.jsonl"
STEADY = 1.1
"""A recipe's slowest step over its fastest, beyond which something else kept the host busy."""
Vector = NDArray[np.float64]


class Measured(NamedTuple):
    """A measured step."""

    ledger: Ledger
    step_s: float
    is_compiled: bool
    machine: str = ""
    """Whose host was calibrated; else empty."""
    noise: float = 0.0
    """Standard deviation of its logarithm; else by what decides it."""


class Linear(NamedTuple):
    """Steps near a vector of rates: logarithms of predicted over measured, their derivatives and weights."""

    residual: Vector
    derivatives: Vector
    weights: Vector


class Fit:
    """Steps that are fitted, and the rates as a vector of logarithms."""

    def __init__(self, steps: Sequence[Measured]):
        self.steps, self.measured = steps, np.log([one.step_s for one in steps])
        self.base = machine_with(CARD)
        data = self.base.known.rates.model_dump()
        self.names = [
            *(name for name, value in data.items() if isinstance(value, float) and name not in HELD),
            "power.slope",
            *(f"host.{name}" for name in data["host"] if name not in NOT_FITTED),
        ]
        machines = sorted({one.machine for one in steps if one.machine})
        known = [self._get(self.base.known.rates, name) for name in self.names] + [RATIO] * len(machines)
        self.names += [f"ratio.{machine}" for machine in machines]
        self.start = np.log(known)

    @staticmethod
    def _get(rates: Rates, name: str) -> float:
        table, _, field = name.rpartition(".")
        return getattr(getattr(rates, table) if table else rates, field)

    def rates(self, x: Vector, machine: str = "") -> Rates:
        """Return the rates of a vector, with the host of a machine."""
        values = dict(zip(self.names, np.exp(x).tolist(), strict=True))
        own: dict[str, object] = {name: value for name, value in values.items() if "." not in name}
        for table in ("power", "host"):
            of_table = {
                field: value
                for name, value in values.items()
                for of, _, field in (name.rpartition("."),)
                if of == table
            }
            own[table] = getattr(self.base.known.rates, table).model_copy(update=of_table)
        found = self.base.known.rates.model_copy(update=own)
        if not machine:
            return found
        ratio = values[f"ratio.{machine}"]
        host = HostRates(**{name: seconds * ratio for name, seconds in found.host})
        return found.model_copy(update={"host": host})

    def times(self, x: Vector, which: Sequence[int] | None = None) -> list[StepTime]:
        """Return the expected steps with a vector's rates."""
        known = {
            one: replace(self.base, known=replace(self.base.known, rates=self.rates(x, one)))
            for one in {step.machine for step in self.steps}
        }
        found = [
            roofline(self.steps[at].ledger, known[self.steps[at].machine])
            for at in (range(len(self.steps)) if which is None else which)
        ]
        return [one.expected for one in found if one is not None]

    def derivative(self, x: Vector, at: int, now: Sequence[StepTime]) -> Vector:
        """Return the derivatives of the logarithms of the steps by a rate's."""
        found, name = np.zeros(len(now)), self.names[at]
        # The host's costs hardly change a step in which the GPU hardly waits.
        table, _, field = name.rpartition(".")
        which = [
            i
            for i, one in enumerate(now)
            if (one.host_s > 0.01 * one.total or table not in ("host", "ratio"))
            and (table != "ratio" or self.steps[i].machine == field)
        ]
        nudged = x.copy()
        nudged[at] += STEP
        for i, one in zip(which, self.times(nudged, which), strict=True):
            found[i] = np.log(one.total / now[i].total) / STEP
        return found

    def linearised(self, x: Vector, jobs: int) -> Linear:
        """Return the steps near a vector of rates."""
        now = self.times(x)
        columns = range(len(x))
        if jobs > 1:
            context = get_context("fork")  # The ledgers are shared, not sent.
            with ProcessPoolExecutor(jobs, context, initializer=_share, initargs=(self,)) as pool:
                found = list(pool.map(_derivative, repeat(x), columns, repeat(now)))
        else:
            found = [self.derivative(x, at, now) for at in columns]
        residual = np.log([one.total for one in now]) - self.measured
        noise = np.array(
            [step.noise or NOISE[_waits(one)] for step, one in zip(self.steps, now, strict=True)]
        )
        return Linear(residual, np.stack(found, axis=1), 1 / (noise**2 + residual**2))

    def improved(self, x: Vector, near: Linear, without: Sequence[int] = ()) -> Vector:
        """Return the vector that fits best near another, some steps left out."""
        weights = near.weights.copy()
        weights[list(without)] = 0
        rows = near.derivatives
        left = rows.T @ (weights[:, None] * rows) + np.eye(len(x)) / PRIOR**2
        right = rows.T @ (weights * -near.residual) - (x - self.start) / PRIOR**2
        return x + np.linalg.solve(left, right)

    def left_out(self, x: Vector, near: Linear) -> list[StepTime]:
        """Return each step predicted with rates fitted without its fold."""
        found: dict[int, StepTime] = {}
        for fold in range(FOLDS):
            which = range(fold, len(self.steps), FOLDS)
            own = self.improved(x, near, which)
            found |= dict(zip(which, self.times(own, which), strict=True))
        return [found[at] for at in range(len(self.steps))]


_shared: list[Fit] = []
"""In a process of the pool, the fit."""


def _share(fit: Fit) -> None:
    _shared[:] = [fit]


def _derivative(x: Vector, at: int, now: Sequence[StepTime]) -> Vector:
    return _shared[0].derivative(x, at, now)


def _waits(step: StepTime) -> bool:
    return step.host_s > HOST_BOUND * step.total


def chosen() -> Iterator[tuple[Recipe, float]]:
    """Yield the measured recipes of the planner's choices whose steps took about as long as one another."""
    for one in join(record for record in records(CHOICES) if record.measurement is not None):
        times = one.measured.step_times if one.measured else None
        if times and max(times.samples) <= STEADY * min(times.samples):
            yield one.recipe, times.median


def beside_calibrations(folder: Path | None) -> Iterator[Measured]:
    """Yield small steps of calibrated hosts, and steps measured beside them that may be learned from."""
    for machine, (calibrations, files) in HOSTS.items():
        for file in calibrations:
            for step in json.loads(file.read_text(encoding="utf-8"))["host_steps"]:
                recipe = small_recipe(step["recipe"])
                ledger = ledger_of(recipe, folder)
                yield Measured(ledger, step["step_s"], recipe.compile is not False, machine, SMALL_NOISE)
        for one in join(chain.from_iterable(map(load, files))):
            times = one.measured.step_times if one.measured else None
            if times and not is_held_out(one.recipe.id):
                is_compiled = one.recipe.compile is not False
                yield Measured(ledger_of(one.recipe, folder), times.median, is_compiled, machine)


def small_recipe(data: dict[str, Any]) -> Recipe:
    """Return the recipe of a calibration's small step."""
    return recipe_from(data | {"hardware": {"gpu": CARD.name}})


def summary(times: Sequence[StepTime], measured_s: Sequence[float]) -> str:
    """Return the errors by what decides."""
    lines = []
    for deciding, waits in (("GPU", False), ("host", True)):
        ratios = [
            took_s / one.total for one, took_s in zip(times, measured_s, strict=True) if _waits(one) == waits
        ]
        if len(ratios) > 1:
            errors = sorted(abs(1 / ratio - 1) for ratio in ratios)
            cuts = quantiles(ratios, n=40, method="inclusive")
            lines.append(
                f"{deciding}: {len(ratios)} steps, error {median(errors):.1%}, worst {errors[-1]:.1%}; "
                f"measured over predicted, middle 95 %: {cuts[0]:.3f} to {cuts[-1]:.3f}, "
                f"90 %: {cuts[1]:.3f} to {cuts[-2]:.3f}"
            )
    return "\n".join(lines)


def ranges(times: Sequence[StepTime], measured_s: Sequence[float], compiled: Sequence[bool]) -> str:
    """Return ranges of measured over predicted steps: of all, and with a tenth of new ones outside.

    Between the k-th lowest and the k-th highest of n lie (n + 1 - 2 k) / (n + 1) of new ones, in the mean.
    """
    lines = []
    for waits, is_compiled in product((False, True), repeat=2):
        ratios = sorted(
            took_s / one.total
            for one, took_s, kind in zip(times, measured_s, compiled, strict=True)
            if (_waits(one), kind) == (waits, is_compiled)
        )
        if ratios:
            outside = max(0, (len(ratios) + 1) // 20 - 1)
            kind = f"{'compiled' if is_compiled else 'eager'}, {'host' if waits else 'GPU'}"
            lines.append(
                f"{kind}: {len(ratios)} steps, "
                f"{ratios[0]:.3f} to {ratios[-1]:.3f}; without {outside} at each end "
                f"{ratios[outside]:.3f} to {ratios[-1 - outside]:.3f}"
            )
    return "\n".join(lines)


def write_small_steps() -> None:
    """Write the expected seconds of the small eager steps into the catalog's calibration.

    Their ledgers are those of the torch that is installed: 2.11 and 2.13 differ by at most 3 %.
    """
    data = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    for step in data["host_steps"]:
        if not step["recipe"].get("compile"):
            recipe = small_recipe(step["recipe"])
            found = roofline(ledger_of(recipe, None), machine_with(CARD))
            assert found is not None
            step["expected_s"] = float(f"{found.expected.total:.4g}")
    ops = [json.dumps(row, separators=(",", ":")) for row in data["ops"]]
    text = json.dumps(data | {"ops": []}, separators=(",", ":"))
    CALIBRATION.write_text(text.replace('"ops":[]', '"ops":[' + ",\n".join(ops) + "]"), encoding="utf-8")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--ledgers", type=Path, metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--small-steps", action="store_true")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.small_steps:
        write_small_steps()
        return
    pairs = [*measured(), *chosen()]
    steps = [
        Measured(ledger_of(recipe, options.ledgers), took_s, recipe.compile is not False)
        for recipe, took_s in pairs
        if not is_held_out(recipe.id)
    ]
    known = len(steps)  # The bounds are those of steps on hosts that nothing is known of.
    took, compiled = [one.step_s for one in steps], [one.is_compiled for one in steps]
    fit = Fit([*steps, *beside_calibrations(options.ledgers)])
    x = fit.start
    say(summary(fit.times(x)[:known], took))
    for _ in range(options.iterations):
        x = fit.improved(x, fit.linearised(x, options.jobs))
        say(summary(fit.times(x)[:known], took))
    if options.bounds:
        say(ranges(fit.left_out(x, fit.linearised(x, options.jobs))[:known], took, compiled))
    for name, value in zip(fit.names, np.exp(x), strict=True):
        say(f"{name} = {value:.3g}")


if __name__ == "__main__":
    main()
