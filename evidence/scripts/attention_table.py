"""The catalog's table of attention kernels, written from records of ``trainfit bench``.

``python -m evidence.scripts.attention_table RECORDS... [--into src/trainfit/catalog/attention.toml]``

Enters: files of Records. Leaves: the whole file anew, so a shape that no record given has is gone from it. Of
several records of a shape and GPU the newest counts, and only as a whole: kernels of one shape are compared
within one run; one that came to fewer kernels than an older one with the same torch does not take its place,
and one of fewer heads in all sequences neither. Rates are each kernel's own, forward and backward apart. Both
leave out what leaves a large GPU idle (``FEWEST_ROWS``), and medians of fewer than six samples.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainfit.catalog.attention import FILE, AttentionRate, AttentionRun, AttentionShape, Kernel
from trainfit.catalog.load import gpus
from trainfit.records import load, replace_text
from trainfit.spec.bench import BenchResult, BenchRow, Spread
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.printable import say
from trainfit.spec.recipe import AttentionKernel
from trainfit.spec.result import Record
from trainfit.virtual.cuda.attention_kernel import prefers_cudnn

MADE_BY = "python -m evidence.scripts.attention_table RECORDS"
KERNELS: dict[str, AttentionKernel] = {
    "eager": "eager", "pytorch": "sdpa", "flash": "flash", "cudnn": "cudnn", "efficient": "efficient",
    "ours": "triton",
}  # fmt: skip
"""A benchmark's body -> the recipe's word for it; bodies that no recipe can ask for are left out."""
ADDITIVE = "additive"
"""The mask of a row whose kernel was given one, as bench/workloads/attention.py has it, which imports
torch."""
NEEDED = ("dtype", "head", "causal", "seq", "heads", "batch", "body", "pass")
FEWEST_ROWS = 65536
"""Queries of all heads and sequences: in tiles of 128 rows, four times as many as an H200 has
multiprocessors, 132. One head of 32,768 reached up to a third less than one of 65,536 there."""
FEWEST_SAMPLES = 6
"""The fewest whose least and greatest hold the median with 95 % (bench/harness/timing.py)."""
HOPPER, GLUON_HEADS, WIDE_GLUON_HEADS, WIDEST = (9, 0), (64, 128), (256,), 512
"""Where ``ours`` is not the plain kernels, as kernels/flash_attention/dispatch.py has it, which imports
torch."""
NEW_KERNELS = "2026-11-28"
"""Records before this day have the plain kernels at heads over 128, on Hopper no longer those of ``triton``,
and in fp32 some without tensor cores, 4 to 14 times slower."""
Key = tuple[str, int, bool, int]
RateKey = tuple[Kernel, str, int, int, bool]


def main(arguments: list[str] | None = None) -> int:
    """Write the table; exit code 0, or 65 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m evidence.scripts.attention_table", description="Write the catalog's attention table."
    )  # fmt: skip
    parser.add_argument("files", type=Path, nargs="+", help="records: JSON Lines or SQLite")
    parser.add_argument("--into", type=Path, default=FILE, help="TOML file to write")
    options = parser.parse_args(arguments)
    try:
        if not options.into.parent.is_dir():
            raise InputError(
                "no such folder", "make it, or name another", field="into", value=str(options.into.parent)
            )
        runs = runs_of([record for file in options.files for record in load(file)])
    except (InputError, FileNotFoundError) as error:
        say(f"trainfit: {error}", err=True)
        return EXIT_BAD_INPUT
    replace_text(options.into, text_of(runs))
    shapes, rates = (sum(len(getattr(run, what)) for run in runs) for what in ("shapes", "rates"))
    say(f"{shapes} shapes and {rates} rates of {len(runs)} records in {options.into}")
    return 0


def runs_of(records: Sequence[Record]) -> list[AttentionRun]:
    """What the records say of attention, oldest first.

    Raises:
        InputError: no record in full form has two kernels of one shape, on a GPU of the catalog.
    """
    shapes, rates = _newest_shapes(_full(records)), _newest_rates(_full(records))
    if not shapes:
        raise InputError(
            "no benchmark of attention on a GPU of the catalog among the records",
            "make one with trainfit bench flash --record FILE",
        )
    by_time = {record.created_at: record for record in records}
    by_record: dict[str, tuple[list[AttentionShape], list[AttentionRate]]] = {}
    for _, (record, shape) in sorted(shapes.items(), key=lambda one: one[0]):
        by_record.setdefault(record.created_at, ([], []))[0].append(shape)
    for _, (record, rate) in sorted(rates.items(), key=lambda one: one[0]):
        by_record.setdefault(record.created_at, ([], []))[1].append(rate)
    return [_run(by_time[when], *found) for when, found in sorted(by_record.items())]


