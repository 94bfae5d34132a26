"""A calibration file of the user replaces operations of its GPU, and rescales the host's costs."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tiny_recipe import tiny_recipe
from trainfit.api.calls import predict
from trainfit.api.plans import plan
from trainfit.calibration.host import small_steps
from trainfit.catalog.load import FOLDER, gpu
from trainfit.catalog.rates import rates
from trainfit.ledger.ledger import NO_LAYER, Ledger, Op
from trainfit.prediction.estimate import estimate
from trainfit.prediction.machine import machine_with
from trainfit.prediction.predict import ledger_of
from trainfit.prediction.time.calibrated import calibrated, own_calibration
from trainfit.prediction.time.device_time import op_s
from trainfit.prediction.time.roofline import Roofline, roofline
from trainfit.spec.calibration import OpTime
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.value import canonical_json

SHIPPED = FOLDER / "calibrations" / "h200.json"
SECONDS = OpTime._fields.index("seconds")


def written(path: Path, slower: float = 1.0, slower_host: float = 1.0, **changes: Any) -> Path:
    """Write the catalog's calibration with slower operations, and a host slower than the rates expect."""
    data = json.loads(SHIPPED.read_text("utf-8"))
    for row in data["ops"]:
        row[SECONDS] *= slower
    for step in data["host_steps"]:
        step["step_s"] = slower_host * step.pop("expected_s", step["step_s"])
    path.write_text(json.dumps(data | changes), "utf-8")
    return path


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return ledger_of(tiny_recipe())


def timed(ledger: Ledger, name: str = "h200", file: Path | None = None) -> Roofline:
    found = roofline(ledger, machine_with(gpu(name), own_calibration(file)))
    assert found is not None
    return found


def test_the_catalogs_operations_with_the_host_that_its_rates_expect_change_nothing(
    tmp_path: Path, ledger: Ledger
) -> None:
    file = written(tmp_path / "copy.json")
    assert timed(ledger, file=file) == timed(ledger)
    own = own_calibration(file)
    assert "copy.json, by calibrate on h200" in calibrated(gpu("h200"), own).origin
    assert calibrated(gpu("h200")).rates is rates()


def test_operations_count_for_their_gpu_alone(tmp_path: Path, ledger: Ledger) -> None:
    file = written(tmp_path / "slow.json", slower=1000.0)
    # The least time of a launch stays, so that a step this small is not 1,000 times as long.
    assert timed(ledger, file=file).expected.matmul_s > 10 * timed(ledger).expected.matmul_s
    for other in ("h100-sxm", "h100-nvl"):  # Of its own calibration, and of the H200's.
        assert timed(ledger, other, file) == timed(ledger, other)


def test_a_file_of_another_gpu_replaces_the_catalogs(tmp_path: Path, ledger: Ledger) -> None:
    own = json.loads((FOLDER / "calibrations" / "h100-sxm.json").read_text("utf-8"))
    for row in own["ops"]:
        row[SECONDS] *= 1000.0
    file = written(tmp_path / "slow.json", gpu="h100-sxm", ops=own["ops"])
    assert (
        timed(ledger, "h100-sxm", file).expected.matmul_s > 10 * timed(ledger, "h100-sxm").expected.matmul_s
    )
    assert timed(ledger, file=file) == timed(ledger)


def test_a_file_of_a_gpu_without_bf16(tmp_path: Path, ledger: Ledger) -> None:
    data = json.loads(SHIPPED.read_text("utf-8"))
    dtype = OpTime._fields.index("dtype")
    rows = [row for row in data["ops"] if row[dtype] in ("float16", "float32")]
    file = written(tmp_path / "old.json", gpu="v100-sxm2-32gb", ops=rows)
    found = timed(ledger, "v100-sxm2-32gb", file)
    assert found.expected.matmul_s > 0
    assert calibrated(gpu("v100-sxm2-32gb"), own_calibration(file)).gpu.name == "v100-sxm2-32gb"


def test_a_row_may_take_the_operations_of_another(ledger: Ledger) -> None:
    like = gpu("h100-sxm").model_copy(update={"name": "mine", "operations_of": "h100-sxm"})
    assert calibrated(like) is calibrated(gpu("h100-sxm"))
    assert roofline(ledger, machine_with(like)) == timed(ledger, "h100-sxm")


def test_a_gpu_with_a_calibration_of_its_own_takes_its_operations(ledger: Ledger) -> None:
    h100, h200 = gpu("h100-sxm"), gpu("h200")
    assert calibrated(h100).gpu.name == "h100-sxm"
    assert calibrated(gpu("h100-pcie")).gpu.name == "h200"
    add = Op("aten.add.Tensor", "", 0, NO_LAYER, 0.0, 0.0, 0.0, 0.0, 10**9, "bfloat16")
    # Their products are as fast; the H200's memory is 1.43 times as fast on the data sheet.
    assert 1.1 < op_s(add, machine_with(h100)) / op_s(add, machine_with(h200)) < 1.45
    found = estimate(tiny_recipe(), machine_with(h100), ledger)
    assert any("timed by calibrate on h100-sxm" in one for one in found.assumptions)
    assert not any("not calibrated" in one for one in found.assumptions)


