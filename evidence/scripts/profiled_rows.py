"""Write kernels of profiled steps into a GPU's calibration, which `trainfit calibrate` did not run there.

    python -m evidence.scripts.profiled_rows evidence/records/step-kernels/step-kernels.jsonl ...

Files of step_kernels.py, of one GPU. Taken are the compiled kernels that the ledger names alike, but for
casts to fp8, whose rate is fitted (rates.toml), and trainfit's kernels below, whose bytes are those of the
recipe's ledger. Rows of an earlier run are replaced.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainfit.catalog.load import FOLDER
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.predict import ledger_of
from trainfit.prediction.time.device_time import FP8_PRODUCTS
from trainfit.spec.calibration import OpTime
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import say

PART = "profiled steps"
KERNELS = {
    "swiglu_fp8_kernel": "trainfit.swiglu_fp8_delayed.default",
    "swiglu_backward_fp8_kernel": "trainfit.swiglu_backward_fp8_delayed.default",
    "swiglu_kernel": "trainfit.swiglu.default",
    "swiglu_backward_kernel": "trainfit.swiglu_backward.default",
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


def written(text: str, rows: list[OpTime]) -> str:
    """Return a calibration's text with its rows of profiled steps replaced."""
    given = json.loads(text)
    ops = [row for row in given["ops"] if row[-1] != PART]
    ops += [[*row[:10], float(f"{row.seconds:.4g}"), row.part] for row in rows]
    lines = [json.dumps(row, separators=(",", ":")) for row in ops]
    shortened = json.dumps({**given, "ops": []}, separators=(",", ":"), ensure_ascii=False)
    return shortened.replace('"ops":[]', '"ops":[' + ",\n".join(lines) + "]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    records = [json.loads(line) for file in options.files for line in file.read_text("utf-8").splitlines()]
    (gpu,) = {record["recipe"]["hardware"]["gpu"] for record in records}
    rows = [row for record in records for row in rows_of(record, ledger_of(recipe_from(record["recipe"])))]
    path = FOLDER / "calibrations" / f"{gpu}.json"
    path.write_text(written(path.read_text("utf-8"), rows), encoding="utf-8")
    for row in rows:
        say(f"{row.num_bytes / row.seconds / 1e9:9,.0f} GB/s {row.seconds * 1e6:9.1f} us  {row.op}")


if __name__ == "__main__":
    main()
