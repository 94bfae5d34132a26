"""Sentences of a page that come from its rows: what a run of ``transformer``, ``kernels`` or ``memory`` says.

Enters: rows of one device. Leaves: sentences, none where the rows for it are missing; unsteady times make none.
"""

from collections.abc import Mapping, Sequence

from trainfit.report.bench_rows import (
    COMPILES,
    PRECISIONS,
    SIZES,
    having,
    low_to_high,
    median_s,
    number,
    values,
)
from trainfit.report.bench_step_tables import EXACT
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.units import GIB

UNDER = 0.1
"""The share that published claims stay below."""
WARM = {"warm-up": 5}
WHOLE, SHARE = "whole step", "_share"


def of_transformer(rows: Sequence[BenchRow]) -> list[str]:
    """How much faster each precision is than fp32, and each compilation than eager."""
    told: list[str] = []
    for precision in PRECISIONS[1:]:
        gains: list[tuple[float, str]] = []
        for model in values(rows, "model"):
            point = {**WARM, "model": model, "compile": "false"}
            slow, fast = (
                median_s(rows, point | {"precision": name}, steady=True) for name in ("fp32", precision)
            )
            gains += [(slow / fast, str(model))] if slow and fast else []
        if gains:
            told.append(
                f"Eager, a whole step in {precision} is {low_to_high(gains)} times as fast as in fp32."
            )
    for mode, name in list(COMPILES.items())[1:]:
        gains = []
        for point in _models_and_precisions(rows):
            slow, fast = (median_s(rows, point | {"compile": one}, steady=True) for one in ("false", mode))
            gains += [(slow / fast, f"{point['model']}, {point['precision']}")] if slow and fast else []
        if gains:
            slower = sum(gain < 1 for gain, _ in gains)
            told.append(
                f"Compiled ({name}), a step is {low_to_high(gains)} times as fast as eager, of {len(gains)} pairs that are both steady"
                f"{f', slower in {slower}' if slower else ''}."
            )
    return told


def _models_and_precisions(rows: Sequence[BenchRow]) -> list[dict[str, Cell]]:
    pairs = [(model, mode) for model in values(rows, "model") for mode in values(rows, "precision")]
    return [{**WARM, "model": model, "precision": mode} for model, mode in pairs]


def of_warm_up(rows: Sequence[BenchRow]) -> str:
    """The mean of ten steps from the very first one on, over that of ten steps after the warm-up."""
    told: list[str] = []
    for mode, name in COMPILES.items():
        grown: list[tuple[float, str]] = []
        for row in having(rows, {**WARM, "compile": mode}):
            cold = having(rows, dict(row.point) | {"warm-up": 0})
            first = number(cold[0], "total_mean_s") if cold else None
            later = number(row, "total_mean_s")
            if first and later:
                grown.append((first / later, f"{row.point['model']}, {row.point['precision']}"))
        if grown:
            told.append(f"{name} {low_to_high(grown)}")
    if not told:
        return ""
    return f"the mean of ten steps without warm-up over that after five: {'; '.join(told)}. The median of ten hides it, the mean does not."


def of_kernels(rows: Sequence[BenchRow]) -> list[str]:
    """Softmax's share of a forward, the optimizer's of a whole step, and attention's products beside softmax."""
    told = [
        *_largest_parts(rows),
        _busy(rows),
        _share(rows, "forward", "softmax_share", "Softmax takes", "of a forward's busy time"),
        _share(rows, WHOLE, "optimizer_share", "The optimizer takes", "of a whole step's"),
    ]
    core = [row for row in rows if row.point.get("attention's core in") == "forward" and row.numbers]
    for mode in dict.fromkeys(row.point["precision"] for row in core):
        mine = [row for row in core if row.point["precision"] == mode]
        times, flops = ([float(row.numbers[f"{of}_ratio"]) for row in mine] for of in ("time", "flops"))
        told.append(
            f"In {mode} the two products of attention's core take {min(times):.2f} to {max(times):.2f} times as long as softmax in the "
            f"forward, with {min(flops):.0f} to {max(flops):.0f} times its FLOPs."
        )
    return [line for line in told if line]


