"""Offloading changes no result, takes the predicted memory, and is refused where it is not supported."""

from typing import Any

import pytest
import torch

from tiny_recipe import tiny_recipe
from trainfit.catalog.load import gpu
from trainfit.offload.blocks import is_moment
from trainfit.offload.device_ring import ALIGN
from trainfit.prediction.machine import machine_with
from trainfit.prediction.predict import ledger_of, predict
from trainfit.prediction.time.roofline import roofline
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Offload, Optimizer, Recipe
from trainfit.step import Step, assemble
from trainfit.training import checkpoint
from trainfit.training.state import first_not_finite, optimizer_state

CPU = torch.device("cpu")
IN_BACKWARD = Optimizer(name="sgd", lr=0.1, in_backward=True, implementation="foreach")
BOTH = Offload(activations=True, weights=True)
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "vocab_size": 512,
}  # fmt: skip
WAYS = [Offload(activations=True), Offload(weights=True), BOTH]


def variant(offload: Offload = Offload(), **fields) -> Recipe:  # noqa: B008 - frozen
    return tiny_recipe(layers=5, **{"recompute": "full", "offload": offload, **fields})


def trained(step: Step, steps: int = 3) -> list[float]:
    return [step(step.random_batches(seed)).item() for seed in range(steps)]


def pair(offload: Offload, device: torch.device = CPU, **fields) -> tuple[Step, Step]:
    """A step without and one with offloading, which start from the same state."""
    plain, moved = assemble(variant(**fields), device), assemble(variant(offload, **fields), device)
    moved.load_state_dict(plain.state_dict())
    return plain, moved


