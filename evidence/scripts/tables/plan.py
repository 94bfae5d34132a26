"""Tables of evidence/pages/plan.md: measured recipes ordered by prediction, and the first choice."""

from __future__ import annotations

import itertools
from collections import defaultdict

from evidence.scripts.tables.joined import join, records
from trainfit.planning.search.candidate import MARGIN
from trainfit.report.compare import Comparison
from trainfit.report.table import NOTHING, markdown_grid
from trainfit.spec.units import GIB

FILES = (
    "h200-*.jsonl", "techniques/*.jsonl", "peak-memory*/records.jsonl", "recompute-budget-*/records.jsonl",
    "several-gpus/suite-*.jsonl", "several-gpus/speed-*.jsonl",
)  # fmt: skip
LEAST = 8
"""Recipes of a group."""
CAPS_GIB = (24, 48, 139)
APART = 0.03
"""Least difference of two measured speeds whose order counts."""
Group = tuple[str, int, str, int]
"""Model, tokens a sequence, full or adapter, GPUs."""


def groups() -> dict[Group, list[Comparison]]:
    """Return the recipes, predicted and measured with a speed, of each group of many."""
    found: dict[Group, dict[str, Comparison]] = defaultdict(dict)
    for one in join(records(*FILES)):
        recipe, measured, predicted = one.recipe, one.measured, one.predicted
        if measured is None or predicted is None or not (measured.tokens_per_s and predicted.tokens_per_s):
            continue
        kind = "full" if recipe.adapter is None else "adapter"
        name = recipe.model.display_name.partition(",")[0]
        found[name, recipe.batch.seq, kind, recipe.hardware.count][recipe.id] = one
    return {key: list(some.values()) for key, some in sorted(found.items()) if len(some) >= LEAST}


def ordered(some: list[Comparison]) -> tuple[int, int]:
    """Return how many pairs are apart when measured, and how many of these are predicted in that order."""
    pairs = right = 0
    for a, b in itertools.combinations(some, 2):
        first, second = _measured(a), _measured(b)
        if abs(first - second) >= APART * max(first, second):
            pairs += 1
            right += (first - second) * (_predicted(a) - _predicted(b)) > 0
    return pairs, right


def kept(some: list[Comparison], cap_gib: float) -> float | None:
    """Return the measured speed of the first choice within a limit, over that of the fastest within it."""
    allowed = [one for one in some if _device_bytes(one) <= cap_gib * GIB * (1 - MARGIN)]
    within = [one for one in some if _measured_bytes(one) <= cap_gib * GIB]
    if len(within) < 2 or not allowed:
        return None
    return _measured(max(allowed, key=_predicted)) / max(map(_measured, within))


def agreement() -> str:
    """Return a row a group: pairs in the right order, and the speed that the first choice keeps."""
    rows = []
    for (model, seq, kind, gpus), some in groups().items():
        pairs, right = ordered(some)
        shares = [kept(some, cap) for cap in CAPS_GIB]
        rows.append(
            [
                f"{model}, {seq} tokens, {kind}" + (f", {gpus} GPUs" if gpus > 1 else ""), str(len(some)),
                str(pairs), f"{right / pairs:.1%}" if pairs else NOTHING,
                *(NOTHING if share is None else f"{share:.1%}" for share in shares),
            ]
        )  # fmt: skip
    heads = [f"first choice of {cap} GiB" for cap in CAPS_GIB]
    titles = ["group", "recipes", "pairs apart", "in the right order", *heads]
    return markdown_grid(titles, rows, is_number=[False, *[True] * 6])


def _measured(one: Comparison) -> float:
    assert one.measured is not None
    return one.measured.tokens_per_s or 0.0


def _predicted(one: Comparison) -> float:
    assert one.predicted is not None
    return one.predicted.tokens_per_s or 0.0


def _device_bytes(one: Comparison) -> int:
    assert one.predicted is not None
    return one.predicted.highest.device


def _measured_bytes(one: Comparison) -> int:
    assert one.measured is not None
    return one.measured.peak_device_bytes or one.measured.peak_reserved_bytes or _device_bytes(one)
