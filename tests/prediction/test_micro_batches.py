"""A step of many micro-batches, of which four are traced, has the ledger of a step that was traced whole."""

from typing import Any

import pytest

import trainfit
from tiny_recipe import TINY_LLAMA
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.micro_batches import MicroBatchesDifferError, with_left_out
from trainfit.prediction.trace import trace
from trainfit.prediction.traced_steps import run_steps
from trainfit.spec.recipe import Recipe

RECIPES: dict[str, dict[str, Any]] = {
    "transformers": {"precision": "bf16"},
    "native, compiled blocks": {
        "model.implementation": "native", "precision": "bf16", "compile": "block", "loss": "fused",
        "batch.seq": 64,
    },
    "lora on nf4, recomputed": {
        "adapter": "lora", "quantize": "nf4", "recompute": "full", "precision": "bf16",
    },
    "state on the host": {"model.implementation": "native", "precision": "bf16", "offload.optimizer": True},
    "weights on the host": {
        "model.implementation": "native", "precision": "bf16", "adapter": "lora", "offload.weights": True,
        "recompute": "full",
    },
    "other losses": {"loss_terms.z_loss": 1e-4, "precision": "bf16"},
    "clipped, scaled": {"precision": "amp-fp16", "optimizer.clip_norm": 1.0},
}  # fmt: skip


def recipe_of(fields: dict[str, Any], accumulate: int = 7) -> Recipe:
    over = {"hardware.gpu": "h100-sxm", "batch.seq": 16, "batch.accumulate": accumulate, **fields}
    return trainfit.load_recipe({"model": {"config": {**TINY_LLAMA, "num_hidden_layers": 4}}}, set=over)


def content(ledger: Ledger) -> list[Any]:
    """Events with the number of each allocation among all, in place of the storage's."""
    numbers: dict[tuple[int, int], int] = {}
    found = list[Any]()
    for event in ledger.expand():
        number = numbers.setdefault(event.key, len(numbers))
        found.append((event.kind, number, event.num_bytes, event.category, event.segment))
    return found


def is_copied(ledger: Ledger) -> bool:
    """Return whether a storage's path begins with a number and that of a copy."""
    return any("." in one.path.partition("/")[0] for one in ledger.storages)


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_the_ledger_of_all_micro_batches(name: str) -> None:
    recipe = recipe_of(RECIPES[name])
    steps = 0

    def counted(step: Any, virtual: Any) -> None:
        nonlocal steps
        steps += 1
        assert not step.left_out
        run_steps(step, virtual)

    short, whole = trace(recipe), trace(recipe, run=counted)
    assert steps == 1
    assert is_copied(short)
    assert not is_copied(whole)
    assert short.segments == whole.segments
    assert short.ops == whole.ops
    assert content(short) == content(whole)
    made = [
        [one for one in ledger.ops if ledger.segments[one.segment].step == "steady"]
        for ledger in (short, whole)
    ]
    assert made[0] == made[1]


def test_few_micro_batches_are_traced_as_they_are() -> None:
    for accumulate in (1, 4):
        ledger = trace(recipe_of({"precision": "bf16"}, accumulate))
        assert [one.phase for one in ledger.segments if one.step == "steady"].count("backward") == accumulate
        assert not is_copied(ledger)


def test_the_time_of_tracing_does_not_grow_with_micro_batches() -> None:
    """Counted in operations that the model ran: those of 40 micro-batches are those of four."""
    calls = 0

    def forward(*_: Any) -> None:
        nonlocal calls
        calls += 1

    from torch.nn.modules.module import register_module_forward_pre_hook

    counts = []
    for accumulate in (4, 40):
        calls = 0
        with register_module_forward_pre_hook(forward):
            trace(recipe_of({"precision": "bf16"}, accumulate))
        counts.append(calls)
    assert counts[0] == counts[1] > 0


def changed(ledger: Ledger, at: int) -> Ledger:
    ledger.ops[at] = ledger.ops[at]._replace(num_bytes=ledger.ops[at].num_bytes + 1)
    return ledger


def test_micro_batches_that_differ_are_not_copied() -> None:
    ledger = trace(recipe_of({"precision": "bf16"}, 4))
    assert len(with_left_out(ledger, 3).ops) > len(ledger.ops)
    third = [number for number, one in enumerate(ledger.segments) if one == ("steady", "backward")][2]
    at = next(number for number, op in enumerate(ledger.ops) if op.segment == third)
    with pytest.raises(MicroBatchesDifferError):
        with_left_out(changed(ledger, at), 3)


def test_a_step_of_three_micro_batches_is_not_copied() -> None:
    with pytest.raises(MicroBatchesDifferError):
        with_left_out(trace(recipe_of({"precision": "bf16"}, 3)), 1)
