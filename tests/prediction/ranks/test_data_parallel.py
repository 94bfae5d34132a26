"""Predictions of data parallelism: one rank's buckets, gradients and optimizer state."""

from functools import cache
from typing import Any

import pytest
import torch

from tiny_recipe import tiny_recipe
from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.segments import rounded
from trainfit.parallel import ShardedOptimizer
from trainfit.prediction.estimate import estimate
from trainfit.prediction.machine import machine_with
from trainfit.prediction.several_ranks import FullestRank
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Hardware, Parallel, Recipe
from trainfit.spec.result import Estimate
from trainfit.techniques import registry
from trainfit.virtual.cluster.rank import fake_group
from virtual_runs import plain

LAYERS = 2
QKV, OUT, UP, DOWN, NORM, EMBEDDING = 64 * 32, 32 * 32, 128 * 32, 32 * 64, 32, 128 * 32
ELEMENTS = [EMBEDDING, *[NORM, QKV, OUT, NORM, UP, DOWN] * LAYERS, NORM, EMBEDDING]
PARAMETERS = [4 * each for each in ELEMENTS]  # Bytes of each parameter, fp32
GRADIENTS = sum(rounded(each) for each in PARAMETERS)
BUCKET = rounded(sum(PARAMETERS))  # Bytes of all gradients in one buffer
RANKS = 3


def recipe(strategy: str | None, **fields: Any) -> Recipe:
    count = RANKS if strategy else 1
    mesh = Parallel.model_validate({"strategy": strategy or "auto"})
    return tiny_recipe("native", LAYERS, hardware=Hardware(gpu="h200", count=count), parallel=mesh, **fields)


@cache
def ledger(strategy: str | None) -> Ledger:
    return trace(recipe(strategy))


@cache
def predicted(strategy: str | None) -> Estimate:
    return estimate(recipe(strategy), machine_with(gpu("h200")), ledger(strategy))


def collectives(strategy: str, phase: str) -> list[tuple[str, int]]:
    found = ledger(strategy)
    return [
        (one.name, one.num_bytes)
        for one in found.collectives
        if found.segments[one.segment] == ("steady", phase)
    ]


@pytest.mark.parametrize(
    ("strategy", "phase", "sizes"),
    [
        ("naive", "optimizer", PARAMETERS),
        ("overlapped", "backward", PARAMETERS),
        ("bucketed", "backward", [sum(PARAMETERS)]),
    ],
)
def test_gradients_reduced_in_place_take_no_memory(strategy: str, phase: str, sizes: list[int]) -> None:
    assert predicted(strategy).phases == predicted(None).phases
    reduced = collectives(strategy, phase)
    assert sorted(reduced) == sorted(("all_reduce", each) for each in sizes)
    # NCCL averages; gloo would divide afterwards.
    found = ledger(strategy)
    assert not any("div" in op.name for op in found.ops if found.segments[op.segment].phase == "optimizer")


def test_one_all_reduce_copies_all_gradients_into_a_buffer() -> None:
    flat, one = predicted("flat"), predicted(None)
    assert flat.phases.steady.backward == one.phases.steady.backward
    assert collectives("flat", "optimizer") == [("all_reduce", sum(PARAMETERS))]
    assert flat.breakdown.gradients == GRADIENTS + BUCKET
    assert flat.breakdown.communication == 0


def test_ddp_adds_its_buckets_and_in_the_second_step_the_first_ones() -> None:
    ddp, one = predicted("ddp"), predicted(None)
    assert ddp.phases.after_init == one.phases.after_init + BUCKET
    assert ddp.phases.first.peak == one.phases.first.peak + BUCKET
    assert ddp.peak_allocated_bytes == one.peak_allocated_bytes + BUCKET
    peaks = ddp.two_peaks
    assert peaks is not None
    assert peaks.expected.allocated == ddp.peak_allocated_bytes
    possible = peaks.possible
    assert possible == ddp.highest
    assert possible.allocated == peaks.possible_phases.peak == ddp.peak_allocated_bytes + BUCKET
    assert possible.device - ddp.peak_device_bytes == possible.reserved - ddp.peak_reserved_bytes >= 0
    assert ddp.headroom_bytes == ddp.device_bytes - possible.device
    assert ddp.phases.steady.optimizer == one.phases.steady.optimizer + BUCKET
    assert ddp.breakdown.communication == BUCKET
    assert collectives("ddp", "backward") == [("all_reduce", sum(PARAMETERS))]


