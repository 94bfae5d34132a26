"""Predictions against measurements of the drawn recipes for two GPUs (evidence/scripts/several_gpus.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cache
from statistics import median

from evidence.scripts.accuracy.held_out import is_held_out
from evidence.scripts.tables import joined as records_of
from evidence.scripts.tables.errors import exact, share, worst
from evidence.scripts.tables.joined import RESULTS
from trainfit.records import load
from trainfit.report.compare import Comparison
from trainfit.report.table import markdown_grid
from trainfit.spec.result import Record

FOLDER = RESULTS / "several-gpus"
FILES = ("suite-predicted.jsonl", "suite-measured.jsonl")
ANEW = "suite-predicted-anew.jsonl"
"""Predictions of the same recipes by later code, if there are any."""
PEAKS = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "device": "peak_device_bytes",
}
LOWER = re.compile(r"^DDP rebuilds its buckets .* or [^()]+ \((\d+) bytes\)$")
"""Assumption of predictions that name the lower of two peaks in words, before they had it as a field."""
SPEED_FILES = ("speed-predicted.jsonl", "speed-measured.jsonl")
CLOSE = 0.005
"""Size of an error of the reserved peak up to which recipes are counted."""
HALVES = {False: "learned from", True: "held out"}


def joined(some: Iterable[Record], *, first: bool = False) -> list[Comparison]:
    """Return a comparison of each measured recipe, in the order of its prediction.

    The newest prediction and the newest measurement count, or the first of each; whatever their versions.
    """
    predicted: dict[str, Record] = {}
    measured: dict[str, Record] = {}
    for record in some:
        of_kind = predicted if record.estimate is not None else measured
        if not (first and record.recipe_id in of_kind):
            of_kind[record.recipe_id] = record
    return [
        Comparison(records_of.recipe_of(one), one.estimate, measured[name].measurement)
        for name, one in predicted.items()
        if name in measured
    ]


@cache
def suite() -> tuple[Comparison, ...]:
    """Return the recipes as first predicted and first measured."""
    return tuple(joined((record for name in FILES for record in load(FOLDER / name)), first=True))


@cache
def anew() -> tuple[Comparison, ...]:
    """Return the newest predictions and measurements of these recipes."""
    files = (FOLDER / ANEW, FOLDER / FILES[1])
    return tuple(joined(record for file in files if file.is_file() for record in load(file)))


def strategy_of(one: Comparison) -> str:
    """Return the recipe's strategy, as it is written in a table."""
    mesh = one.recipe.mesh
    if mesh.tensor > 1:
        return "tensor"
    return ("hsdp" if mesh.replicate > 1 else "fsdp") if mesh.shards_weights else mesh.strategy


def peak_error(one: Comparison, name: str) -> float | None:
    """Return the error of a peak of PEAKS; of DDP's two peaks the nearer one counts."""
    error = one.error(PEAKS[name])
    if error is None or one.predicted is None or one.measured is None:
        return None
    measured, others = getattr(one.measured, PEAKS[name]), list[int]()
    if name == "allocated":
        others += [int(found[1]) for line in one.predicted.assumptions if (found := LOWER.search(line))]
    return min([error, *((peak - measured) / measured for peak in others)], key=abs)


def allocated_error(one: Comparison) -> float | None:
    """Return the error of the allocated peak."""
    return peak_error(one, "allocated")


def _sizes(pairs: Sequence[Comparison], name: str) -> list[float]:
    return [error for one in pairs if (error := peak_error(one, name)) is not None]


def ratio(one: Comparison) -> float | None:
    """Return the measured step time over the predicted one."""
    error = one.error("step_s")
    return None if error is None else 1 / (1 + error)


def by_strategy() -> str:
    """Errors of the newest predictions of peaks and step times, by strategy."""
    pairs = anew()
    groups: dict[str, list[Comparison]] = {}
    for one in pairs:
        groups.setdefault(strategy_of(one), []).append(one)
    heads = [
        "strategy", "recipes", "allocated: exact", "worst", "reserved: within 0.5 %", "worst",
        "device: worst", "step, measured / predicted",
    ]  # fmt: skip
    lines = [_group(name, some) for name, some in sorted(groups.items())]
    return markdown_grid(heads, [*lines, _group("all", pairs)])


def halves() -> str:
    """Errors of step times as first committed and predicted anew, by half of the recipes."""
    lines = list[list[str]]()
    for held_out, title in HALVES.items():
        for name, pairs in {"as first committed": suite(), "predicted anew": anew()}.items():
            errors = step_errors(pairs, held_out)
            if errors:
                cells = (median(errors), errors[round(0.95 * (len(errors) - 1))], errors[-1])
                lines.append([title, name, str(len(errors)), *(f"{100 * each:.1f}" for each in cells)])
    heads = [
        "step, predicted / measured - 1",
        "predicted",
        "recipes",
        "median, %",
        "95th percentile, %",
        "worst, %",
    ]
    return markdown_grid(heads, lines)


