"""What a step changes in the times of its operations: calls on lists, dispatch modes, fixed costs."""

from dataclasses import replace

import pytest

from tiny_recipe import tiny_recipe
from trainfit.catalog.constants import constants
from trainfit.catalog.load import gpu
from trainfit.catalog.rates import rates
from trainfit.ledger.ledger import FIRST, LAST, MIDDLE, NO_LAYER, Ledger, Op, Segment
from trainfit.prediction import predict
from trainfit.prediction.machine import machine_with
from trainfit.prediction.time.roofline import Roofline, roofline
from trainfit.spec.result import StepTime

H200 = machine_with(gpu("h200"))
FORWARD, UPDATE = 0, 1
SEGMENTS = [Segment("steady", "forward"), Segment("steady", "optimizer")]


def expected(*ops: Op, repeats: tuple[int, ...] = ()) -> StepTime:
    found = roofline(Ledger(SEGMENTS, list(ops), repeats=repeats), H200)
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
        policy: predict.ledger_of(tiny_recipe("native", recompute=policy)) for policy in ("full", "selective")
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
        ops = [Op(name, "", FORWARD, NO_LAYER, 0, 0, 0, 0, 1000, "bfloat16") for _ in range(5)]
        return expected(*ops).issue_s - expected(*ops[:4]).issue_s

    assert issued("aten.add.Tensor") == pytest.approx(host.forward)
    assert issued("aten.mm.out") == pytest.approx(host.in_graph)
    assert issued("aten.empty_strided.default") == pytest.approx(host.allocation)
    assert issued("aten._scaled_mm.default") == pytest.approx(host.forward + host.scaled_product)
    assert issued("aten._scaled_mm.out") == pytest.approx(host.in_graph)
    assert host.allocation < host.in_graph
    assert issued("trainfit.own_rms_norm.default") == pytest.approx(host.python_op)
    assert issued("trainfit.own_rms_norm_backward.default") == pytest.approx(host.python_op_backward)
    assert host.forward < host.python_op < host.python_op_backward


def test_a_step_has_a_fixed_cost_once() -> None:
    host = rates().host
    one, two = expected(addition(1000)), expected(addition(1000), addition(1000))
    assert one.issue_s == pytest.approx(host.step + host.forward)
    assert two.issue_s - one.issue_s == pytest.approx(host.forward)


@pytest.mark.parametrize("batches", [1, 2])
def test_autograd_adds_up_gradients_without_python(batches: int) -> None:
    """With one micro-batch it is the optimizer that adds in the backward."""
    host = rates().host
    segments = [Segment("steady", "backward")] * batches
    add = Op("aten.add_.Tensor", "", 0, NO_LAYER, 0, 0, 0, 0, 1000, "bfloat16", is_update=True)
    found = roofline(Ledger(segments, [add]), H200)
    assert found is not None
    each = host.backward if batches > 1 else host.update_in_backward
    assert found.expected.issue_s == pytest.approx(host.step + each)


def test_bounds_without_a_calibrated_host_have_room_for_a_slow_one() -> None:
    waits = Roofline(StepTime(matmul_s=0.2, host_s=0.8, issue_s=1.0), 0.0)
    fits = Roofline(StepTime(matmul_s=1.0, issue_s=0.9), 0.0)
    free = Roofline(StepTime(matmul_s=1.0, issue_s=0.5), 0.0)
    known = rates()
    assert waits.band(compiled=False).high == pytest.approx(known.host_bound.high * constants().host.slowest)
    assert waits.band(compiled=False, own_host=True) == known.own_host
    assert fits.band(compiled=True).high == pytest.approx(
        known.compiled_device_bound.high * 0.9 * constants().host.slowest
    )
    assert fits.band(compiled=True, own_host=True) == known.compiled_device_bound
    assert free.band(compiled=False) == known.device_bound
    assert free.band(compiled=False, several_gpus=True) == known.several_gpus


def test_an_optimizers_operator_costs_less_than_one_of_the_loss() -> None:
    host = rates().host
    update = addition(1000, "trainfit.adamw_.default")._replace(segment=UPDATE)
    one, two = expected(addition(1000)), expected(addition(1000), update)
    assert two.issue_s - one.issue_s == pytest.approx(host.python_update)
    assert host.python_update < host.python_op


@pytest.mark.parametrize(
    ("name", "module", "is_checkpointed"),
    [
        ("aten.mm.default", "layers.0.mlp", True),
        ("aten.mm.out", "", False),
        ("aten._scaled_dot_product_cudnn_attention.default", "", False),
    ],
)
def test_a_compiled_model_recomputes_without_checkpointing(
    name: str, module: str, is_checkpointed: bool
) -> None:
    segments = [Segment("steady", "forward"), Segment("steady", "backward")]
    recomputed = product()._replace(name=name, module=module, segment=1, model_flops=0.0)
    ledger = Ledger(segments, [recomputed])
    assert ledger.recomputes(recomputed)
    found = roofline(ledger, H200)
    assert found is not None
    assert (found.expected.issue_s > rates().host.step + rates().host.checkpoint) == is_checkpointed