@pytest.mark.parametrize("changes", [{}, {"ops": [], "gpu": None}])
def test_costs_of_the_host_count_for_every_gpu(
    tmp_path: Path, ledger: Ledger, changes: dict[str, Any]
) -> None:
    file = written(tmp_path / "host.json", slower_host=2.0, **changes)
    for name in ("h100-sxm", "h100-nvl"):
        before, after = timed(ledger, name).expected, timed(ledger, name, file).expected
        assert after.matmul_s == before.matmul_s
        assert after.issue_s == pytest.approx(2 * before.issue_s)
    own = own_calibration(file)
    assert "a host that takes 2.00 times as long" in calibrated(gpu("h100-sxm"), own).origin


def test_single_costs_count_where_no_small_step_was_measured(tmp_path: Path, ledger: Ledger) -> None:
    """The machine of the catalog's calibration had a slower host than those that the rates are from."""
    data = json.loads(SHIPPED.read_text("utf-8"))
    slower = median(one["step_s"] / one["expected_s"] for one in data["host_steps"] if one.get("expected_s"))
    costs = {name: 2 * seconds for name, seconds in data["host"].items()}
    file = written(tmp_path / "cpu.json", host=costs, host_steps=[], ops=[], gpu=None)
    assert timed(ledger, file=file).expected.issue_s == pytest.approx(
        2 * slower * timed(ledger).expected.issue_s
    )


def test_the_catalog_has_what_its_rates_expect_of_small_steps() -> None:
    """Else: python -m evidence.scripts.fit_rates --small-steps."""
    steps = json.loads(SHIPPED.read_text("utf-8"))["host_steps"]
    expected = {canonical_json(one["recipe"]): one.get("expected_s") for one in steps}
    eager = [data for data in small_steps() if not data.get("compile")]
    assert all(expected[canonical_json(data)] for data in eager)
    for data in (eager[0], eager[3]):  # bf16 and autocast.
        recipe = recipe_from(data | {"hardware": {"gpu": "h200"}})
        assert predict(recipe).step_s == pytest.approx(expected[canonical_json(data)], rel=0.002)


def test_predictions_and_plans_take_a_file(tmp_path: Path) -> None:
    file, recipe = written(tmp_path / "slow.json", slower_host=3.0), tiny_recipe()
    before, after = predict(recipe), predict(recipe, calibration=file)
    assert before.step_s is not None
    assert after.step_s is not None
    assert after.step_s > 2 * before.step_s
    assert any("slow.json" in line for line in after.assumptions)
    for processes in (0, 1):
        some = {"vary": ["recompute"], "processes": processes}
        slow = plan(recipe, calibration=file, **some).found[0].estimate
        assert slow.step_s == pytest.approx(after.step_s)
        fast = plan(recipe, **some).found[0].estimate
        assert fast.step_s == pytest.approx(before.step_s)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        ("{}", "no calibration file"),
        ("[1]", "no calibration file"),
        ("step_s: 1", "not JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str | None, problem: str) -> None:
    file = tmp_path / "other.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=problem):
        own_calibration(file)


def test_a_file_that_says_nothing_of_the_gpu_or_a_host_is_refused(tmp_path: Path, ledger: Ledger) -> None:
    file = written(tmp_path / "none.json", gpu="a100-sxm-80gb", host={}, host_steps=[])
    with pytest.raises(InputError, match="neither operations of h200 nor enough costs"):
        timed(ledger, file=file)


def op(name: str, dtype: str, num_bytes: int, flops: float = 0.0, shape: tuple[int, ...] = ()) -> Op:
    layout = "nt" if shape else ""
    return Op(name, "", 0, -1, flops, flops, flops, flops, num_bytes, dtype, shape=shape, layout=layout)


def test_kernels_that_round_to_fp8_have_rates_of_their_own() -> None:
    times = calibrated(gpu("h200")).times
    plain, cast, scale, largest = (
        times.seconds(op(f"triton_{name}", "bfloat16", 2**29))
        for name in (
            "poi_fused_add_view_0",
            "poi_fused__scaled_mm__to_copy_clamp_t_9",
            "red_fused_abs_max_7",
            "red_fused_amax_7",
        )
    )
    assert plain is not None
    assert cast is not None
    assert cast > 1.2 * plain
    assert scale != largest


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_products_take_what_was_measured(dtype: str) -> None:
    """With fast accumulation, and without; two thirds of the peak in large ones, less in small ones."""
    times, peak = calibrated(gpu("h200")).times, gpu("h200").peak_flops_per_s["fp8"]
    shares = []
    for m, n, k in ((1024, 2048, 2048), (16384, 14336, 4096)):
        flops = 2.0 * m * n * k
        taken_s = times.seconds(op("aten._scaled_mm.default", dtype, m * (n + k), flops, (1, m, n, k)))
        assert taken_s is not None
        shares.append(flops / taken_s / peak)
    assert 0.4 < shares[0] < shares[1] < 0.8