def step_errors(pairs: Iterable[Comparison], held_out: bool) -> list[float]:
    """Return the sizes of the errors of the step time, in order, of one half of the recipes."""
    some = (one for one in pairs if is_held_out(one.recipe.id) == held_out)
    return sorted(abs(error) for one in some if (error := one.error("step_s")) is not None)


def _group(name: str, pairs: Sequence[Comparison]) -> list[str]:
    allocated, reserved = _sizes(pairs, "allocated"), _sizes(pairs, "reserved")
    return [
        name, str(len(pairs)), str(exact(allocated)), _worst(allocated), _close(reserved), _worst(reserved),
        _worst(_sizes(pairs, "device")), _ratios(pairs),
    ]  # fmt: skip


def _close(sizes: Sequence[float]) -> str:
    return str(sum(abs(size) <= CLOSE for size in sizes))


def _ratios(pairs: Sequence[Comparison]) -> str:
    times = sorted(value for one in pairs if (value := ratio(one)) is not None)
    return f"{median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})" if times else ""


def _worst(values: Sequence[float]) -> str:
    return share(worst(values), signed=True) if values else ""


@cache
def fsdp2(model: str) -> tuple[Comparison, ...]:
    """Return the measured recipes of one model of ``recipes/fsdp2``, on one and two GPUs."""
    found = joined(record for name in SPEED_FILES for record in load(FOLDER / name))
    return tuple(one for one in found if one.recipe.model.config == model)


def scaling_pairs() -> list[tuple[Comparison, Comparison]]:
    """Return each recipe of Llama-3.1-8B on two GPUs after the one with the same batch on one.

    Of several measurements on one GPU the nearest in time counts: machines differ from day to day.
    """
    records = [
        record for name in SPEED_FILES for record in load(FOLDER / name) if record.measurement is not None
    ]
    newest = {record.recipe_id: record for record in records}
    found = fsdp2("llama-3.1-8b")
    alone = {one.recipe.batch: one for one in found if one.recipe.hardware.count == 1}
    pairs = list[tuple[Comparison, Comparison]]()
    for one in found:
        if one.recipe.hardware.count == 2:
            when, other = _time(newest[one.recipe.id]), alone[one.recipe.batch]
            same = (record for record in records if record.recipe_id == other.recipe.id)
            nearest = min(same, key=lambda record, when=when: abs(_time(record) - when))
            pairs.append((Comparison(other.recipe, other.predicted, nearest.measurement), one))
    return pairs


def _time(record: Record) -> datetime:
    return datetime.fromisoformat(record.created_at)


def scaled(alone: Comparison, several: Comparison) -> float:
    """Return the speed of each of several GPUs over the speed of one alone, measured."""
    assert alone.measured is not None
    assert several.measured is not None
    return (alone.measured.step_s or 0.0) / (several.measured.step_s or 1.0)


def scaling() -> str:
    """Speed of each of two GPUs over that of one alone with the same batch, of Llama-3.1-8B."""
    lines: list[list[str]] = []
    for alone, several in scaling_pairs():
        batch, parallel = several.recipe.batch, several.recipe.parallel
        name = strategy_of(several)
        if name == "fsdp":
            name += ", resharded" if parallel.reshard_after_forward else ", kept after forward"
            name += ", reduced once" * (parallel.sync_each_batch is False)
            name += ", copy engines" * parallel.copy_engines
        size = f"{batch.micro} x {batch.seq}" + f" x {batch.accumulate}" * (batch.accumulate > 1)
        share_of_one = f"{scaled(alone, several):.1%}".replace("%", " %")
        lines.append([size, name, share_of_one, f"{ratio(several) or 0:.2f}"])
    heads = ["batch a GPU", "strategy", "speed a GPU, of one alone", "step, measured / first predicted"]
    return markdown_grid(heads, lines)


@cache
def measured_of(name: str) -> tuple[Comparison, ...]:
    """Return the measured recipes of ``NAME-predicted.jsonl``."""
    return tuple(
        joined(record for end in ("predicted", "measured") for record in load(FOLDER / f"{name}-{end}.jsonl"))
    )


MEASURED_LATER = {
    "meta": "models built on meta",
    "experts": "expert parallel, and the same model without it",
    "context": "context parallel",
    "nf4": "LoRA on a 4-bit base, on H100s",
}
"""Groups of recipes that were measured after the suite, and their titles."""


def later() -> str:
    """Errors of the peaks and step times of the recipes of MEASURED_LATER, by group."""
    lines: list[list[str]] = []
    for name, title in MEASURED_LATER.items():
        pairs = measured_of(name)
        worsts = [_worst(_sizes(pairs, peak)) for peak in PEAKS]
        lines.append([title, str(len(pairs)), *worsts, _ratios(pairs)])
    heads = ["recipes", "number", *(f"{peak}: worst" for peak in PEAKS), "step, measured / predicted"]
    return markdown_grid(heads, lines)
