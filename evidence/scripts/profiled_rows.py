"""Write kernels of profiled steps into a GPU's calibration, which `trainfit calibrate` did not run there.

    python -m evidence.scripts.profiled_rows evidence/records/step-kernels/step-kernels.jsonl ...

Files of step_kernels.py, of one GPU. Taken are the compiled kernels that the ledger names alike, but for
casts to fp8, whose rate is fitted (rates.toml), and trainfit's kernels below, whose bytes are those of the
recipe's ledger. Where step-products-X.jsonl of step_products.py stands beside step-kernels-X.jsonl and has
dtypes, its products are taken too, their seconds over what the power limit is taken to add (rates.toml). A
kernel or product of several files is that of the last, whose kernels are the newest. Rows of an earlier run
are replaced, but for products of shapes that these recipes no longer have.
"""

import argparse
import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from trainfit.catalog.load import FOLDER
from trainfit.catalog.rates import rates
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.predict import ledger_of
from trainfit.prediction.time.device_time import FP8_PRODUCTS
from trainfit.spec.calibration import Calibration, OpTime
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import say

PART = "profiled steps"
KERNELS = {
    "swiglu_fp8_kernel": "trainfit.swiglu_fp8_delayed.default",
    "swiglu_backward_fp8_kernel": "trainfit.swiglu_backward_fp8_delayed.default",
    "swiglu_kernel": "trainfit.swiglu.default",
    "swiglu_backward_kernel": "trainfit.swiglu_backward.default",
    "rms_norm_amax_kernel": "trainfit.rms_norm_amax.default",
    "add_rms_norm_amax_kernel": "trainfit.add_rms_norm_amax.default",
    "rms_norm_fp8_rows_kernel": "trainfit.rms_norm_fp8_rows.default",
    "rms_norm_fp8_transposed_kernel": "trainfit.rms_norm_fp8_transposed.default",
    "rms_norm_backward_add_kernel": "trainfit.rms_norm_backward_add.default",
}
"""Kernel -> the operator that launches it and, of any length, nothing else."""


def rows_of(record: dict[str, Any], ledger: Ledger) -> Iterator[OpTime]:
    """Yield a step's kernels with their bytes and mean seconds of a launch."""
    bytes_of: dict[str, Counter[int]] = {}
    for op in ledger.steady_ops:
        bytes_of.setdefault(op.name, Counter())[op.num_bytes] += int(ledger.times(op) * op.calls)
    dtype_of = {op.name: op.dtype for op in ledger.steady_ops}
    for kernel in record["kernels"]:
        name, count = kernel["name"], kernel["num_kernels"]
        op = KERNELS.get(name, name)
        sizes = bytes_of.get(op, Counter())
        is_cast = any(product in op for product in FP8_PRODUCTS)
        if is_cast or len(sizes) != 1 or sizes.total() != count:
            continue  # Of several sizes the mean would be of none.
        (num_bytes,) = sizes
        mean_s = kernel["seconds"] / count
        yield OpTime(op, dtype_of[op], "", (), "", 0, 0, False, 0.0, num_bytes, mean_s, PART)


def products_of(record: dict[str, Any], products: list[dict[str, Any]], ledger: Ledger) -> Iterator[OpTime]:
    """Yield a step's products by shape, with their mean seconds at the clocks of a step without a limit.

    Args:
        products: rows of step_products.py, of all steps.
    """
    kinds = {kind["name"]: kind["seconds"] for kind in record["kinds"]}
    slowdown = rates().power.slowdown(kinds["matrix products"] / record["step_s"])
    ops = {(*op.shape[1:], op.dtype): op for op in ledger.steady_ops if op.shape}
    sums = dict[tuple[Any, ...], tuple[int, float]]()
    for row in products:
        if row["name"] == record["name"] and "dtype" in row:
            key = (row["m"], row["n"], row["k"], row["dtype"])
            count, seconds = sums.get(key, (0, 0.0))
            sums[key] = count + row["num_calls"], seconds + row["measured_s"]
    for key, (count, seconds) in sums.items():
        if op := ops.get(key):
            yield OpTime(
                op.name, op.dtype, op.layout, op.shape, "", 0, 0, False, float(op.causal_flops), op.num_bytes,
                seconds / count / slowdown, PART,
            )  # fmt: skip


def rows_of_file(file: Path) -> Iterator[tuple[str, OpTime]]:
    """Yield the GPU and the rows of a file of step_kernels.py, and of step_products.py's beside it."""
    beside = file.with_name(file.name.replace("step-kernels", "step-products"))
    products = (
        [json.loads(line) for line in beside.read_text("utf-8").splitlines()] if beside.exists() else []
    )
    for record in map(json.loads, file.read_text("utf-8").splitlines()):
        ledger = ledger_of(recipe_from(record["recipe"]))
        for row in (*rows_of(record, ledger), *products_of(record, products, ledger)):
            yield record["recipe"]["hardware"]["gpu"], row


def newest(files: Iterable[list[OpTime]]) -> list[OpTime]:
    """Return rows of files, the oldest first: a kernel of trainfit's or a product is the last file's."""
    kept: list[OpTime] = []
    for rows in files:
        again = {row.op for row in rows if row.op in KERNELS.values()}
        shapes = {(row.op, row.shape, row.dtype) for row in rows if row.shape}
        kept = [row for row in kept if row.op not in again and (row.op, row.shape, row.dtype) not in shapes]
        kept += rows
    return kept


def row_of(row: OpTime) -> list[Any]:
    """Return a row as a calibration's file holds it."""
    return [*row[:10], float(f"{row.seconds:.4g}"), row.part]


def with_rows(text: str, rows: list[OpTime], parts: Container[str]) -> str:
    """Return a calibration's text with the rows of these parts replaced."""
    given = json.loads(text)
    ops = [row for row in given["ops"] if row[-1] not in parts] + [row_of(row) for row in rows]
    lines = [json.dumps(row, separators=(",", ":")) for row in ops]
    shortened = json.dumps({**given, "ops": []}, separators=(",", ":"), ensure_ascii=False)
    return shortened.replace('"ops":[]', '"ops":[' + ",\n".join(lines) + "]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    found = [list(rows_of_file(file)) for file in options.files]
    (gpu,) = {gpu for each in found for gpu, _ in each}
    rows = newest([row for _, row in each] for each in found)
    path = FOLDER / "calibrations" / f"{gpu}.json"
    text = path.read_text("utf-8")
    earlier = [row for row in Calibration.model_validate_json(text).ops if row.part == PART and row.shape]
    path.write_text(with_rows(text, newest([earlier, rows]), (PART,)), encoding="utf-8")
    for row in rows:
        work, unit = (row.flops / 1e12, "TFLOP/s") if row.shape else (row.num_bytes / 1e9, "GB/s")
        say(f"{work / row.seconds:9,.0f} {unit:7} {row.seconds * 1e6:9.1f} us  {row.op} {row.shape or ''}")


if __name__ == "__main__":
    main()
