"""Predictions for several GPUs: one rank of FSDP2 on torch's fake process group."""

import itertools
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tiny_recipe import tiny_recipe, wide_recipe
from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import ALLOCATE, Ledger, LiveEvent
from trainfit.models.build import build_model
from trainfit.prediction import communication
from trainfit.prediction.device_overhead import overhead_bytes
from trainfit.prediction.estimate import estimate, replay_on
from trainfit.prediction.machine import machine_with
from trainfit.prediction.trace import trace
from trainfit.report.prediction_text import show
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Hardware, Parallel, Recipe
from trainfit.spec.result import Estimate
from trainfit.spec.sweep import Row
from trainfit.spec.units import MIB
from trainfit.techniques.parallel import fsdp
from trainfit.virtual.cluster.shards import Chunks

LAYERS = 4
LORA = Adapter(kind="lora", rank=4)
INVERSE_FREQUENCIES = 16  # Bytes of the rotary embedding's buffer, which every rank holds whole


def recipe(count: int, **fields: Any) -> Recipe:
    return tiny_recipe("native", LAYERS, hardware=Hardware(gpu="h200", count=count), **fields)


@cache
def ledger(count: int, **fields: Any) -> Ledger:
    return trace(recipe(count, **fields))


def predicted(count: int) -> Estimate:
    return estimate(recipe(count), machine_with(gpu("h200")), ledger(count))


