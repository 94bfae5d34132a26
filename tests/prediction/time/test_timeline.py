"""Replay of computation and communication: what is hidden, and where the computation waits."""

from typing import Any

import pytest

from trainfit.catalog.constants import constants
from trainfit.ledger.ledger import MIDDLE, NO_LAYER, Collective, Ledger, Op, Segment
from trainfit.prediction.time.timeline import Host, Overlap, replay

FORWARD, BACKWARD, UPDATE = 0, 1, 2
QUEUE = constants().host.queue


def ledger(segments: list[int], collectives: list[Collective], groups: list[int] | None = None) -> Ledger:
    """Return one of operations in these segments, each of one second."""
    names = [Segment("steady", phase) for phase in ("forward", "backward", "optimizer")]
    groups = groups or [NO_LAYER] * len(segments)
    ops = [
        Op("op", "", segment, group, 0, 0, 0, 0, 0, "")
        for segment, group in zip(segments, groups, strict=True)
    ]
    return Ledger(names, ops, collectives=collectives)


def one(op: int, segment: int, seconds: int, span: int = 2, **order: Any) -> Collective:
    return Collective("all_reduce", segment, NO_LAYER, op, seconds, 2, span, **order)


def waits(found: Ledger) -> dict[int, float]:
    return replay(found, lambda op: 1.0, lambda collective: float(collective.num_bytes)).exposed_s


def test_reductions_of_a_backward_are_waited_for_at_its_end() -> None:
    # Four seconds of backward. The first begins after 1 s and takes 2 s, the second after 4 s.
    found = ledger([BACKWARD] * 4 + [UPDATE], [one(0, BACKWARD, 2), one(3, BACKWARD, 1)])
    assert waits(found) == {BACKWARD: 1.0}


def test_collectives_of_a_group_follow_one_another_and_those_of_others_do_not() -> None:
    same = ledger([BACKWARD] * 4, [one(0, BACKWARD, 4), one(1, BACKWARD, 2)])
    assert waits(same) == {BACKWARD: 3.0}  # They end 7 s after the beginning.
    others = ledger([BACKWARD] * 4, [one(0, BACKWARD, 4), one(1, BACKWARD, 2, span=3)])
    assert waits(others) == {BACKWARD: 1.0}


def test_outside_the_backward_a_collective_of_the_computations_stream_is_waited_for_at_once() -> None:
    found = ledger([UPDATE, UPDATE], [one(0, UPDATE, 3)])
    assert waits(found) == {UPDATE: 3.0}
    synchronous = one(0, BACKWARD, 3)._replace(is_synchronous=True)
    assert waits(ledger([BACKWARD] * 8, [synchronous])) == {BACKWARD: 3.0}


def test_a_prefetched_gather_is_waited_for_at_its_first_use() -> None:
    # Issued after operation 2, but it needs only operation 0, and operation 4 waits for it.
    gather = one(2, FORWARD, 5, begins_after=0, waited_at=3)
    assert waits(ledger([FORWARD] * 5, [gather])) == {FORWARD: 2.0}
    assert waits(ledger([FORWARD] * 5, [gather._replace(begins_after=2)])) == {FORWARD: 4.0}


@pytest.mark.parametrize("times", [1, 4])
def test_a_repeated_group_repeats_its_collectives(times: int) -> None:
    reduced = one(1, FORWARD, 2, is_synchronous=True)._replace(group=MIDDLE)
    found = ledger([FORWARD] * 3, [reduced], [NO_LAYER, MIDDLE, NO_LAYER])
    found.repeats = (times,)
    assert waits(found) == {FORWARD: 2.0 * times}


