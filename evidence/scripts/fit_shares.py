"""Fit the shares that a GPU sustains (``sustained`` in catalog/gpus.toml) to published runs; print them.

``python -m evidence.scripts.fit_shares`` takes the predictions of ``evidence.scripts.published_runs``, of the
runs that may be learned from alone. It scales their products and their other operations from the catalog's
shares to others, and finds those with the least mean absolute logarithm of predicted over published steps.
Attention's share is that of published kernels, and the bandwidth's at most what copies reach.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from math import log
from typing import NamedTuple

from evidence.scripts.published_runs import FOLDER, RESULTS, Data, content, is_learned, predictions

GPUS = {"A100": ("a100-sxm4-40gb", "a100-sxm4-80gb"), "H100": ("h100-sxm", "h100-sxm-800g")}
PRODUCTS = [share / 100 for share in range(50, 96)]
MEMORY = [share / 100 for share in range(80, 93)]


class Shares(NamedTuple):
    """The shares fitted."""

    products: float
    memory: float


class _Step(NamedTuple):
    source: str
    published_s: float
    products_s: float
    memory_s: float
    others_s: float

    def error(self, at: Shares, to: Shares) -> float:
        scaled = self.products_s * at.products / to.products + self.memory_s * at.memory / to.memory
        return abs(log((scaled + self.others_s) / self.published_s))


def fit(gpus: Sequence[str], *, by_source: bool = False) -> Shares:
    """Return the shares that fit best.

    Args:
        gpus: rows whose runs count.
        by_source: every source counts alike, not every run.
    """
    from trainfit.catalog.load import gpu as find_gpu

    row = find_gpu(gpus[0]).sustained
    assert row is not None
    at, steps = Shares(row.products, row.memory), _steps(gpus)
    runs = Counter(one.source for one in steps)

    def total(to: Shares) -> float:
        return sum(one.error(at, to) / (runs[one.source] if by_source else 1) for one in steps)

    return min((Shares(products, memory) for products in PRODUCTS for memory in MEMORY), key=total)


def _steps(gpus: Sequence[str]) -> list[_Step]:
    found = list[_Step]()
    for file in RESULTS:
        rows = predictions(file)
        for run in content(file)["runs"]:
            recipe = run["recipe"]
            pipeline = "pipeline" in recipe.get("parallel", {})
            if recipe["hardware"]["gpu"] in gpus and is_learned(run["name"]) and not pipeline:
                found.append(_step(run, rows[run["name"]]))
    return found


def _step(run: Data, row: Data) -> _Step:
    time = row["time"]
    products_s = time["matmul_s"] - time["attention_s"]
    others_s = sum(time[part] for part in ("attention_s", "communication_s", "host_s"))
    step_s = products_s + time["memory_s"] + others_s
    published_s = step_s * row["tokens_per_s_per_gpu"] / run["tokens_per_s_per_gpu"]
    return _Step(run["source"], published_s, products_s, time["memory_s"], others_s)


def main() -> None:
    """Print the shares of every GPU."""
    from trainfit.spec.printable import say

    os.environ["TRAINFIT_CATALOG"] = str(FOLDER)
    for name, gpus in GPUS.items():
        say(f"{name}: every run alike {fit(gpus)}, every source alike {fit(gpus, by_source=True)}")


if __name__ == "__main__":
    main()
