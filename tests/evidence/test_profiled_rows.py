"""Kernels of profiled steps in the catalog's calibration of an H100."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from evidence.scripts.profiled_rows import PART, rows_of, written
from page_claims import ROOT
from trainfit.catalog.load import FOLDER
from trainfit.spec.calibration import Calibration

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
    sizes = {
        "trainfit.swiglu_backward.default": (64, 64), "trainfit.swiglu.default": (48, 48),
        "triton_poi_fused_add_1": (8, 16), "triton_poi_fused__scaled_mm_2": (32,),
        "triton_red_fused_add_fp8_weight_gradient__3": (32,),
    }  # fmt: skip
    ops = [
        SimpleNamespace(name=name, num_bytes=each, dtype="bfloat16", calls=1)
        for name, several in sizes.items()
        for each in several
    ]
    ledger: Any = SimpleNamespace(steady_ops=ops, times=lambda op: 1)
    counts = {
        "swiglu_backward_kernel": 2, "swiglu_kernel": 3,  # Launched by something else too
        "triton_poi_fused_add_1": 2, "triton_poi_fused__scaled_mm_2": 1,
        "triton_red_fused_add_fp8_weight_gradient__3": 1, "not_in_the_ledger": 1,
    }  # fmt: skip
    kernels = [
        {"name": name, "num_kernels": count, "seconds": 3e-6 * count} for name, count in counts.items()
    ]
    (row,) = rows_of({"kernels": kernels}, ledger)
    assert (row.op, row.num_bytes, row.part) == ("trainfit.swiglu_backward.default", 64, PART)
    assert row.seconds == pytest.approx(3e-6)
