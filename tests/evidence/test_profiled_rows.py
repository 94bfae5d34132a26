"""Kernels and products of profiled steps in the catalog's calibrations."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from evidence.scripts.profiled_rows import KERNELS, PART, newest, products_of, rows_of, with_rows
from page_claims import ROOT
from trainfit.catalog.load import FOLDER
from trainfit.catalog.rates import rates
from trainfit.spec.calibration import Calibration, OpTime

PATH = FOLDER / "calibrations" / "h100-sxm.json"
RECORDS = ROOT / "evidence/records/step-kernels"
FILES = (
    "step-kernels.jsonl",
    "step-kernels-faster.jsonl",
    "step-kernels-fused.jsonl",
    "step-kernels-blocks.jsonl",
    "step-kernels-bf16.jsonl",
)


def test_the_catalogs_rows_are_those_of_the_records() -> None:
    text = PATH.read_text("utf-8")
    rows = [row for row in Calibration.model_validate_json(text).ops if row.part == PART]
    seconds = [
        kernel["seconds"] / kernel["num_kernels"]
        for file in FILES
        for line in (RECORDS / file).read_text("utf-8").splitlines()
        for kernel in json.loads(line)["kernels"]
    ]
    kernels = [row for row in rows if not row.shape]
    assert len(kernels) == 20
    assert all(any(row.seconds == pytest.approx(one, rel=1e-3) for one in seconds) for row in kernels)
    means = dict[tuple[Any, ...], list[float]]()
    for name in ("fused", "blocks", "bf16"):
        kernels_of, products_of_steps = (
            list(map(json.loads, (RECORDS / f"step-{what}-{name}.jsonl").read_text("utf-8").splitlines()))
            for what in ("kernels", "products")
        )
        slowdowns = {
            one["name"]: rates().power.slowdown(
                sum(kind["seconds"] for kind in one["kinds"] if kind["name"] == "matrix products")
                / one["step_s"]
            )
            for one in kernels_of
        }
        sums = dict[tuple[Any, ...], tuple[float, int]]()
        for line in products_of_steps:
            key = (line["m"], line["n"], line["k"], line["dtype"], line["name"])
            taken_s, count = sums.get(key, (0.0, 0))
            sums[key] = taken_s + line["measured_s"], count + line["num_calls"]
        for key in {key[:-1] for key in sums}:
            means[key] = [  # Of the last file that has it, at the clocks of a short step.
                taken_s / count / slowdowns[step]
                for (*one, step), (taken_s, count) in sums.items()
                if tuple(one) == key
            ]
    products = {(*row.shape[1:], row.dtype): row.seconds for row in rows if row.shape}
    assert products.keys() == means.keys()
    for key, taken_s in products.items():
        assert any(taken_s == pytest.approx(one, rel=1e-3) for one in means[key]), key
    assert with_rows(text, rows, (PART,)) == text


def test_the_rows_of_an_h200_are_those_of_its_profiled_steps() -> None:
    path = FOLDER / "calibrations" / "h200.json"
    text = path.read_text("utf-8")
    rows = [row for row in Calibration.model_validate_json(text).ops if row.part == PART]
    steps, products = (
        list(map(json.loads, (RECORDS / f"step-{what}-h200.jsonl").read_text("utf-8").splitlines()))
        for what in ("kernels", "products")
    )
    kernels = dict[str, list[float]]()
    for one in (kernel for step in steps for kernel in step["kernels"]):
        op = KERNELS.get(one["name"], one["name"])
        kernels.setdefault(op, []).append(one["seconds"] / one["num_kernels"])
    assert {step["name"] for step in steps} == {"8b-bf16-8k", "8b-fp8-8k"}
    assert len(rows) == 37
    for row in rows:
        if not row.shape:
            assert any(row.seconds == pytest.approx(one, rel=1e-3) for one in kernels[row.op]), row.op
            continue
        means = list[float]()
        for step in steps:
            kinds = {kind["name"]: kind["seconds"] for kind in step["kinds"]}
            of_shape = [
                one
                for one in products
                if one["name"] == step["name"]
                and (one["m"], one["n"], one["k"], one["dtype"]) == (*row.shape[1:], row.dtype)
            ]
            count, taken_s = (sum(one[field] for one in of_shape) for field in ("num_calls", "measured_s"))
            share = kinds["matrix products"] / step["step_s"]
            means += [taken_s / count / rates().power.slowdown(share)] if count else []
        assert any(row.seconds == pytest.approx(one, rel=1e-3) for one in means), row
    assert with_rows(text, rows, (PART,)) == text


def test_a_kernel_or_a_product_is_that_of_the_last_file_that_has_it() -> None:
    def row(op: str, seconds: float, *, num_bytes: int = 1, shape: tuple[int, ...] = ()) -> OpTime:
        return OpTime(op, "bfloat16", "", shape, "", 0, 0, False, 0.0, num_bytes, seconds, PART)

    own, compiled = KERNELS["swiglu_kernel"], "triton_poi_fused_add_6"
    shape, other = (1, 2, 3, 4), (1, 2, 3, 5)
    mm = "aten.mm.out"
    older = [
        row(own, 9.0, num_bytes=2),
        row(compiled, 2.0),
        row(mm, 9.0, shape=shape),
        row(mm, 4.0, shape=other),
    ]
    last = [row(own, 1.0), row(mm, 3.0, shape=shape), row(compiled, 5.0, num_bytes=3)]
    assert sorted(one.seconds for one in newest([older, last])) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_kernels_in_the_catalog_are_those_of_the_last_record_that_has_them() -> None:
    rows = [row for row in Calibration.model_validate_json(PATH.read_text("utf-8")).ops if row.part == PART]
    last = dict[str, str]()
    seconds = dict[tuple[str, str], list[float]]()
    for file in FILES:
        for line in (RECORDS / file).read_text("utf-8").splitlines():
            for kernel in json.loads(line)["kernels"]:
                if op := KERNELS.get(kernel["name"]):
                    last[op] = file
                    seconds.setdefault((op, file), []).append(kernel["seconds"] / kernel["num_kernels"])
    own = [row for row in rows if row.op in KERNELS.values()]
    assert len({row.op for row in own}) >= 6
    for row in own:
        assert any(row.seconds == pytest.approx(one, rel=1e-3) for one in seconds[row.op, last[row.op]])


def test_products_of_a_shape_are_one_row_at_the_clocks_of_a_short_step() -> None:
    op = SimpleNamespace(
        name="aten.mm.out", num_bytes=64, dtype="bfloat16", layout="nt", shape=(1, 2, 3, 4), causal_flops=48
    )
    other = SimpleNamespace(shape=(), dtype="bfloat16")
    products = [
        {"name": "a", "m": 2, "n": 3, "k": 4, "dtype": "bfloat16", "num_calls": calls, "measured_s": taken_s}
        for calls, taken_s in ((1, 3e-6), (3, 5e-6))
    ]
    unknown = products[0] | {"k": 5}, products[0] | {"name": "b"}, {"name": "a", "m": 2, "n": 3, "k": 4}
    record = {"name": "a", "kinds": [{"name": "matrix products", "seconds": 0.8}], "step_s": 1.0}
    ledger: Any = SimpleNamespace(steady_ops=[other, op])
    (row,) = products_of(record, [*products, *unknown], ledger)
    assert (row.op, row.shape, row.flops, row.part) == ("aten.mm.out", (1, 2, 3, 4), 48, PART)
    assert row.seconds == pytest.approx(2e-6 / rates().power.slowdown(0.8))


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


def test_kernels_and_the_operators_that_they_are_of_exist() -> None:
    """A kernel that serves two operators would give one the other's seconds."""
    declared, launched = set[str](), set[str]()
    for folder in ("rms_norm", "swiglu"):
        for file in (ROOT / "src/trainfit/kernels" / folder).glob("*.py"):
            text = file.read_text("utf-8")
            declared |= {f"trainfit.{name}.default" for name in re.findall(r'declare\(\s*"(\w+)"', text)}
            launched |= set(re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE))
    assert KERNELS.keys() <= launched
    assert set(KERNELS.values()) <= declared
    assert len(set(KERNELS.values())) == len(KERNELS)
    functions = (ROOT / "src/trainfit/models/fp8_functions.py").read_text("utf-8")
    used = {f"trainfit.{name}.default" for name in re.findall(r"trainfit\.(\w*rms_norm\w*)", functions)}
    assert used
    assert used <= set(KERNELS.values())