@pytest.mark.parametrize(
    ("num_ops", "issue_s", "op_s", "reads", "step_s"),
    [
        (10, 1.0, 3.0, (), 30.0),  # The GPU decides.
        (10, 3.0, 1.0, (), 30.0),  # The host decides.
        (10, 1.0, 3.0, (5,), 31.0),  # A read: the GPU waits for the next operation.
        (4 * QUEUE, 1.0, 1.0, (), 4.0 * QUEUE),
    ],
)
def test_the_slower_of_host_and_gpu_decides_and_a_read_makes_both_wait(
    num_ops: int, issue_s: float, op_s: float, reads: tuple[int, ...], step_s: float
) -> None:
    found = ledger([FORWARD] * num_ops, [])
    for at in reads:
        found.ops[at] = found.ops[at]._replace(host=(0, 0, 0, 1))
    times = replay(found, lambda op: op_s, lambda one: 0.0, host=Host(lambda op: issue_s, 0.0, 0.0))
    assert times.step_s == pytest.approx(step_s)
    assert times.idle_s == pytest.approx(step_s - num_ops * op_s)
    assert times.issue_s == pytest.approx(num_ops * issue_s)


def test_the_host_runs_ahead_by_the_queue_and_no_further() -> None:
    """Slow operations first: the host may issue QUEUE launches meanwhile, and the GPU idles for the rest."""
    slow, quick = 50, 2 * QUEUE
    found = ledger([FORWARD] * slow + [UPDATE] * quick, [])
    seconds = {FORWARD: 100.0, UPDATE: 0.0}
    times = replay(
        found, lambda op: seconds[op.segment], lambda one: 0.0, host=Host(lambda op: 1.0, 0.0, 0.0)
    )
    # The last QUEUE operations are issued while the slow ones of the next step have not begun.
    assert times.idle_s == pytest.approx(QUEUE, abs=slow + 1)


def test_computation_and_a_collective_beside_it_slow_each_other_down() -> None:
    """A collective of 1 s at half its speed runs beside 2 s, in which 1 s of computation is done."""
    found = ledger([BACKWARD] * 4 + [UPDATE], [one(0, BACKWARD, 1)])
    times = replay(found, lambda op: 1.0, lambda each: 1.0, overlap=Overlap(0.5, 0.5))
    assert times.slowed_s == {BACKWARD: pytest.approx(1.0)}
    assert times.exposed_s == {}
    assert times.step_s == pytest.approx(6.0)
    # One that begins with the last operation runs alone, at its full speed.
    late = ledger([BACKWARD] * 4 + [UPDATE], [one(3, BACKWARD, 1)])
    times = replay(late, lambda op: 1.0, lambda each: 1.0, overlap=Overlap(0.5, 0.5))
    assert (times.slowed_s, times.exposed_s) == ({}, {BACKWARD: 1.0})
    # One of no load takes nothing.
    light = replay(found, lambda op: 1.0, lambda each: 1.0, overlap=Overlap(0.5, 0.5), load=lambda each: 0.0)
    assert (light.slowed_s, light.step_s) == ({}, 5.0)


def test_what_the_host_issues_late_is_its_wait_and_not_the_collectives() -> None:
    found = ledger([FORWARD] * 3, [one(1, FORWARD, 2, is_synchronous=True)])
    slow = Host(collective_s=lambda each: 10.0)
    times = replay(found, lambda op: 1.0, lambda each: float(each.num_bytes), host=slow)
    assert times.exposed_s == {FORWARD: pytest.approx(2.0)}
    assert times.step_s == pytest.approx(3.0 + 2.0 + times.idle_s)
    assert times.idle_s == pytest.approx(7.0, abs=2.0)
    assert times.issue_s == 10.0


def test_a_loop_of_launches_begins_with_a_read_and_goes_on_at_the_hosts_pace() -> None:
    found = ledger([FORWARD] * 3, [])
    looped = found.ops[1]._replace(name="loop")
    found.ops[1] = looped
    host = Host(lambda op: 0.5, loop_s=lambda op: 4.0 if op is looped else 0.0)
    times = replay(found, lambda op: 1.0, lambda collective: 0.0, host=host)
    # The loop is issued when the GPU has done the first operation: 0.5 s until its first product, 4 s until
    # its last one, and another 0.5 s until the operation after it.
    assert times.step_s == pytest.approx(1 + 0.5 + 4 + 0.5 + 1)
    assert times.issue_s == pytest.approx(3 * 0.5 + 4)
