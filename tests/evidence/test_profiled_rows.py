"""Kernels of profiled steps in the catalog's calibration of an H100."""

import json

import pytest

from evidence.scripts.profiled_rows import PART, rows_of, written
from page_claims import ROOT
from trainfit.catalog.load import FOLDER
from trainfit.prediction.predict import ledger_of
from trainfit.spec.calibration import Calibration
from trainfit.spec.parsing.recipe_file import recipe_from

PATH = FOLDER / "calibrations" / "h100-sxm.json"
RECORDS = ROOT / "evidence/records/step-kernels"


def test_the_catalogs_rows_are_those_of_the_records() -> None:
    text = PATH.read_text("utf-8")
    rows = [row for row in Calibration.model_validate_json(text).ops if row.part == PART]
    seconds = [
        kernel["seconds"] / kernel["num_kernels"]
        for name in ("step-kernels.jsonl", "step-kernels-faster.jsonl")
        for line in (RECORDS / name).read_text("utf-8").splitlines()
        for kernel in json.loads(line)["kernels"]
    ]
    assert len(rows) > 20
    assert all(any(row.seconds == pytest.approx(one, rel=1e-3) for one in seconds) for row in rows)
    assert written(text, rows) == text


def test_a_kernel_of_one_size_is_taken_and_casts_to_fp8_are_not() -> None:
    recipe = recipe_from(
        {"model": {"config": "llama-3.2-1b", "implementation": "native"}, "batch": {"seq": 64},
         "precision": "bf16", "block_kernels": "triton", "hardware": {"gpu": "h100-sxm"}}
    )  # fmt: skip
    ledger = ledger_of(recipe)
    of_op = [op for op in ledger.steady_ops if op.name == "trainfit.swiglu_backward.default"]
    count = int(sum(map(ledger.times, of_op)))
    kernels = [
        {"name": "swiglu_backward_kernel", "num_kernels": count, "seconds": 3e-6 * count},
        {"name": "swiglu_kernel", "num_kernels": count + 1, "seconds": 1.0},  # Of other launches too
        {"name": "triton_poi_fused__scaled_mm_0", "num_kernels": 1, "seconds": 1.0},
    ]
    (row,) = rows_of({"kernels": kernels}, ledger)
    assert (row.op, row.num_bytes, row.part) == (of_op[0].name, of_op[0].num_bytes, PART)
    assert row.seconds == pytest.approx(3e-6)
