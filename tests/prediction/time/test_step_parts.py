"""What a step changes in the times of its operations: the power limit, calls on lists, dispatch modes."""

from dataclasses import replace

import pytest

from tiny_recipe import tiny_recipe
from trainfit.catalog.load import gpu
from trainfit.catalog.rates import rates
from trainfit.ledger.ledger import FIRST, LAST, MIDDLE, NO_LAYER, Ledger, Op, Segment
from trainfit.prediction import estimate
from trainfit.prediction.time.roofline import roofline
from trainfit.spec.result import StepTime

H200 = gpu("h200")
FORWARD, UPDATE = 0, 1


def expected(*ops: Op, repeats: tuple[int, ...] = ()) -> StepTime:
    segments = [Segment("steady", "forward"), Segment("steady", "optimizer")]
    found = roofline(Ledger(segments, list(ops), repeats=repeats), H200)
    assert found is not None
    return found.expected


def product(dtype: str = "bfloat16") -> Op:
    length, size = 8192, 4 if dtype == "float32" else 2
    flops, num_bytes = 2.0 * length**3, 3 * length**2 * size
    return Op(
        "aten.mm.default", "", FORWARD, NO_LAYER, flops, flops, flops, flops, num_bytes, dtype,
        shape=(1, length, length, length), layout="nt",
    )  # fmt: skip


def addition(num_bytes: int, name: str = "aten.add.Tensor") -> Op:
    return Op(name, "", FORWARD, NO_LAYER, 0, 0, 0, 0, num_bytes, "bfloat16")


def test_products_take_longer_where_they_are_most_of_the_step() -> None:
    power = rates().power
    alone, among = expected(*[product()] * 4), expected(*[product()] * 4, *[addition(30_000_000_000)] * 4)
    assert among.matmul_s / among.total < power.share
    assert alone.matmul_s / among.matmul_s == pytest.approx(1 + power.slope * (1 - power.share))
    fp32 = product("float32")  # Not on tensor cores.
    assert expected(*[fp32] * 4).matmul_s == pytest.approx(
        expected(*[fp32] * 4, *[addition(300_000_000_000)] * 4).matmul_s
    )


def test_an_allocation_takes_no_time_on_the_gpu() -> None:
    allocation = addition(30_000_000_000, "aten.empty_strided.default")
    assert expected(product(), allocation).memory_s == expected(product()).memory_s
    assert expected(product(), addition(30_000_000_000)).memory_s > expected(product()).memory_s


def test_an_update_of_several_groups_takes_as_long_as_one_of_their_sum() -> None:
    def update(group: int, num_bytes: int, calls: int = 1) -> Op:
        name = "aten._fused_adamw_.default"
        return Op(name, "", UPDATE, group, 0, 0, 0, 0, num_bytes, "float32", calls, is_update=True)

    parts = (update(FIRST, 30_000_000), update(MIDDLE, 20_000_000, 0), update(LAST, 10_000_000, 0))
    folded = expected(*parts, repeats=(10,))
    whole = expected(update(NO_LAYER, 240_000_000))
    assert folded.optimizer_s == pytest.approx(whole.optimizer_s)


def test_calls_through_a_dispatch_mode_cost_the_host() -> None:
    found = {
        policy: estimate.ledger_of(tiny_recipe("native", recompute=policy))
        for policy in ("full", "selective")
    }
    calls = {policy: sum(op.in_mode for op in ledger.steady_ops) for policy, ledger in found.items()}
    assert calls["full"] == 0
    selective = found["selective"]
    passing = [op for op in selective.steady_ops if op.in_mode]
    assert {selective.segments[op.segment].phase for op in passing} == {"forward", "backward"}
    assert len(passing) < calls["selective"]  # Views pass through it, too.
    silent = replace(selective, ops=[op._replace(in_mode=0) for op in selective.ops])
    issued = [one.expected.issue_s for one in (roofline(selective, H200), roofline(silent, H200)) if one]
    times = sum(selective.times(op) * op.in_mode for op in selective.steady_ops)
    assert issued[0] - issued[1] == pytest.approx(times * rates().host.in_mode)


def test_an_operator_in_python_costs_the_host_more_and_its_backward_most() -> None:
    host = rates().host

    def issued(name: str) -> float:
        op = Op(name, "", FORWARD, NO_LAYER, 0, 0, 0, 0, 1000, "bfloat16")
        return expected(*[op] * 5).issue_s - expected(*[op] * 4).issue_s

    assert issued("aten.add.Tensor") == pytest.approx(host.forward)
    assert issued("trainfit.own_rms_norm.default") == pytest.approx(host.python_op)
    assert issued("trainfit.own_rms_norm_backward.default") == pytest.approx(host.python_op_backward)
    assert host.forward < host.python_op < host.python_op_backward
