"""Predictions of an expert-parallel rank: sizes by hand arithmetic, exchanges, links, and what is refused."""

from collections import Counter
from functools import cache
from typing import Any

import pytest

from tiny_recipe import tiny_experts
from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Ledger
from trainfit.prediction import communication
from trainfit.prediction.device_overhead import nccl_bytes
from trainfit.prediction.estimate import estimate, replay_on
from trainfit.prediction.machine import machine_of, machine_with
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Hardware, Parallel, Recipe
from trainfit.spec.units import MIB
from trainfit.techniques import registry

LAYERS, HIDDEN, FEATURES, EXPERTS, CHOSEN, TOKENS = 2, 32, 48, 8, 2, 32
EXPERTS_BYTES = 4 * EXPERTS * 3 * HIDDEN * FEATURES
"""Bytes of a layer's experts in fp32."""
PAIRS_BYTES = 4 * TOKENS * CHOSEN * HIDDEN
"""Bytes of the hidden states of a rank's pairs of a token and an expert."""


def recipe(expert: int, count: int, **fields: Any) -> Recipe:
    mesh = {"hardware": Hardware(gpu="h200", count=count), "parallel": Parallel(expert=expert)}
    return tiny_experts({}, layers=LAYERS, **{**mesh, **fields})


@cache
def ledger(expert: int, count: int) -> Ledger:
    return trace(recipe(expert, count))


def test_a_rank_holds_its_experts_and_its_shard_of_all_else() -> None:
    """Every size is a multiple of the ranks; each block of memory is a multiple of 512 bytes."""
    per_layer, others, rotary = 10, 3, 2
    for expert, count in ((2, 2), (2, 4), (4, 4)):
        held = replay_on(gpu("h200"), ledger(expert, count))[0].phases.after_init
        rounding = 512 * (per_layer * LAYERS + others + rotary)
        assert 0 <= held - 4 * ledger(1, 1).params // count < rounding


def test_each_layer_exchanges_its_pairs_four_times_and_their_number_once() -> None:
    found = ledger(2, 4)
    exchanged = Counter(
        (found.segments[one.segment].phase, one.num_bytes, one.num_ranks, one.span)
        for one in found.collectives
        if one.name == "all_to_all" and found.segments[one.segment].step == "steady"
    )
    assert exchanged == {
        ("forward", 8 * EXPERTS, 2, 2): LAYERS,
        ("forward", PAIRS_BYTES, 2, 2): 2 * LAYERS,
        ("backward", PAIRS_BYTES, 2, 2): 2 * LAYERS,
    }
    # Experts are gathered by those that hold the same ones, a stride of two apart.
    gathers = {(one.num_ranks, one.span) for one in found.collectives if one.name == "all_gather"}
    assert gathers == {(4, 4), (2, 3)}
    assert found.ops_without_flops == ()


def test_ranks_share_the_products_and_the_estimate_says_what_it_assumes() -> None:
    one, shared = ledger(1, 1), ledger(2, 2)
    assert shared.steady_sum("model_flops") == one.steady_sum("model_flops")
    # Two H200s: experts-measured.jsonl less the context.
    assert nccl_bytes(gpu("h200"), shared) == (358 + 486 + 446) * MIB
    lines = estimate(recipe(2, 2), machine_with(gpu("h200")), shared).assumptions
    (line,) = [line for line in lines if "routed evenly" in line]
    assert f"a rank computes {TOKENS * CHOSEN} pairs" in line
    # A pair's hidden state as received, sorted and returned, and what the gate keeps, in every layer.
    least = LAYERS * 4 * (2 * HIDDEN + 4 * FEATURES)
    assert least <= int(line.split(" needs ")[1].split(" bytes")[0].replace(",", "")) <= 2 * least


def test_an_exchange_between_hosts_is_as_slow_as_the_slower_link() -> None:
    on = machine_of(Hardware(gpu="h200", count=4, nodes=2)).gpu
    inside, outside = (
        next(
            t
            for t in communication.traffic(ledger(4, 4), on)
            if (t.kind, t.between_hosts) == ("all_to_all", each)
        )
        for each in (False, True)
    )
    assert (inside.calls, outside.calls) == (5 * LAYERS, 5 * LAYERS)
    sent = LAYERS * (4 * PAIRS_BYTES + 8 * EXPERTS)
    assert (inside.bytes_sent, outside.bytes_sent) == (sent // 4, sent // 2)  # One peer here, two there
    one = next(one for one in ledger(4, 4).collectives if one.num_bytes == PAIRS_BYTES)
    rates = [used.bytes_per_s for used, _ in communication.sent(one, on)]
    assert rates == [450e9, 50e9]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallel": {"expert": 4}}, "groups of 4 ranks cannot be taken from 2 shards"),
        ({"parallel": {"expert": 2, "tensor": 2}}, "parallel.tensor = 2"),
        ({"parallel": {"expert": 2, "strategy": "ddp"}}, "parallel.strategy"),
        ({"parallel": {"expert": 3}, "hardware": {"count": 3}}, "8 experts cannot be shared equally by 3"),
        ({"parallel": {"expert": 2}, "hardware": {"count": 10}}, "5 ranks cannot share 4 experts equally"),
        ({"model": {"config": "llama-3.2-1b"}}, "no experts to share"),
        ({"compile": "block"}, "compile"),
        ({"precision": "mixed-bf16"}, "each expert is on one rank"),
        ({"adapter": Adapter(kind="lora").model_dump()}, "adapter.kind"),
    ],
)
def test_what_was_not_tried_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        registry.check(Recipe(**(recipe(2, 2).model_dump() | fields)))
