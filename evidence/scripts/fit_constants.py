"""Compare the ``[operations]`` of catalog/constants.toml with other values: which predict timed rows best.

    python -m evidence.scripts.fit_constants [--gpu h200] [--only unlike,close]

The rows of a calibration are cut into folds, and each fold is predicted by the rows of the others: products
and other operations of one size, attention of one length and compiled kernels of one model stay together.
Prints, for each constant, the median and the 90th percentile of the errors of the rows that it concerns, with
its value and with others. Nothing is written: one that predicts better is entered by hand.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import quantiles
from typing import Any, NamedTuple

from trainfit.catalog.constants import OperationConstants, constants
from trainfit.catalog.load import FOLDER
from trainfit.catalog.load import gpu as find_gpu
from trainfit.ledger.ledger import Op
from trainfit.prediction.time.op_times import COMPILED, OpTimes
from trainfit.spec.calibration import Calibration, OpTime
from trainfit.spec.printable import say

FOLDS = 10
FACTORS = (0.5, 0.8, 1.25, 2.0)


class Other(NamedTuple):
    """Another value of a constant, and the rows that it concerns."""

    name: str
    value: str
    constants: OperationConstants
    concerns: Callable[[OpTime], bool]


class Errors(NamedTuple):
    """Relative errors of predicted rows."""

    median: float
    most: float
    """The 90th percentile."""


def is_attention(row: OpTime) -> bool:
    """Return whether a row is of attention."""
    return bool(row.kernel)


def is_of_kernel(kernel: str, row: OpTime) -> bool:
    """Return whether a row is of a kernel of attention."""
    return row.kernel == kernel


def is_product(row: OpTime) -> bool:
    """Return whether a row is of a matrix product."""
    return bool(row.shape)


def is_fp32_product(row: OpTime) -> bool:
    """Return whether a row is of a matrix product in fp32."""
    return bool(row.shape) and row.dtype == "float32"


def is_compiled(row: OpTime) -> bool:
    """Return whether a row is of a compiled kernel."""
    return row.op.startswith(COMPILED)


def is_other(row: OpTime) -> bool:
    """Return whether a row is of an operation that is bound by memory."""
    return not row.shape and not row.kernel


def folds(rows: Sequence[OpTime]) -> list[int]:
    """Return the fold of each row."""
    found, model, last = [], 0, -1
    for row in rows:
        if is_compiled(row):
            number = int(row.op.rpartition("_")[2]) if row.op.rpartition("_")[2].isdigit() else last
            model += number < last  # The compiler numbers the kernels of each model anew.
            last = number
            together = f"model {model}"
        else:
            together = str(row.seq or row.shape or row.num_bytes)
        found.append(zlib.crc32(together.encode()) % FOLDS)
    return found


def entry(row: OpTime) -> Op:
    """Return a row as a ledger's entry."""
    return Op(
        row.op, "", 0, 0, row.flops, row.flops, 0, 0, row.num_bytes, row.dtype, kernel=row.kernel,
        head=row.head, seq=row.seq, masked=row.masked, shape=row.shape, layout=row.layout,
    )  # fmt: skip


def errors(
    rows: Sequence[OpTime], gpu: str, known: OperationConstants, concerns: Callable[[OpTime], bool]
) -> Errors:
    """Return the errors of the rows of each fold, predicted by those of the others."""
    found = list[float]()
    of_fold = folds(rows)
    for fold in range(FOLDS):
        others = (row for row, one in zip(rows, of_fold, strict=True) if one != fold)
        times = OpTimes(others, find_gpu(gpu), known)
        for row, one in zip(rows, of_fold, strict=True):
            if one == fold and concerns(row):
                taken_s = times.seconds(entry(row))
                if taken_s is not None:
                    found.append(math.expm1(abs(math.log(taken_s / row.seconds))))
    cuts = quantiles(found, n=10)
    return Errors(cuts[4], cuts[8])


def others(known: OperationConstants) -> Iterator[Other]:
    """Yield other values, one constant changed at a time."""
    update: dict[str, Any]
    concerned: dict[str, Callable[[OpTime], bool]] = {
        "nearest": bool, "close": bool, "far": is_other, "latency": is_other, "reached": is_other,
        "unlike": is_compiled, "other_kind": is_compiled, "partial": is_attention, "long": is_attention,
    }  # fmt: skip
    for name, concerns in concerned.items():
        value = getattr(known, name)
        for factor in FACTORS:
            changed = round(value * factor) if isinstance(value, int) else value * factor
            update = {name: changed}
            yield Other(name, f"{changed:g}", known.model_copy(update=update), concerns)
    for kind, concerns in (("product", is_product), ("attention", is_attention), ("other", is_other)):
        for factor in (0.0, *FACTORS):
            seconds = getattr(known.fixed_s, kind) * factor
            update = {"fixed_s": known.fixed_s.model_copy(update={kind: seconds})}
            yield Other(f"fixed_s.{kind}", f"{seconds:g}", known.model_copy(update=update), concerns)
    large = tuple(tile for tile in known.tiles if tile[0] * tile[1] >= 128 * 128)
    equal = tuple((rows, columns, 1.0) for rows, columns, _ in known.tiles)
    for value, tiles in (("none smaller than 128 x 128", large), ("equal rates", equal)):
        yield Other("tiles", value, known.model_copy(update={"tiles": tiles}), is_fp32_product)
    for kernel, tile in known.attention_tiles.items():
        for factor in (0, 0.5, 2):
            changed = (round(tile[0] * factor), round(tile[1] * factor))
            update = {"attention_tiles": {**known.attention_tiles, kernel: changed}}
            value = f"{changed[0]}, {changed[1]}"
            changed_constants = known.model_copy(update=update)
            yield Other(f"attention_tiles.{kernel}", value, changed_constants, partial(is_of_kernel, kernel))


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description="Compare the constants of operations with other values.")
    parser.add_argument("--gpu", default="h200", help="whose calibration of the catalog is read")
    parser.add_argument("--only", default="", help="constants, comma-separated; all unless given")
    given = parser.parse_args()
    text = (FOLDER / "calibrations" / f"{given.gpu}.json").read_bytes()
    rows, known = Calibration.model_validate_json(text).ops, constants().operations
    wanted = set(given.only.split(",")) - {""}
    last = ""
    for other in others(known):
        if wanted and other.name.partition(".")[0] not in wanted:
            continue
        if other.name != last:
            now, last = errors(rows, given.gpu, known, other.concerns), other.name
            say(f"{other.name}: median {now.median:.1%}, 90th percentile {now.most:.1%}")
        found = errors(rows, given.gpu, other.constants, other.concerns)
        say(f"  {other.value}: median {found.median:.1%}, 90th percentile {found.most:.1%}")


if __name__ == "__main__":
    main()