def _full(records: Sequence[Record]) -> Iterator[tuple[Record, BenchResult, str]]:
    """Oldest first: records in full form, and the catalog's name of their GPU."""
    for record in sorted(records, key=lambda one: one.created_at):
        result = record.bench
        if result is not None and result.form == "full" and result.gpu is not None:
            yield record, result, result.gpu


def _newest_shapes(
    records: Iterable[tuple[Record, BenchResult, str]],
) -> dict[tuple[str, Key], tuple[Record, AttentionShape]]:
    """By GPU and key; one of fewer heads does not take the place of one of more."""
    found: dict[tuple[str, Key], tuple[Record, AttentionShape]] = {}
    for record, result, gpu in records:
        for shape in shapes_of(result.rows, gpu, record.created_at):
            before, known = found.get((gpu, shape.key), (None, None))
            if before and before.bench and known:
                same_torch = before.bench.environment.torch == result.environment.torch
                if _size(shape) < _size(known) or (same_torch and set(shape.seconds) < set(known.seconds)):
                    continue
            found[gpu, shape.key] = record, shape
    return found


def _newest_rates(
    records: Iterable[tuple[Record, BenchResult, str]],
) -> dict[tuple[str, RateKey], tuple[Record, AttentionRate]]:
    """By GPU and key; one of fewer heads does not take the place of one of more."""
    found: dict[tuple[str, RateKey], tuple[Record, AttentionRate]] = {}
    for record, result, gpu in records:
        for rate in rates_of(result.rows, gpu, record.created_at):
            known = found.get((gpu, rate.key))
            if known is None or _size(rate) >= _size(known[1]):
                found[gpu, rate.key] = record, rate
    return found


def _size(one: AttentionShape | AttentionRate) -> int:
    """Return the heads of all sequences."""
    return one.heads * one.batch


def _run(record: Record, shapes: list[AttentionShape], rates: list[AttentionRate]) -> AttentionRun:
    result = record.bench
    assert result is not None
    assert result.gpu is not None
    return AttentionRun(
        gpu=result.gpu, measured_at=record.created_at, commit=record.commit or "",
        torch=result.environment.torch,
        experiment=result.experiment, shapes=tuple(shapes), rates=tuple(rates),
    )  # fmt: skip


def shapes_of(rows: Sequence[BenchRow], gpu: str, measured_at: str) -> list[AttentionShape]:
    """Causal shapes of which at least two kernels have a time of forward and backward together.

    A shape of which ours has other kernels today is left out: without ours, ours would not be chosen there.
    """
    found: dict[Key, dict[tuple[int, int], dict[str, Spread]]] = {}  # By heads and batch within.
    outdated: set[Key] = set()
    for row in _timed(rows):
        at = row.point
        if at["pass"] != "both" or not at["causal"] or at["body"] not in KERNELS:
            continue
        key = (str(at["dtype"]), int(at["head"]), bool(at["causal"]), int(at["seq"]))
        if at["body"] == "ours" and _is_outdated(key[0], key[1], gpu, measured_at):
            outdated.add(key)
        batch = (int(at["heads"]), int(at["batch"]))
        assert row.times is not None
        found.setdefault(key, {}).setdefault(batch, {})[KERNELS[str(at["body"])]] = row.times
    return list(_largest({key: batches for key, batches in found.items() if key not in outdated}))


def rates_of(rows: Sequence[BenchRow], gpu: str, measured_at: str) -> list[AttentionRate]:
    """Return the rates of kernels with a time of forward and backward, of the shape with most heads.

    Of causal attention, and of attention with an additive mask. Unmasked tiles are faster: our plain backward
    in fp32 is twice as fast without a mask. Boolean masks are left out: their conversion is an operation of
    its own in a ledger.
    """
    found: dict[RateKey, dict[tuple[int, int], dict[str, float]]] = {}
    for row in _timed(rows):
        at = row.point
        masked = at.get("mask", "none") == ADDITIVE
        if not (at["causal"] or masked) or at["pass"] not in ("forward", "backward"):
            continue
        assert row.times is not None
        batch = (int(at["heads"]), int(at["batch"]))
        for kernel in _kernels_of(str(at["body"]), str(at["dtype"]), int(at["head"]), gpu, measured_at):
            key = (kernel, str(at["dtype"]), int(at["head"]), int(at["seq"]), masked)
            found.setdefault(key, {}).setdefault(batch, {})[str(at["pass"])] = row.times.median
    rates: list[AttentionRate] = []
    for (kernel, dtype, head, seq, masked), batches in found.items():
        whole = {batch: seconds for batch, seconds in batches.items() if len(seconds) == 2}
        if whole:
            heads, batch = max(whole, key=math.prod)
            row = {
                "kernel": kernel,
                "dtype": dtype,
                "head": head,
                "causal": not masked,
                "masked": masked,
                "seq": seq,
                "heads": heads,
            }
            rates.append(parse(AttentionRate, {**row, "batch": batch, **whole[heads, batch]}))
    return rates


