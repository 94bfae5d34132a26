"""GPUs without a calibration: the calibrated one's times, by the ratio of what both sustain."""

import pytest

from trainfit.catalog.load import gpu, gpus
from trainfit.ledger.ledger import NO_LAYER, Collective, Op
from trainfit.prediction import communication
from trainfit.prediction.machine import machine_with
from trainfit.prediction.predict import predict
from trainfit.prediction.time.device_time import op_s
from virtual_runs import recipe_of

H200, A100 = gpu("h200"), gpu("a100-sxm4-80gb")


def product(width: int) -> Op:
    """Return one that the peak bounds."""
    flops, num_bytes = 2.0 * 8192 * width * 4096, 2 * (8192 * 4096 + 8192 * width + 4096 * width)
    return Op(
        "aten.mm.default",
        "",
        0,
        NO_LAYER,
        flops,
        flops,
        flops,
        flops,
        num_bytes,
        "bfloat16",
        shape=(1, 8192, width, 4096),
    )


FLASH = Op(
    "aten._scaled_dot_product_flash_attention", "", 0, NO_LAYER, 1e12, 1e12, 1e12, 1e12, 10**7, "bfloat16",
    kernel="flash", head=128, seq=8192,
)  # fmt: skip
ADD = Op("aten.add.Tensor", "", 0, NO_LAYER, 0.0, 0.0, 0.0, 0.0, 10**9, "bfloat16")


@pytest.mark.parametrize(
    ("op", "share"),
    [(product(4096), "products"), (product(4097), "mma"), (FLASH, "mma"), (ADD, "memory")],
    ids=["aligned", "odd", "flash", "add"],
)
def test_an_operation_takes_the_calibrated_time_by_what_bounds_it(op: Op, share: str) -> None:
    assert A100.sustained is not None
    assert H200.sustained is not None
    rates = [
        (row.peak_flops_per_s["bf16"] if op.causal_flops else row.memory_bytes_per_s or 0.0)
        * getattr(row.sustained, share)
        for row in (H200, A100)
    ]
    assert op_s(op, machine_with(A100)) / op_s(op, machine_with(H200)) == pytest.approx(
        rates[0] / rates[1], rel=0.02
    )


def test_a_gpu_without_shares_has_those_of_its_reference() -> None:
    a10 = gpu("a10")
    assert a10.sustained is None
    same = a10.model_copy(update={"name": "same", "sustained": gpu(a10.reference).sustained})
    assert op_s(product(4096), machine_with(a10)) == op_s(product(4096), machine_with(same))


def test_no_gpu_sustains_more_than_copies_and_large_products_reach() -> None:
    for row in gpus().values():
        if row.sustained is not None:
            assert row.sustained.mma <= row.sustained.products <= 0.87
            assert row.sustained.memory <= 0.92


def test_published_steps_bound_the_time() -> None:
    found = predict(recipe_of("tiny-llama-demo", hardware={"gpu": "a100-sxm4-80gb"}))
    bound, step_s = found.bounds["step_s"], found.step_s
    assert A100.sustained is not None
    assert A100.sustained.steps is not None
    assert step_s is not None
    assert bound.high == pytest.approx(A100.sustained.steps.high * step_s)
    assert "published" in bound.basis
    assert any("what both sustain" in one for one in found.assumptions)


def test_a_collective_over_a_slow_network_takes_little_from_the_computation() -> None:
    inside = Collective("all_reduce", 0, NO_LAYER, 0, 10**9, 8, 8)
    outside = inside._replace(num_ranks=16, span=121)
    assert communication.load(inside, A100) == 1
    assert communication.load(outside, A100) == pytest.approx(25 * 0.75 / (300 * 0.74), rel=0.01)


@pytest.mark.parametrize("count", [1, 2, 16])
def test_steps_of_one_h100_have_measured_bounds_and_those_of_several_published_ones(count: int) -> None:
    found = predict(recipe_of("tiny-llama-demo", hardware={"gpu": "h100-sxm", "count": count}))
    assert ("published" in found.bounds["step_s"].basis) == (count > 1)
    shares = gpu("h100-sxm").sustained
    assert shares is not None
    assert shares.steps is not None
    assert found.step_s is not None
    if count > 1:
        assert found.bounds["step_s"].high == pytest.approx(shares.steps.high * found.step_s)
