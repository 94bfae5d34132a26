"""Fit the host's costs of scripts, from evidence/records/script-steps.

    python -m evidence.scripts.script_steps.fit

Weighted least squares of the logarithms of measured over expected steps, of scripts whose step the host
decides: launches, calls of Python functions and recomputed blocks, each times its cost. A script that is far
off weighs less. Prints the costs, each script's error, and its error by a fit of the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

FOLDER = Path("evidence/records/script-steps")
MEASURED = ("learned", "held-out", "held-out-again")
COSTS = ("num_launches", "num_python_calls", "num_recomputed_blocks")
START_S = (2.5e-5, 2.5e-6, 5e-4)
WAITS = 1.4
"""A step of so many times the GPU's busy time is the host's."""
FAR = 0.15
RANGE = (0.82, 1.23)


def rows(*names: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of files in the folder."""
    for name in names:
        for line in (FOLDER / f"{name}.jsonl").read_text("utf-8").splitlines():
            yield json.loads(line)


def fitted(counts: Any, seconds: Any) -> Any:
    """Return the costs, in seconds, of a count by scripts and costs."""
    logs = np.log(np.array(START_S))
    for _ in range(500):
        costs = np.exp(logs)
        expected = counts @ costs
        slopes, errors = counts * costs / expected[:, None], np.log(seconds / expected)
        weights = np.sqrt(1 / np.maximum(1, np.abs(errors) / FAR))[:, None]
        logs += 0.3 * np.linalg.lstsq(slopes * weights, errors * weights[:, 0], rcond=1e-9)[0]
        logs = np.clip(logs, -25, 0)
    return np.exp(logs)


def main() -> tuple[int, int]:
    """Fit, print what comes out, and return how many steps lie inside the range, of how many."""
    files = (f"{name}-measured" for name in MEASURED)
    measured = {(row["script"], row["size"]): row["measured"] for row in rows(*files)}
    counted = {row["script"]: row["predicted"] for row in rows("predicted-anew") if row["size"] == "small"}
    names = list(counted)
    counts = np.array([[counted[name][cost] for cost in COSTS] for name in names], float)
    seconds = []
    for name in names:
        both = [measured[name, size] for size in ("small", "whole")]
        waiting = [one["median_s"] for one in both if one["median_s"] > WAITS * one["busy_s"]]
        seconds.append(float(np.exp(np.mean(np.log(waiting)))))
    costs = fitted(counts, np.array(seconds))
    print({name: f"{cost:.3g}" for name, cost in zip(COSTS, costs, strict=True)})
    inside, alone = [], []
    for number, name in enumerate(names):
        others = [each for each in range(len(names)) if each != number]
        by_others = counts[number] @ fitted(counts[others], np.array(seconds)[others])
        expected = counts[number] @ costs
        error, by_others = expected / seconds[number] - 1, by_others / seconds[number] - 1
        alone.append(abs(by_others))
        took = f"{name:26} {seconds[number] * 1e3:7.1f} ms"
        print(f"{took}, expected {error:+.0%}, by the others {by_others:+.0%}")
        for size in ("small", "whole"):
            one = measured[name, size]
            ratio = one["median_s"] / max(expected, one["busy_s"])
            inside.append(RANGE[0] <= ratio <= RANGE[1])
    errors = np.abs(counts @ costs / np.array(seconds) - 1)
    print(f"median {median(errors):.1%}, worst {max(errors):.1%}")
    print(f"by the others: median {median(alone):.1%}, worst {max(alone):.1%}")
    print(f"{sum(inside)} of {len(inside)} steps inside {RANGE[0]} to {RANGE[1]} times")
    return sum(inside), len(inside)


if __name__ == "__main__":
    main()