@cache
def shapes() -> dict[str, torch.Size]:
    device = torch.device("meta")
    model = build_model(recipe(1).model, dtype=torch.float32, device=device, attention="sdpa", quantize=None)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def elements(count: int, blocks_only: bool = False) -> int:
    """Elements of the first rank: rows of each parameter rounded up."""
    return sum(
        -(-shape[0] // count) * shape[1:].numel()
        for name, shape in shapes().items()
        if not blocks_only or "layers." in name
    )


@pytest.mark.parametrize("count", [4, 5])
def test_the_first_rank_holds_the_largest_shards(count: int) -> None:
    weights = sum(s.num_bytes for s in ledger(count).storages if s.path.startswith("weights/"))
    assert weights == 4 * elements(count) + INVERSE_FREQUENCIES
    states = sum(s.num_bytes for s in ledger(count).storages if s.category == "optimizer")
    assert 8 * elements(count) <= states <= 8 * elements(count) + 512 * len(shapes())


def test_blocks_are_gathered_twice_and_gradients_scattered_once() -> None:
    found = ledger(4)
    total = 4 * elements(1)
    moved: dict[tuple[str, str, str], int] = {}
    for one in found.collectives:
        key = (one.name, *found.segments[one.segment])
        moved[key] = moved.get(key, 0) + one.num_bytes
        assert (one.num_ranks, one.span) == (4, 4)
    for step in ("first", "steady"):
        assert moved["all_gather", step, "forward"] == total
        assert moved["reduce_scatter", step, "backward"] == total
        # The root's parameters stay gathered from the forward to the backward.
        assert moved["all_gather", step, "backward"] == 4 * elements(1, blocks_only=True)
    sent = {one.kind: one.bytes_sent for one in predicted(4).traffic}
    assert sent["reduce_scatter"] == total * 3 // 4
    assert sent["all_gather"] == (total + 4 * elements(1, blocks_only=True)) * 3 // 4


def test_fsdp2s_copies_and_parameters_are_counted() -> None:
    """Gathered parameters and gradients are copied once each way: read and written."""
    found = ledger(4)
    gathers, scatters = (
        [one for one in found.collectives if one.name == name] for name in ("all_gather", "reduce_scatter")
    )
    copied = Counter[str]()
    for op in found.ops:
        if op.name.startswith("fsdp."):
            copied[op.name] += op.num_bytes
    assert copied["fsdp.split_with_sizes_copy.default"] == 2 * sum(one.num_bytes for one in gathers)
    assert copied["fsdp.chunk_cat.default"] == 2 * sum(one.num_bytes for one in scatters)
    # Two steps; every parameter is reduced once in each.
    assert sum(one.num_parameters for one in scatters) == 2 * len(shapes())
    updates = [op for op in found.steady_ops if found.segments[op.segment].phase == "optimizer"]
    assert sum(op.wrapped[0] for op in updates) >= 1


def test_gathers_and_scatters_have_streams_of_their_own() -> None:
    found = ledger(4)
    streams = {s.stream for s in found.storages}
    assert streams == {0, 1, 2}
    assert {s.category for s in found.storages if s.stream} == {"communication", "gradients"}
    replayed, _ = replay_on(gpu("h200"), found)
    assert replayed.breakdown.communication > 0


def test_blocks_gathered_ahead_are_alive_together() -> None:
    def gathered(found: Ledger) -> int:
        sizes = (e.num_bytes * (1 if e.kind == ALLOCATE else -1) for e in found.expand() if is_gathered(e))
        return max(itertools.accumulate(sizes))

    def is_gathered(event: LiveEvent) -> bool:
        return event.category == "communication"

    ahead, block = (
        trace(recipe(4, parallel=Parallel(prefetch=3))),
        4 * elements(1, blocks_only=True) // LAYERS,
    )
    assert gathered(ahead) - gathered(ledger(4)) == 2 * block
    assert Counter(one.name for one in ahead.collectives) == Counter(
        one.name for one in ledger(4).collectives
    )
    with pytest.raises(InputError, match=r"parallel.prefetch = 2"):
        trace(recipe(2, parallel=Parallel(strategy="ddp", prefetch=2)))


def test_copy_engines_take_neither_buffers_nor_communicators() -> None:
    """Shards and the slots of two reductions are outside the allocator; what is sent is as with NCCL."""
    plain, copied = ledger(2), trace(recipe(2, parallel=Parallel(copy_engines=True)))
    sent = [[one.num_bytes for one in found.collectives if "gather" in one.name] for found in (plain, copied)]
    assert sent[0] == sent[1]
    assert {one.name for one in copied.collectives} == {"copied_gather", "copied_scatter"}
    shards = 4 * elements(2)
    assert shards <= copied.peer_bytes <= 3 * shards
    peaks = [estimate(recipe(2), machine_with(gpu("h200")), found).phases for found in (plain, copied)]
    assert peaks[0].after_init == peaks[1].after_init
    assert peaks[1].steady.optimizer <= peaks[0].steady.optimizer - shards
    outside = [overhead_bytes(gpu("h200"), found) for found in (plain, copied)]
    assert outside[1] < outside[0] - 800 * MIB
    for mesh in ({"replicate": 2, "shard": 2}, {"strategy": "ddp"}):
        with pytest.raises(InputError, match="copy_engines"):
            trace(recipe(4, parallel=Parallel(copy_engines=True, **mesh)))
    with pytest.raises(InputError, match="one host"):
        trace(recipe(16, parallel=Parallel(copy_engines=True)))


def test_replicas_reduce_their_shards() -> None:
    found = ledger(4, parallel=Parallel(replicate=2, shard=2))
    reduced = [
        one
        for one in found.collectives
        if one.name == "all_reduce" and found.segments[one.segment].step == "steady"
    ]
    assert sum(one.num_bytes for one in reduced) == 4 * elements(2)
    assert {(one.num_ranks, one.span) for one in reduced} == {(2, 3)}
    assert {(one.num_ranks, one.span) for one in found.collectives if one.name == "all_gather"} == {(2, 2)}


def test_more_gpus_need_less_memory_each_and_cost_more_an_hour() -> None:
    two, eight = predicted(2), predicted(8)
    assert eight.peak_allocated_bytes < two.peak_allocated_bytes
    assert eight.phases.after_init < two.phases.after_init
    assert (two.num_gpus, eight.num_gpus) == (2, 8)
    assert two.params == eight.params == predicted(1).params
    assert two.step_s is not None
    assert two.tokens_per_s == pytest.approx(2 * 32 / two.step_s)
    row = Row(
        variant="two", recipe=recipe(2).content(), recipe_id="", status="done", estimate=two
    )  # fmt: skip
    assert row.predicted_samples_per_s == pytest.approx(two.tokens_per_s / 16)
    assert two.cost is not None
    assert two.cost.per_hour == 2 * two.cost.price_per_gpu_hour
    assert not predicted(1).traffic


def test_collectives_leave_a_host_by_the_catalogs_number_of_gpus() -> None:
    found = ledger(4)
    for name, between_hosts in (("h200", False), ("gb200", False), ("rtx-4090", True), ("gh200-96gb", True)):
        assert {one.between_hosts for one in communication.traffic(found, gpu(name))} == {between_hosts}
        assert (
            any("between hosts" in line for line in communication.assumptions(found, gpu(name)))
            is between_hosts
        )


def test_accumulated_gradients_are_scattered_once_a_micro_batch() -> None:
    found = ledger(2, batch=Batch(micro=1, seq=16, accumulate=2))
    scattered = sum(one.num_bytes for one in found.collectives if one.name == "reduce_scatter")
    assert scattered == 2 * 2 * 4 * elements(1)


def test_what_does_not_work_on_shards_is_refused() -> None:
    for fields in (
        {"optimizer": {"name": "muon"}},
        {"optimizer": {"name": "adafactor"}},
        {"optimizer": {"name": "adamw", "in_backward": True}},
        {"compile": "model"},
    ):
        with pytest.raises(InputError, match=r"on several GPUs \(hardware.count: 2\)"):
            trace(recipe(2, **fields))
    with pytest.raises(InputError, match=r"optimizer.implementation = 'fused'.*use foreach"):
        trace(recipe(2, optimizer={"name": "sgd"}))
    with pytest.raises(ValueError, match="hardware.count is 4"):
        recipe(4, parallel=Parallel(shard=2))


def test_a_loss_that_reads_the_output_layer_gathers_as_the_models_own() -> None:
    def kinds(of: Ledger) -> list[tuple[str, int, int]]:
        return [(one.name, one.segment, one.num_bytes) for one in of.collectives]

    found = trace(recipe(4, loss="fused"))
    assert kinds(found) == kinds(ledger(4))


def test_what_no_measured_run_had_is_an_assumption() -> None:
    (line,) = fsdp.not_compared(recipe(4, optimizer={"name": "adamw", "clip_norm": 1.0}))
    assert line.endswith("measured run: optimizer.clip_norm: 1.0")
    assert not any("not yet compared" in line for line in ledger(4).assumptions)


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_codes_of_a_quantised_base_are_sharded(kind: Any) -> None:
    """A rank makes them from one whole weight after the other, and counts as many weights as one GPU does."""

    def found(count: int) -> Ledger:
        made = wide_recipe(4, hardware=Hardware(gpu="h200", count=count), adapter=LORA, quantize=kind)
        return trace(made, whole=True)

    def codes(ledger: Ledger) -> list[int]:
        names = ("codes/", "block_codes/")
        return sorted(s.num_bytes for s in ledger.storages if s.path.split(".")[-1].startswith(names))

    one, two = found(1), found(2)
    assert [2 * size for size in codes(two)] == codes(one) != []
    assert (two.params, two.trainable_params) == (one.params, one.trainable_params)


def test_a_process_that_is_a_rank_is_refused_and_none_is_left_behind() -> None:
    ledger(2)
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(InputError, match="rank of a process group already"):
            trace(recipe(2))
    finally:
        dist.destroy_process_group()


def test_the_text_states_what_is_of_one_gpu_and_what_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(count: int) -> str:
        show(recipe(count), predicted(count))
        return " ".join(capsys.readouterr().out.split())

    one, two = printed(1), printed(2)
    for part in ("Memory of one GPU at the peak", "One step of one GPU", "tokens/s in all", "on each of 2 x",
                 "64 tokens a step: 2 x 16, on each of 2 GPUs"):  # fmt: skip
        assert part in two
        assert part not in one


def test_several_of_the_virtual_cpu_are_refused() -> None:
    with pytest.raises(InputError, match=r"hardware.count.*gpu: cpu is this machine"):
        trace(tiny_recipe("native", LAYERS, hardware=Hardware(gpu="cpu", count=8)))


def test_deep_models_are_traced_with_three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay_on(gpu("h200"), ledger(4))[0]
    monkeypatch.setattr(fsdp, "MAX_TRACED_LAYERS", LAYERS - 1)
    found = trace(recipe(4))
    assert found.repeats == (2,)
    assert len(found.ops) <= len(ledger(4).ops)
    short = replay_on(gpu("h200"), found)[0]
    assert short.peak_allocated_bytes == pytest.approx(whole.peak_allocated_bytes, rel=1e-3)
    assert communication.traffic(found, gpu("h200")) == predicted(4).traffic
    assert any("traced once" in line for line in communication.assumptions(found, gpu("h200")))


def test_device_memory_counts_nccl_by_group() -> None:
    def outside(found: Ledger) -> int:
        return overhead_bytes(gpu("h200"), found)

    alone, shards, replicas = ledger(1), ledger(4), ledger(4, parallel=Parallel(replicate=2, shard=2))
    assert outside(shards) - outside(alone) == (358 + 486) * MIB
    assert outside(replicas) - outside(shards) == 486 * MIB


@pytest.mark.parametrize(("length", "count"), [(12, 4), (10, 4), (3, 5), (9, 8)])
def test_a_rank_cuts_its_own_chunk_as_all_ranks_chunks_are_cut(length: int, count: int) -> None:
    tensor = torch.arange(2 * length).view(2, length)
    expected = list(tensor.chunk(count, 1))
    found = Chunks(tensor, count, 1)
    for rank in range(count):
        if rank < len(expected):
            assert torch.equal(found[rank], expected[rank])
        else:
            assert found[rank].shape == (0,)


def test_more_ranks_than_rows_add_no_operations() -> None:
    assert len(ledger(256).ops) <= len(ledger(4).ops) + len(shapes())