def _kernels_of(body: str, dtype: str, head: int, gpu: str, measured_at: str) -> tuple[Kernel, ...]:
    """What a benchmark's body runs there; none where no operation of a step runs the same.

    Ours has one kernel forward and another backward for wide heads on Hopper: the times are both's. With
    heads of 256 the backward is cuDNN's, which has times of its own.
    """
    if body == "ours":
        if dtype == "fp32" and measured_at < NEW_KERNELS:
            return ()
        if gpus()[gpu].compute_capability != HOPPER or dtype != "bf16":
            return ("plain",)
        if max(GLUON_HEADS) < head <= WIDEST and measured_at >= NEW_KERNELS:
            return ("gluon",) if head in WIDE_GLUON_HEADS else ("plain", "passes")
        return ("gluon" if head in GLUON_HEADS else "plain",)
    if body == "pytorch":
        return ("efficient" if dtype == "fp32" else "cudnn" if prefers_cudnn(gpus()[gpu]) else "flash",)
    bodies: dict[str, Kernel] = {
        "flash": "flash",
        "cudnn": "cudnn",
        "efficient": "efficient",
        "plain": "plain",
    }
    return (bodies[body],) if body in bodies else ()


def _is_outdated(dtype: str, head: int, gpu: str, measured_at: str) -> bool:
    """Return whether ours has other kernels today than at that time."""
    is_wide = head > max(GLUON_HEADS) and gpus()[gpu].compute_capability == HOPPER
    return measured_at < NEW_KERNELS and (dtype == "fp32" or is_wide)


def _timed(rows: Sequence[BenchRow]) -> Iterator[BenchRow]:
    for row in rows:
        at = row.point
        if row.times is None or row.status not in ("done", "unsteady") or not set(NEEDED) <= set(at):
            continue
        fills = int(at["heads"]) * int(at["batch"]) * int(at["seq"]) >= FEWEST_ROWS
        if fills and len(row.times.samples) >= FEWEST_SAMPLES:
            yield row


def _largest(found: dict[Key, dict[tuple[int, int], dict[str, Spread]]]) -> Iterator[AttentionShape]:
    for (dtype, head, causal, seq), batches in found.items():
        several = {batch: times for batch, times in batches.items() if len(times) > 1}
        if several:
            heads, batch = max(several, key=math.prod)
            yield parse(
                AttentionShape,
                {"dtype": dtype, "head": head, "causal": causal, "seq": seq, "heads": heads, "batch": batch,
                 "seconds": {kernel: one.median for kernel, one in several[heads, batch].items()},
                 "spread": {kernel: (one.high - one.low) / one.median
                            for kernel, one in several[heads, batch].items()}},
            )  # fmt: skip


def text_of(runs: Sequence[AttentionRun]) -> str:
    """The TOML file: the same runs give the same bytes."""
    parts = [
        f"# Written by {MADE_BY}; do not edit. "
        "Seconds: of shapes forward and backward together, of rates apart.\n"
        "# measured_at is the record's time: it names the record in evidence/records/.\n"
    ]
    for run in runs:
        head = {name: getattr(run, name) for name in ("gpu", "measured_at", "commit", "torch", "experiment")}
        lines = ["[[run]]", *(f'{name} = "{text}"' for name, text in head.items())]
        for name, rows in (("shapes", map(_shape, run.shapes)), ("rates", map(_rate, run.rates))):
            listed = [f"  {row}," for row in rows]
            lines += [f"{name} = [", *listed, "]"] if listed else []
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _shape(shape: AttentionShape) -> str:
    seconds = ", ".join(f"{name} = {shape.seconds[name]:.6e}" for name in sorted(shape.seconds))
    spread = ", ".join(f"{name} = {shape.spread[name]:.4f}" for name in sorted(shape.spread))
    return (
        f'{{ dtype = "{shape.dtype}", head = {shape.head}, causal = {str(shape.causal).lower()}, '
        f"seq = {shape.seq}, "
        f"heads = {shape.heads}, batch = {shape.batch}, seconds = {{ {seconds} }}"
        + (f", spread = {{ {spread} }} }}" if spread else " }")
    )


def _rate(rate: AttentionRate) -> str:
    return (
        f'{{ kernel = "{rate.kernel}", dtype = "{rate.dtype}", head = {rate.head}, '
        f"causal = {str(rate.causal).lower()}, "
        f"seq = {rate.seq}, heads = {rate.heads}, batch = {rate.batch}, forward = {rate.forward:.6e}, "
        f"backward = {rate.backward:.6e}{', masked = true' if rate.masked else ''} }}"
    )


if __name__ == "__main__":
    sys.exit(main())