def test_a_sharded_optimizer_broadcasts_every_parameter_and_holds_its_share() -> None:
    # Largest first to the rank with the fewest bytes: 36,864, 36,864 and 33,408 bytes of parameters.
    states = [s.num_bytes for s in ledger("zero1").storages if s.category == "optimizer"]
    assert sum(states) - 4 * len(states) // 3 == 2 * 36_864  # one of three is a step counter
    assert sorted(collectives("zero1", "optimizer")) == sorted(("broadcast", each) for each in PARAMETERS)
    line = "rank 0, which updates the most parameters, 36.00 KiB; the fewest of a rank are 32.62 KiB"
    assert any(line in each for each in predicted("zero1").assumptions)


def test_a_sharded_optimizer_is_predicted_of_the_rank_that_owns_most() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 2, 2)]
    rank = FullestRank()
    with fake_group({"replicate": 2}):
        optimizer = ShardedOptimizer(parameters, torch.optim.SGD, choose_rank=rank.choose, lr=0.1)
        assert [one.numel() for one in optimizer.sharded.param_groups[0]["params"]] == [2, 2]
        assert "rank 1, which updates the most" in rank.about()


def test_compiled_blocks_run_under_ddp() -> None:
    mesh = {"hardware": Hardware(gpu="h200", count=RANKS), "parallel": Parallel(strategy="ddp")}
    found = trace(plain(LAYERS, compile="block", **mesh))
    assert sum(one.name == "all_reduce" for one in found.collectives) == 2


def test_strategies_that_overlap_hide_communication() -> None:
    hidden = {}
    for strategy in ("naive", "flat", "bucketed", "ddp"):
        time = predicted(strategy).time
        assert time is not None
        hidden[strategy] = time.hidden_communication_s, time.communication_s
    assert hidden["naive"][0] == hidden["flat"][0] == 0
    assert hidden["naive"][1] > hidden["flat"][1] > 0  # latency of each parameter
    # One bucket, complete when the backward is: nothing is left to hide it.
    assert hidden["ddp"] == (0, pytest.approx(hidden["flat"][1]))
    time = predicted("overlapped").time
    assert time is not None
    assert time.hidden_communication_s > 0 < time.communication_s < hidden["naive"][1]


def test_resharding_is_fsdp2s_alone() -> None:
    mesh = Parallel(strategy="ddp", reshard_after_forward=False)
    with pytest.raises(InputError, match="parallel.reshard_after_forward = false: ddp keeps whole weights"):
        registry.check(tiny_recipe(hardware=Hardware(count=RANKS), parallel=mesh))


@pytest.mark.parametrize(
    ("strategy", "has_buckets"),
    [("fsdp", False), ("naive", False), ("flat", False), ("ddp", True), ("zero1", True), ("bucketed", True)],
)
def test_a_size_of_buckets_is_refused_where_there_are_none(strategy: str, has_buckets: bool) -> None:
    mesh = Parallel.model_validate({"strategy": strategy, "bucket_mb": 50})
    one = tiny_recipe(hardware=Hardware(count=RANKS), parallel=mesh)
    if has_buckets:
        registry.check(one)
        return
    with pytest.raises(InputError, match="parallel.bucket_mb = 50.*has no buckets of gradients"):
        registry.check(one)


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlapped", "bucketed"])
def test_our_strategies_refuse_to_average_after_every_micro_batch(strategy: str) -> None:
    mesh = Parallel.model_validate({"strategy": strategy, "sync_each_batch": True})
    once = recipe(strategy).model_copy(update={"parallel": mesh})
    registry.check(once)
    batch = once.batch.model_copy(update={"accumulate": 2})
    with pytest.raises(InputError, match="averages gradients once a step"):
        registry.check(once.model_copy(update={"batch": batch}))