def _largest_parts(rows: Sequence[BenchRow]) -> list[str]:
    """The four parts that take most of the largest model's step at a context of 512, by precision."""
    profiled = having(rows, {"profiled": WHOLE, "context": 512})
    told: list[str] = []
    for model in [size for size in SIZES if having(profiled, {"model": size})][-1:]:
        for row in having(profiled, {"model": model}):
            shares = {name: number(row, name) or 0.0 for name in row.numbers if name.endswith(SHARE)}
            most = sorted(shares, key=lambda name: -shares[name])[:4]
            parts = ", ".join(
                f"{name.removesuffix(SHARE).replace('_', ' ')} {shares[name]:.1%}" for name in most
            )
            told.append(
                f"Of a whole step of {model} in {row.point['precision']} at a context of 512 most is {parts}."
            )
    return told


def _busy(rows: Sequence[BenchRow]) -> str:
    """How much of a whole step's time the device works."""
    found = [
        (share, row.point)
        for row in having(rows, {"pass": WHOLE})
        if row.status == "done" and (share := number(row, "busy_share")) is not None
    ]
    if not found:
        return ""
    (least, at_least), (most, at_most) = (pick(found, key=lambda one: one[0]) for pick in (min, max))
    return (
        f"The device works {least:.1%} ({_point(at_least)}) to {most:.1%} ({_point(at_most)}) of a whole step's time; the rest it waits "
        "for the host."
    )


def _share(rows: Sequence[BenchRow], of: str, name: str, begins: str, ends: str) -> str:
    """The least and the greatest of a share, with their points, and how many are below ``UNDER``."""
    found = [
        (float(row.numbers[name]), row.point)
        for row in rows
        if row.point.get("pass") == of and name in row.numbers
    ]
    if not found:
        return ""
    (least, at_least), (most, at_most) = (pick(found, key=lambda one: one[0]) for pick in (min, max))
    below = sum(share < UNDER for share, _ in found)
    return (
        f"{begins} {least:.1%} ({_point(at_least)}) to {most:.1%} ({_point(at_most)}) {ends}, less than {UNDER:.0%} in {below} of "
        f"{len(found)} cases."
    )


def _point(point: Mapping[str, Cell]) -> str:
    return f"{point['model']}, {point['precision']}, context {point['context']}"


def of_small_shares(rows: Sequence[BenchRow]) -> str:
    """Which parts of a whole step stay below ``UNDER`` in every case, and how the optimizer's grows with the model where it does not."""
    profiled = [row for row in rows if row.point.get("profiled") == WHOLE and row.numbers]
    if not profiled:
        return ""
    most: dict[str, float] = {}
    for row in profiled:
        for name in row.numbers:
            if name.endswith(SHARE):
                most[name] = max(number(row, name) or 0.0, most.get(name, 0.0))
    below, above = ([name for name in most if (most[name] < UNDER) is small] for small in (True, False))
    told = [
        f"of a whole step, less than {UNDER:.0%} in each of {len(profiled)} cases are {_parts(below, most)}; not so {_parts(above, most)}."
    ]
    for precision in values(profiled, "precision"):
        for context in values(profiled, "context"):
            found = having(profiled, {"precision": precision, "context": context})
            shares = [(number(row, "optimizer_share") or 0.0, str(row.point["model"])) for row in found]
            if len(shares) > 2 and min(shares)[0] < UNDER <= max(shares)[0]:
                grown = ", ".join(f"{share:.1%} of {model}" for share, model in shares)
                told.append(
                    f"In {precision} at a context of {context} the optimizer takes {grown}: what is less than {UNDER:.0%} of a small "
                    "model's step need not be of a larger one's."
                )
    return " ".join(told)


def _parts(names: Sequence[str], most: Mapping[str, float]) -> str:
    words = [f"{name.removesuffix(SHARE).replace('_', ' ')} (at most {most[name]:.1%})" for name in names]
    return ", ".join(words) or "none"