@pytest.mark.parametrize(
    ("implementation", "offload", "precision"),
    [("hf", WAYS[0], "fp32"), ("native", WAYS[0], "bf16"), ("hf", WAYS[1], "bf16"),
     ("native", WAYS[1], "amp-bf16"), ("hf", BOTH, "amp-bf16"), ("native", BOTH, "fp32")],
    ids=str,
)  # fmt: skip
def test_training_is_the_same_to_the_bit(implementation: str, offload: Offload, precision: str) -> None:
    fields = {"implementation": implementation, "precision": precision, "optimizer": IN_BACKWARD}
    plain, moved = pair(offload, **fields)
    with torch.no_grad():  # Evaluation reads every block.
        for seed in range(2):
            batch = plain.random_batches(seed)[0]
            assert moved.loss(batch).item() == plain.loss(batch).item()
    assert trained(moved) == trained(plain)
    ours, theirs = moved.state_dict()["model"], plain.state_dict()["model"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_adapters_accumulation_and_dropout(implementation: str) -> None:
    adapter, batch = Adapter(kind="lora", rank=2, dropout=0.2), Batch(micro=2, seq=16, accumulate=3)
    plain, moved = pair(BOTH, implementation=implementation, adapter=adapter, batch=batch)
    torch.manual_seed(5)
    expected = trained(plain)
    torch.manual_seed(5)
    assert trained(moved) == expected


def test_equal_seeds_start_from_equal_weights() -> None:
    """For native models; transformers' constructors draw random numbers, but not on meta."""
    fields = {"implementation": "native", "optimizer": IN_BACKWARD}
    plain, moved = assemble(variant(**fields), CPU), assemble(variant(BOTH, **fields), CPU)
    ours, theirs = moved.state_dict()["model"], plain.state_dict()["model"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("implementation", "quantize"), [("hf", "nf4"), ("native", "int8"), ("hf", "fp8")])
def test_quantised_blocks_are_offloaded_as_codes(implementation: str, quantize: str) -> None:
    adapter = Adapter(kind="lora", rank=2)
    fields = {"implementation": implementation, "quantize": quantize, "precision": "bf16", "adapter": adapter}
    plain, moved = assemble(variant(**fields), CPU), assemble(variant(BOTH, **fields), CPU)
    codes = {name: value for name, value in moved.state_dict()["model"].items() if name.endswith(".codes")}
    assert len(codes) == 5 * (7 if implementation == "hf" else 4)
    assert len({value.view(torch.uint8).numpy().tobytes() for value in codes.values()}) == len(codes)
    moved.load_state_dict(plain.state_dict())
    assert trained(moved) == trained(plain)


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [
        (True, {"name": "adamw", "implementation": "fused"}),
        ("block", {"name": "adamw", "implementation": "fused"}),
        (True, {"name": "sgd", "implementation": "foreach", "momentum": 0.9}),
        ("block", {"name": "adafactor", "momentum": 0.9}),
        (True, {"name": "adafactor", "implementation": "fused", "stochastic_rounding": True}),
    ],
    ids=str,
)
def test_moments_are_offloaded_with_the_weights(way: Any, optimizer: dict) -> None:
    settings = Optimizer(**optimizer, lr=0.01, in_backward=way)
    plain, moved = pair(BOTH, optimizer=settings, precision="bf16")
    assert trained(moved) == trained(plain)
    ours, _ = optimizer_state(moved)
    theirs, _ = optimizer_state(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    momentum = next((name for name in ours if name.endswith(("exp_avg", "momentum_buffer"))), None)
    assert (momentum is None) == (optimizer.get("stochastic_rounding", False))
    moments = {
        t.untyped_storage().data_ptr()
        for name, t in ours.items()
        if "layers." in name and is_moment(t, moved.model.get_parameter(name.rpartition("/")[0]))
    }
    assert len(moments) == (5 if momentum else 0)  # One piece of host memory per block.


def test_a_checkpoint_resumes_bit_for_bit(tmp_path) -> None:
    """Weights and moments are saved from and loaded to the host, in the same run and in a new one."""
    fields = {"optimizer": Optimizer(lr=0.01, in_backward=True), "precision": "bf16"}
    expected = trained(assemble(variant(BOTH, **fields), CPU), 6)
    first, second = (assemble(variant(BOTH, seed=0, **fields), CPU) for _ in range(2))
    trained(first)
    path = checkpoint.save(tmp_path, first, checkpoint.Progress(3, None), {}, keep=1)
    assert [first(first.random_batches(seed)).item() for seed in (3, 4, 5)] == expected[3:]
    checkpoint.load(path, second)
    assert [second(second.random_batches(seed)).item() for seed in (3, 4, 5)] == expected[3:]
    assert first_not_finite(second) is None
    with torch.no_grad():
        next(iter(second.model.model.layers[4].state_dict().values())).fill_(float("nan"))
    name = next(iter(second.model.model.layers[4].state_dict()))
    assert first_not_finite(second) == f"model.layers.4.{name}"


def test_random_weights_are_the_models_own_kind() -> None:
    """Norms are ones and matrices have the config's spread, also in blocks that are on the host."""
    step = assemble(variant(BOTH, optimizer=IN_BACKWARD), CPU)
    state = step.state_dict()["model"]
    assert all((value == 1).all() for name, value in state.items() if "norm" in name)
    matrices = [value for name, value in state.items() if "proj" in name]
    assert len(matrices) == 5 * 7
    assert all(0.015 < value.std().item() < 0.025 for value in matrices)
    assert len({value.sum().item() for value in matrices}) == len(matrices)


def test_only_some_blocks_are_on_the_device() -> None:
    step = assemble(variant(Offload(weights=True), optimizer=IN_BACKWARD), CPU)
    blocks = step.model.model.layers
    storages = {p.untyped_storage().data_ptr() for block in blocks for p in block.parameters()}
    assert len(storages) == 3
    size = sum(-(-p.numel() * 4 // ALIGN) * ALIGN for p in blocks[0].parameters())
    assert {p.untyped_storage().nbytes() for block in blocks for p in block.parameters()} == {size}


def small(**fields) -> Recipe:
    base = {
        "model": {"config": {**CONFIG, "num_hidden_layers": 8}, "implementation": "native"},
        "recompute": "full",
    }
    return Recipe.model_validate(base | fields)


BLOCK_BYTES = 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256)  # Of the weights of a block in bf16


def test_predicted_memory() -> None:
    """The device saves 8 blocks' weights and moments less three buffers each, and most inputs."""
    fields = {"batch": {"micro": 4, "seq": 256}, "precision": "bf16", "optimizer": {"in_backward": True}}
    plain, inputs, weights = (
        predict(small(**fields, offload=offload), use_cache=False)
        for offload in ({}, {"activations": True}, {"weights": True})
    )
    assert plain.phases.after_init - weights.phases.after_init == 5 * BLOCK_BYTES
    moments = plain.breakdown.optimizer - weights.breakdown.optimizer
    assert moments == pytest.approx(5 * 2 * BLOCK_BYTES, rel=0.01)
    assert weights.host_bytes == 3 * 8 * BLOCK_BYTES - 8 * 2 * 2 * (2 * 256)  # Moments of vectors stay.
    assert plain.host_bytes == 0
    input_bytes = 4 * 256 * 256 * 2
    assert inputs.host_bytes == 7 * input_bytes  # The last block's is used at once.
    saved = plain.phases.steady.forward - inputs.phases.steady.forward
    assert 5 * input_bytes <= saved <= 7 * input_bytes


def test_copies_take_time_alongside_the_computation() -> None:
    """Weights of 8 blocks are copied in twice and out once, less those that are still in their buffers."""
    fields = {"batch": {"micro": 1, "seq": 8}, "optimizer": {"name": "sgd", "in_backward": True}}
    ledger = ledger_of(small(**fields, offload={"weights": True}), use_cache=False)
    steady = [op for op in ledger.ops if ledger.segments[op.segment].step == "steady"]
    moved = {
        way: sum(op.num_bytes for op in steady if f"copy_to_{way}_" in op.name) for way in ("device", "host")
    }
    # Three blocks are still on the device when the forward begins, and the last three when the backward does.
    assert moved == {"device": (5 + 5) * BLOCK_BYTES, "host": 8 * BLOCK_BYTES}
    slow = gpu("h200").model_copy(update={"host_link": "pcie3-x16"})
    fast, slow_time = (roofline(ledger, machine_with(row)) for row in (gpu("h200"), slow))
    assert fast is not None
    assert slow_time is not None
    assert slow_time.lowest_s == pytest.approx((10 * BLOCK_BYTES) / 1.575e10, rel=1e-6)
    assert slow_time.expected.communication_s >= fast.expected.communication_s


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"recompute": "none"}, "set recompute: full"),
        ({"optimizer": Optimizer(name="sgd", implementation="foreach")}, "set optimizer.in_backward: true"),
        ({"compile": "model"}, "use compile: block or false"),
    ],
    ids=str,
)
def test_refusals(fields: dict, remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        assemble(variant(Offload(weights=True), **{"optimizer": IN_BACKWARD, **fields}), CPU)


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_a_second_derivative_is_refused(way: Offload) -> None:
    """The blocks' inputs are detached, so part of the gradient would be missing silently."""
    step = assemble(variant(way, optimizer=IN_BACKWARD), CPU)
    loss, weight = step.loss(step.random_batches(0)[0]), step.model.get_input_embeddings().weight
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, weight, create_graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", WAYS, ids=str)
@pytest.mark.parametrize("compiled", [False, "block"])
def test_on_a_gpu_it_is_the_same_to_the_bit(offload: Offload, compiled) -> None:
    """Copies overlap the computation here; a missed wait would change a loss."""
    fields = {"implementation": "native", "precision": "bf16", "compile": compiled}
    batch, card = Batch(micro=4, seq=64), torch.device("cuda")
    plain, moved = pair(offload, card, optimizer=IN_BACKWARD, batch=batch, **fields)
    expected = trained(plain, 6)
    # Compiled, the two run different programs: one recomputes inside its graph.
    assert trained(moved, 6) == (pytest.approx(expected, rel=5e-3) if compiled else expected)
