"""Optimizer offload: the same training, the state in host memory, copied in and out once a step."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.catalog.load import gpu
from trainfit.offload.blocks import is_moment
from trainfit.offload.optimizer_state import slots_of
from trainfit.prediction.machine import machine_with
from trainfit.prediction.predict import ledger_of, predict
from trainfit.prediction.time.roofline import roofline
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Hardware, Offload, Optimizer, Recipe
from trainfit.step import Step, assemble
from trainfit.techniques import registry
from trainfit.training import checkpoint
from trainfit.training.state import optimizer_state
from virtual_runs import recipe_of

CPU = torch.device("cpu")
PCIE3_BYTES_PER_S = 1.575e10
CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 4, "vocab_size": 2048, "tie_word_embeddings": False,
}  # fmt: skip


def variant(is_offloaded: bool, **fields: Any) -> Recipe:
    return tiny_recipe(
        layers=5, **{"offload": Offload(optimizer=is_offloaded), "precision": "bf16", **fields}
    )


def trained(step: Step, steps: int = 3) -> list[float]:
    return [step(step.random_batches(seed)).item() for seed in range(steps)]


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "foreach": {"optimizer": {"implementation": "foreach"}, "precision": "amp-bf16"},
    "master": {"precision": "bf16-master"},
    "by-block": {"optimizer": {"in_backward": "block"}, "precision": "bf16-master"},
    "by-weight": {"optimizer": {"in_backward": True}},
    "muon-clipped": {"optimizer": {"name": "muon", "clip_norm": 0.1}},
    "8-bit": {"optimizer": {"name": "adamw8bit"}},
    "accumulated": {"batch": Batch(micro=1, seq=16, accumulate=3), "implementation": "native"},
    "scaled": {"precision": "amp-fp16"},
    "scaled-master": {"precision": "fp16-master"},
    "recomputed": {"recompute": "full", "optimizer": {"name": "sgd", "momentum": 0.9}},
    "adapter": {"adapter": Adapter(kind="lora", rank=2)},
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_to_the_bit(case: str) -> None:
    fields = dict(CASES[case])
    fields["optimizer"] = Optimizer(**{"lr": 1e-2, **fields.get("optimizer", {})})
    plain, moved = (assemble(variant(is_offloaded, **fields), CPU) for is_offloaded in (False, True))
    moved.load_state_dict({**moved.state_dict(), "model": plain.state_dict()["model"]})
    assert trained(moved) == trained(plain)
    for a, b in zip(moved.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
    (ours, _), (theirs, _) = optimizer_state(moved), optimizer_state(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("in_backward", [False, "block"])
def test_a_checkpoint_resumes_bit_for_bit_with_and_without_offload(in_backward: Any, tmp_path: Path) -> None:
    fields = {"optimizer": Optimizer(lr=1e-2, in_backward=in_backward), "precision": "bf16-master"}
    straight = assemble(variant(True, **fields), CPU)
    last = trained(straight)[-1]
    saved = checkpoint.save(tmp_path, straight, checkpoint.Progress(3, last), {}, keep=1)
    expected = trained(straight)
    resumed = assemble(variant(True, **fields), CPU)
    checkpoint.load(saved, resumed)
    assert trained(resumed) == expected


@pytest.mark.parametrize("in_backward", [False, "block"])
def test_predicted_memory_and_copies(in_backward: Any) -> None:
    """On the device are three of the largest parts; on the host all matrices' state; each is copied twice."""
    recipe = recipe_of(
        CONFIG, "native", precision="bf16-master", optimizer=Optimizer(in_backward=in_backward),
        offload=Offload(optimizer=True), hardware=Hardware(gpu="h200"),
    )  # fmt: skip
    step = assemble(recipe, torch.device("meta"))
    weights = list(step.model.parameters())
    state = 12 * sum(one.numel() for one in weights if one.dim() > 1)
    on_device = 12 * sum(one.numel() for one in weights if one.dim() == 1)
    block = 12 * sum(
        one.numel() for one in step.model.get_submodule("layers.0").parameters() if one.dim() > 1
    )
    embedding = 12 * 2048 * 512
    moved, kept = (predict(one) for one in (recipe, recipe.model_copy(update={"offload": Offload()})))
    assert moved.host_bytes == state
    largest = 3 * max(block, embedding)
    assert moved.breakdown.optimizer == pytest.approx(largest + on_device, rel=0.05)
    assert kept.breakdown.optimizer == pytest.approx(state + on_device, rel=0.01)
    ledger = ledger_of(recipe)
    for name in ("trainfit.copy_to_device_.default", "trainfit.copy_to_host_.default"):
        copied = sum(
            op.num_bytes * ledger.times(op)
            for op in ledger.ops
            if op.name == name and ledger.segments[op.segment].step == "steady"
        )
        assert copied == pytest.approx(state, rel=0.01)
    slow = machine_with(gpu("h200").model_copy(update={"host_link": "pcie3-x16"}))
    time = roofline(ledger, slow)
    assert time is not None
    assert time.lowest_s >= state / PCIE3_BYTES_PER_S