def of_memory(rows: Sequence[BenchRow]) -> list[str]:
    """The measured peaks and what activations are of them, and how far predictions are off."""
    told: list[str] = []
    for row in rows:
        if (
            row.point.get("source") == "measured"
            and row.point.get("pass") == WHOLE
            and row.point["context"] in (512, 2048)
        ):
            share = _activations(row)
            if share is not None:
                told.append(
                    f"Context {row.point['context']:,}, {row.point['attention']} attention, {row.point['precision']}: a whole step's peak is "
                    f"{(number(row, 'peak_bytes') or 0) / GIB:.2f} GiB, {share:.0%} of it activations."
                )
    predicted = [row for row in having(rows, {"source": "predicted"}) if "off_by" in row.numbers]
    if predicted:
        exact = sum(row.numbers["off_by"] == EXACT for row in predicted)
        worst = max(
            (str(row.numbers["error"]) for row in predicted), key=lambda error: abs(float(error.rstrip("%")))
        )
        told.append(
            f"The predicted peak is the measured one to the byte in {exact} of {len(predicted)} runs"
            f"{'' if exact == len(predicted) else f', at worst off by {worst}'}."
        )
    told += _of_phases(rows, predicted)
    failed = [row for row in rows if row.point.get("source") == "measured" and row.status == "out-of-memory"]
    foretold = [
        row
        for row in failed
        if any(
            other.numbers.get("fits") is False
            for other in having(rows, dict(row.point) | {"source": "predicted"})
        )
    ]
    if failed:
        told.append(
            f"{len(failed)} runs were out of memory; the prediction says so of {len(foretold)} of them."
        )
    return told


def _of_phases(rows: Sequence[BenchRow], predicted: Sequence[BenchRow]) -> list[str]:
    """In how many phases the prediction is the measurement, and the one that is furthest off."""
    off: list[tuple[int, str]] = []
    for told in predicted:
        found = having(rows, dict(told.point) | {"source": "measured"})
        for phase in ("forward", "backward", "optimizer"):
            sizes = [number(row, f"{phase}_bytes") for row in (told, *found[:1])]
            if len(sizes) == 2 and None not in sizes:
                where = ", ".join(
                    str(told.point[key]) for key in ("attention", "context", "precision", "pass")
                )
                off.append((int(sizes[0] or 0) - int(sizes[1] or 0), f"{phase} of {where}"))
    if not off:
        return []
    furthest, where = max(off, key=lambda one: abs(one[0]))
    exact = sum(difference == 0 for difference, _ in off)
    return [
        f"Phase by phase, {exact} of {len(off)} are as measured to the byte"
        f"{f'; the furthest is off by {furthest:+,} bytes ({where})' if furthest else ''}."
    ]


def _activations(row: BenchRow) -> float | None:
    """Activations' share of what is alive at the timeline's highest point."""
    if row.curve is None or "activations" not in row.curve.columns:
        return None
    totals = [sum(sizes) for sizes in zip(*row.curve.columns.values(), strict=True)]
    at = totals.index(max(totals))
    return row.curve.columns["activations"][at] / totals[at] if totals[at] else None


def of_first_steps(rows: Sequence[BenchRow]) -> str:
    """First and later peaks of whole steps by context, eager attention in fp32."""
    told = having(rows, {"source": "measured", "pass": WHOLE, "attention": "eager", "precision": "fp32"})
    pairs = [
        (row.point["context"], number(row, "first_peak_bytes"), number(row, "peak_bytes")) for row in told
    ]
    known = [
        f"{first / GIB:.2f} and {later / GIB:.2f} GiB at {context}"
        for context, first, later in pairs
        if first and later
    ]
    return f"first step and later ones, fp32: {', '.join(known)}." if known else ""


def of_mixed_precision(rows: Sequence[BenchRow]) -> str:
    """Peaks of fp32 and amp-bf16 of the same run."""
    told: list[str] = []
    for row in rows:
        if (row.point.get("source"), row.point.get("precision"), row.point.get("pass")) != (
            "measured",
            "amp-bf16",
            WHOLE,
        ):
            continue
        fp32 = having(rows, dict(row.point) | {"precision": "fp32"})
        before, after = (
            number(one, "peak_bytes") if one else None for one in (fp32[0] if fp32 else None, row)
        )
        if before and after:
            at = f"{row.point['attention']}, {row.point['context']:,}"
            told.append(f"{before / GIB:.2f} to {after / GIB:.2f} GiB ({at})")
    return f"a whole step from fp32 to amp-bf16: {'; '.join(told)}." if told else ""


def of_products(rows: Sequence[BenchRow]) -> str:
    """The least and the greatest share of matrix products and of softmax in a forward."""
    told: list[str] = []
    for name, word in (("products_share", "matrix products"), ("softmax_share", "softmax")):
        shares = [
            share for row in having(rows, {"pass": "forward"}) if (share := number(row, name)) is not None
        ]
        told += [f"{min(shares):.1%} to {max(shares):.1%} {word}"] if shares else []
    return f"of a forward's busy time, {' and '.join(told)}." if told else ""
