"""Matrix products of a profiled step by shape, beside what the prediction expects of each.

    python -m evidence.scripts.step_products FOLDER [--gpu h100-sxm]

FOLDER has NAME.json.gz and step-kernels.jsonl of evidence/scripts/step_kernels.py. Prints a line for each
shape and writes step-products.jsonl: m, n, k, layout of both factors (t: stored by columns), dtype of the
first, calls, measured and expected seconds, the share of that dtype's peak, and the kernels that ran.
"""

import argparse
import bisect
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from evidence.scripts.step_kernels import recipe_of
from trainfit.catalog.load import gpu as gpu_row
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.machine import machine_of
from trainfit.prediction.predict import ledger_of
from trainfit.prediction.time.device_time import part_of
from trainfit.prediction.time.peaks import PEAK_DTYPE, peak_flops_per_s
from trainfit.prediction.time.roofline import device_seconds
from trainfit.spec.recipe import Recipe

FUSED = "trainfit::add_fp8_weight_gradient_"
FACTORS = {
    "aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::addmm_": (1, 2), "aten::_scaled_mm": (0, 1),
    FUSED: (0, 2),
}  # fmt: skip
"""Operation -> positions of its factors."""
ADDS = ("aten::addmm_", FUSED)
"""Operations that add to their result."""
DTYPES = {
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
    "c10::BFloat16": "bfloat16",
}
"""A profiler's name of a dtype -> torch's."""


class Shape(NamedTuple):
    """[m, k] @ [k, n]; ``adds``: to what the result held."""

    m: int
    n: int
    k: int
    layout: str
    adds: bool
    dtype: str


def measured(trace: dict[str, Any]) -> dict[Shape, dict[str, Any]]:
    """Return calls, seconds and names of the kernels of each shape in the marked steps."""
    events = trace["traceEvents"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")]
    products = sorted((e for e in events if e.get("name") in FACTORS), key=lambda e: e["ts"])
    products = [e for e in products if len(e["args"].get("Input Dims", ())) > FACTORS[e["name"]][1]]
    launches = {
        e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    begins, rows = [e["ts"] for e in products], dict[Shape, dict[str, Any]]()
    seen = set[int]()
    for kernel in (e for e in events if e.get("cat") == "kernel"):
        begin = launches.get(kernel["args"].get("correlation"))
        if begin is None or not any(s["ts"] <= begin < s["ts"] + s["dur"] for s in steps):
            continue
        at = bisect.bisect_right(begins, begin) - 1
        if at < 0 or begin >= begins[at] + products[at]["dur"]:
            continue
        row = rows.setdefault(_shape(products[at]), {"num_calls": 0, "measured_s": 0.0, "kernels": set()})
        row["num_calls"] += at not in seen
        seen.add(at)
        row["measured_s"] += kernel["dur"] / 1e6 / len(steps)
        row["kernels"].add(kernel["name"].partition("<")[0])
    for row in rows.values():
        row["num_calls"] //= len(steps)
    return rows


def _shape(product: dict[str, Any]) -> Shape:
    args, name = product["args"], product["name"]
    first, second = FACTORS[name]
    (m, k), (_, n) = args["Input Dims"][first], args["Input Dims"][second]
    if name == FUSED:  # Its second factor is given as [n, k], both by rows.
        n, order = args["Input Dims"][second][0], "nt"
    else:
        strides = (args["Input Strides"][at] for at in (first, second))
        order = "".join("n" if each[-1] == 1 else "t" for each in strides)
    adds = name in ADDS and args["Concrete Inputs"][3:4] not in (["0"], ["0."])
    return Shape(m, n, k, order, adds, DTYPES.get(args["Input type"][first], args["Input type"][first]))


def expected(ledger: Ledger, recipe: Recipe) -> dict[tuple[Any, ...], tuple[int, float]]:
    """Return calls and seconds of each shape that the ledger of a step holds, by (m, n, k) and dtype."""
    machine, found = machine_of(recipe.hardware), dict[tuple[Any, ...], tuple[int, float]]()
    seconds = device_seconds(ledger, machine)
    for op in ledger.steady_ops:
        if part_of(op) == "products" and op.shape:
            key = (*op.shape[1:], op.dtype)
            calls, taken_s = found.get(key, (0, 0.0))
            times = ledger.times(op)
            found[key] = calls + times * op.calls, taken_s + times * seconds[id(op)]
    return found


def rows_of(path: Path, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape, the longest first."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = measured(json.load(file))
    known = expected(ledger_of(recipe), recipe)
    gpu = gpu_row(recipe.hardware.gpu)
    for shape, row in sorted(found.items(), key=lambda item: -item[1]["measured_s"]):
        calls, taken_s = known.get((*shape[:3], shape.dtype), (0, 0.0))
        flops = 2 * shape.m * shape.n * shape.k * row["num_calls"]
        expected_s = taken_s / calls * row["num_calls"] if calls else None
        share = flops / row["measured_s"] / peak_flops_per_s(gpu, PEAK_DTYPE[shape.dtype])
        yield shape._asdict() | row | {
            "kernels": sorted(row["kernels"]), "expected_s": expected_s, "share": share,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="h100-sxm")
    options = parser.parse_args()
    lines = (options.folder / "step-kernels.jsonl").read_text("utf-8").splitlines()
    with (options.folder / "step-products.jsonl").open("w", encoding="utf-8") as file:
        for name in (json.loads(line)["name"] for line in lines):
            print(f"{name}\n{'m':>8}{'n':>8}{'k':>8}{'calls':>8}{'ms':>9}{'expected':>9}{'peak':>6}")
            for row in rows_of(options.folder / f"{name}.json.gz", recipe_of(name, options.gpu)):
                file.write(json.dumps({"name": name} | row) + "\n")
                sizes = "".join(f"{row[size]:8}" for size in ("m", "n", "k", "num_calls"))
                expected_ms = 1e3 * row["expected_s"] if row["expected_s"] else 0.0
                adds = " adds" if row["adds"] else ""
                print(
                    f"{sizes}{1e3 * row['measured_s']:9.1f}{expected_ms:9.1f}{row['share']:6.0%} "
                    f"{row['layout']}{adds}"
                )


if __name__ == "__main__":
    main()
