"""What the power limit adds to products and attention of a step."""

import pytest

from trainfit.catalog.load import gpu
from trainfit.catalog.rates import TensorShares, rates
from trainfit.ledger.ledger import MIDDLE, NO_LAYER, Ledger, Op, Segment
from trainfit.prediction.machine import machine_with
from trainfit.prediction.time.device_time import op_s
from trainfit.prediction.time.roofline import roofline, tensor_shares
from trainfit.spec.result import StepTime

H200 = machine_with(gpu("h200"))
A100 = machine_with(gpu("a100-sxm4-80gb"))
POWER = rates().power


def ledger(*ops: Op) -> Ledger:
    return Ledger([Segment("steady", "forward")], list(ops))


def expected(*ops: Op) -> StepTime:
    found = roofline(ledger(*ops), H200)
    assert found is not None
    return found.expected


def product(dtype: str = "bfloat16", length: int = 8192) -> Op:
    size = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}[dtype]
    flops, num_bytes = 2.0 * length**3, 3 * length**2 * size
    name = "aten._scaled_mm.default" if size == 1 else "aten.mm.default"
    return Op(
        name, "", 0, NO_LAYER, flops, flops, flops, flops, num_bytes, dtype,
        shape=(1, length, length, length), layout="nt",
    )  # fmt: skip


def attention(dtype: str = "bfloat16", *, flops: float = 1e13, kernel: str = "gluon") -> Op:
    name = (
        "aten._scaled_dot_product_cudnn_attention_backward.default"
        if kernel == "cudnn"
        else "trainfit.flash_attention_backward.default"
    )
    num_bytes = max(1000, int(1e-4 * flops))
    return Op(
        name, "", 0, NO_LAYER, flops, flops, flops, flops, num_bytes, dtype, kernel=kernel, head=128, seq=8192
    )


def memory(count: int) -> list[Op]:
    """Return operations that draw nothing by tensor cores."""
    return [Op("aten.add.Tensor", "", 0, NO_LAYER, 0, 0, 0, 0, 30_000_000_000, "bfloat16")] * count


def alone_s(op: Op) -> float:
    return op_s(op, H200)


def test_products_take_longer_where_they_are_most_of_the_step() -> None:
    alone, among = expected(*[product()] * 4), expected(*[product()] * 4, *memory(4))
    assert among.matmul_s == pytest.approx(4 * alone_s(product()))
    assert alone.matmul_s / among.matmul_s == pytest.approx(1 + POWER.slope * (1 - POWER.share))


def test_products_in_fp32_leave_the_clocks_alone() -> None:
    assert expected(*[product("float32")] * 4).matmul_s == pytest.approx(4 * alone_s(product("float32")))


@pytest.mark.parametrize("kernel", ["gluon", "cudnn"])
def test_attention_is_as_fast_as_alone_below_the_limit(kernel: str) -> None:
    one = attention(kernel=kernel)
    assert expected(one, *memory(20)).attention_s == pytest.approx(alone_s(one))


@pytest.mark.parametrize("kernel", ["gluon", "cudnn"])
def test_attention_takes_longer_by_the_load(kernel: str) -> None:
    one = attention(kernel=kernel)
    ops = one, *[product()] * 20
    shares = tensor_shares(ledger(*ops), H200)
    assert sum(shares) == pytest.approx(1, abs=0.02)  # The rest is the fixed cost of a launch
    load = shares.products + POWER.attention_load * shares.attention
    assert load > POWER.attention_from
    assert expected(*ops).attention_s / alone_s(one) == pytest.approx(
        1 + POWER.attention_slope * (load - POWER.attention_from)
    )


def test_products_in_fp8_draw_more_by_their_weight_and_are_slowed_down_by_their_share() -> None:
    ops = attention(), *[product("float8_e4m3fn")] * 100, *memory(1)
    shares, found = tensor_shares(ledger(*ops), H200), expected(*ops)
    assert shares.products == 0
    assert shares.fp8_products > POWER.share
    load = POWER.fp8_load * shares.fp8_products + POWER.attention_load * shares.attention
    assert found.attention_s / alone_s(attention()) == pytest.approx(
        1 + POWER.attention_slope * (load - POWER.attention_from)
    )
    products_s = found.matmul_s - found.attention_s
    assert products_s / (100 * alone_s(product("float8_e4m3fn"))) == pytest.approx(
        1 + POWER.slope * (shares.fp8_products - POWER.share)
    )


def test_layers_that_stand_for_others_count_as_often() -> None:
    """And an entry that the steady step has twice is slowed down once."""
    layer = attention(), *[product()] * 4
    folded = Ledger([Segment("steady", "forward")], [op._replace(group=MIDDLE) for op in layer], repeats=(5,))
    whole = ledger(*layer * 5)
    assert sum(whole.times(op) for op in whole.steady_ops) == sum(
        folded.times(op) for op in folded.steady_ops
    )
    assert tensor_shares(folded, H200) == pytest.approx(tensor_shares(whole, H200), rel=1e-3)
    found = roofline(folded, H200)
    assert found is not None
    assert found.expected.matmul_s == pytest.approx(expected(*layer * 5).matmul_s, rel=1e-3)


def test_a_gpu_that_waits_for_the_host_keeps_its_clocks() -> None:
    ops = [product(length=256)] * 1000
    shares = tensor_shares(ledger(*ops), H200)
    assert shares.products < POWER.share
    assert expected(*ops).matmul_s == pytest.approx(1000 * alone_s(ops[0]))


def test_products_of_every_kind_draw() -> None:
    by_products = {
        dtype: expected(attention(), *[product(dtype)] * 20).attention_s
        for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn")
    }
    assert by_products["float32"] == pytest.approx(alone_s(attention()))
    assert by_products["float32"] < by_products["bfloat16"] < by_products["float8_e4m3fn"]
    assert by_products["float16"] == pytest.approx(by_products["bfloat16"], rel=0.01)
    both = tensor_shares(ledger(product(), product("float8_e4m3fn"), *memory(1)), H200)
    assert both.products > both.fp8_products > 0


def test_attention_in_fp32_is_no_part_of_the_load() -> None:
    ops = attention("float32"), product(), *memory(1)
    assert tensor_shares(ledger(*ops), H200).attention == 0
    assert expected(*ops).attention_s == pytest.approx(alone_s(attention("float32")))


def test_attention_without_rows_is_slowed_down_and_never_sped_up() -> None:
    one = attention(kernel="flash-3")
    assert not H200.known.times.seconds(one)
    assert expected(one, *memory(20)).attention_s == pytest.approx(alone_s(one))
    assert expected(one, *[product()] * 20).attention_s > alone_s(one)


def test_attention_as_short_as_its_launch_takes_a_launch_at_least() -> None:
    short = attention(flops=1e3)
    assert alone_s(short) >= H200.known.rates.kernel_s
    assert expected(short, *memory(20)).attention_s == pytest.approx(alone_s(short))


def test_another_architecture_has_no_limit() -> None:
    alone, among = (
        roofline(ledger(*ops), A100) for ops in ([attention(), *memory(20)], [attention(), *[product()] * 20])
    )
    assert alone is not None
    assert among is not None
    assert alone.expected.attention_s == pytest.approx(op_s(attention(), A100))
    assert among.expected.attention_s == pytest.approx(op_s(attention(), A100))


def test_an_empty_step_has_no_shares() -> None:
    assert tensor_shares(ledger(), H200) == TensorShares(0, 0, 0)
