"""Fit what the power limit adds to attention: profiled steps beside the same kernels timed alone.

    python -m evidence.scripts.attention_power

Reads steps of step_kernels.py whose attention is as the calibrations have it today, and prints for each: the
load (shares of the step of what uses tensor cores, weighed by what it draws), attention's measured seconds
over those of kernels timed alone, and what the rates expect. The last line is the slope that fits best, with
the other rates as they are.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainfit.catalog.rates import PowerRates, rates
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.machine import Machine, machine_of
from trainfit.prediction.predict import ledger_of
from trainfit.prediction.time.device_time import op_s
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import say

FOLDER = Path(__file__).parents[1] / "records/step-kernels"
FILES = ("step-kernels-h200.jsonl", "step-kernels-bf16.jsonl", "step-kernels-blocks.jsonl")


def alone_s(ledger: Ledger, machine: Machine) -> float:
    """Return the seconds of a step's attention, were each kernel as fast as alone at full clocks."""
    known = replace(machine.known, rates=machine.known.rates.model_copy(update={"attention": 1.0}))
    fast = replace(machine, known=known)
    return sum(ledger.times(op) * op_s(op, fast) for op in ledger.steady_ops if op.kernel)


def load_of(record: dict[str, Any], power: PowerRates) -> float:
    """Return the load of a profiled step; its products count as fp8 where the recipe's precision is."""
    seconds = {kind["name"]: kind["seconds"] for kind in record["kinds"]}
    products, attention = (seconds[name] / record["step_s"] for name in ("matrix products", "attention"))
    weight = power.fp8_load if record["recipe"]["precision"] == "fp8" else 1.0
    return weight * products + power.attention_load * attention


def main() -> None:
    known = rates()
    slopes = list[tuple[float, float]]()
    for file in FILES:
        for record in map(json.loads, (FOLDER / file).read_text("utf-8").splitlines()):
            recipe = recipe_from(record["recipe"])
            measured_s = next(kind["seconds"] for kind in record["kinds"] if kind["name"] == "attention")
            ratio = measured_s / alone_s(ledger_of(recipe), machine_of(recipe.hardware))
            beyond = load_of(record, known.power) - known.power.share
            least = known.attention * known.power.attention
            expected = least * (1 + known.power.attention_slope * beyond)
            slopes.append((beyond, ratio / least - 1))
            say(
                f"{record['name']:22} load {beyond + known.power.share:.2f}  over alone {ratio:.3f}  "
                f"expected {expected:.3f}"
            )
    fitted = sum(x * y for x, y in slopes) / sum(x * x for x, _ in slopes)
    say(f"attention_slope: {fitted:.2f}")


if __name__ == "__main__":
    main()
