"""Measure parts of a GPU's calibration again, after a change of the kernels that they run.

    python -m evidence.scripts.calibration_parts measure PARTS.json "attention, ours" "attention, cudnn"
    python -m evidence.scripts.calibration_parts merge PARTS.json

The first runs on the GPU, the second writes the rows into the catalog's calibration of that GPU, instead of
those of the same parts. Parts are named as `trainfit calibrate` prints them.
"""

import argparse
import json
import math
from pathlib import Path

import torch

from evidence.scripts.profiled_rows import row_of, with_rows
from trainfit.bench.harness.runner import data_sheet
from trainfit.bench.harness.stopwatch import stopwatch_of
from trainfit.calibration.op_timer import OpTimer
from trainfit.calibration.workloads import workloads
from trainfit.catalog.load import FOLDER
from trainfit.spec.calibration import OpTime
from trainfit.spec.printable import say


def measure(file: Path, parts: list[str]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = data_sheet(device)
    if gpu is None:
        raise SystemExit("this GPU is not in the catalog")
    known = dict(workloads(device, tiny=False))
    if unknown := [part for part in parts if part not in known]:
        raise SystemExit(f"parts {unknown} are not of a calibration: it has {', '.join(known)}")
    timer = OpTimer(stopwatch_of(device), gpu, lambda: False)
    for part in parts:
        timer.part = part
        with timer:
            known[part]()
        timer.finish()
        torch.cuda.empty_cache()
        # After each part: what was measured is kept if the time is up.
        file.write_text(json.dumps({"gpu": gpu.name, "ops": timer.rows}), encoding="utf-8")
        say(f"{part}: {len(timer.rows)} operations so far, failures: {timer.failures}")


def merge(file: Path) -> None:
    found = json.loads(file.read_text("utf-8"))
    rows = [OpTime(*row) for row in found["ops"]]
    path = FOLDER / "calibrations" / f"{found['gpu']}.json"
    text = path.read_text("utf-8")
    before = {tuple(map(str, row[:10])): row[10] for row in json.loads(text)["ops"]}
    path.write_text(with_rows(text, rows, {row.part for row in rows}), encoding="utf-8")
    for row in rows:
        was_s = before.get(tuple(map(str, row_of(row)[:10])), math.nan)
        name = f"{row.part}: {row.op}"
        say(f"{name:84} {row.head:4} {row.seq:6} {was_s * 1e6:9.1f} {row.seconds * 1e6:9.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("measure", "merge"))
    parser.add_argument("file", type=Path)
    parser.add_argument("parts", nargs="*")
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.file, options.parts)
    else:
        merge(options.file)


if __name__ == "__main__":
    main()