@pytest.mark.parametrize(
    ("sizes", "slots"),
    [
        ([8, 2, 2, 2, 2, 8], [0, 1, 2, 0, 1, 0]),
        ([8, 2, 2, 2, 2, 2, 8], [0, 1, 2, 0, 1, 2, 0]),
        ([8, 2, 2, 2, 0, 8], [0, 1, 2, 1, 2, 0]),  # A norm's state is not on the host.
        ([8, 2, 2, 2, 2], [0, 1, 2, 0, 1]),
        ([8, 8, 2, 2, 2, 2], [0, 1, 2, 0, 1, 2]),
        ([], []),
    ],
)
def test_large_parts_share_a_buffer_that_no_neighbour_has(sizes: list[int], slots: list[int]) -> None:
    assert slots_of(sizes, 3) == slots
    held = [slot for slot, size in zip(slots, sizes, strict=True) if size]
    assert all(a != b for a, b in pairwise(held))


def test_a_head_shares_the_embeddings_memory() -> None:
    large = CONFIG | {"vocab_size": 2**14}
    recipe = recipe_of(large, "native", precision="bf16", offload=Offload(optimizer=True))
    step = assemble(recipe, torch.device("meta"))
    block = sum(one.numel() for one in step.model.get_submodule("layers.0").parameters() if one.dim() > 1)
    on_device = 4 * (2**14 * 512 + 2 * block)
    assert predict(recipe).breakdown.optimizer == pytest.approx(on_device, rel=0.01)
    tiny = recipe_of(TINY_LLAMA | {"vocab_size": 4096, "num_hidden_layers": 4}, "native", precision="bf16")
    places = (Offload(optimizer=True), Offload())
    steps = [assemble(tiny.model_copy(update={"offload": each}), CPU) for each in places]
    steps[0].load_state_dict({**steps[0].state_dict(), "model": steps[1].state_dict()["model"]})
    assert trained(steps[0]) == trained(steps[1])


def test_it_moves_what_the_weights_are_shaped_like() -> None:
    step = assemble(variant(True, precision="bf16-master"), CPU)
    trained(step, 1)
    assert step.host_state is not None
    hosted = {id(one) for one in step.model.parameters()}
    assert step.parameters_with_host_state() == hosted
    buffers = {one.untyped_storage().data_ptr() for one in step.host_state.buffers()}
    for optimizer in step.optimizers:
        for parameter, state in optimizer.state.items():
            moments = [value for value in state.values() if is_moment(value, parameter)]
            assert len(moments) == (3 if parameter.dim() > 1 else 0)
            assert all(value.untyped_storage().data_ptr() not in buffers for value in moments)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hardware": Hardware(count=2)}, "strategy: fsdp or zero1"),
    ({"offload": Offload(optimizer=True, weights=True), "recompute": "full",
      "optimizer": Optimizer(in_backward=True)}, "set one of the two"),
    ({"optimizer": Optimizer(name="sgd")}, "adamw or adamw8bit"),
    ({"optimizer": Optimizer(name="adafactor")}, "adamw or adamw8bit"),
    ({"optimizer": Optimizer(name="adamw4bit")}, "adamw or adamw8bit"),
    ({"optimizer": Optimizer(name="paged-adamw")}, "set one of the two"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "remedy"), REFUSED, ids=str)
def test_refusals(fields: dict[str, Any], remedy: str) -> None:
    with pytest.raises(InputError, match=r"^offload\.optimizer = true") as caught:
        registry.check(variant(True, **fields))
    assert remedy in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("in_backward", [False, "block"])
def test_on_a_gpu_it_is_the_same_to_the_bit(in_backward: Any) -> None:
    fields = {"precision": "bf16-master", "optimizer": Optimizer(lr=1e-2, in_backward=in_backward)}
    device = torch.device("cuda")
    plain, moved = (assemble(variant(is_offloaded, **fields), device) for is_offloaded in (False, True))
    assert trained(moved, 5) == trained(plain, 5)
