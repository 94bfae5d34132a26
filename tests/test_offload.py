"""What waits on the host changes no result, costs the device what is predicted, and is refused where it cannot be."""

import pytest
import torch

from tiny_recipe import tiny_recipe
from trainfit.models.host_blocks import ALIGN
from trainfit.predict.estimate import predict
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Offload, Optimizer, Recipe
from trainfit.step import Step, assemble

CPU = torch.device("cpu")
IN_BACKWARD = Optimizer(name="sgd", lr=0.1, in_backward=True, implementation="foreach")
BOTH = Offload(activations=True, weights=True)
WAYS = [Offload(activations=True), Offload(weights=True), BOTH]


def recipe(offload: Offload = Offload(), **fields) -> Recipe:  # noqa: B008 - frozen
    return tiny_recipe(layers=5, **{"recompute": "full", "offload": offload, **fields})


def trained(step: Step, steps: int = 3) -> list[float]:
    return [step(step.random_batches(seed)).item() for seed in range(steps)]


@pytest.mark.parametrize("implementation", ["hf", "native"])
@pytest.mark.parametrize("offload", WAYS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
def test_training_is_the_same_to_the_bit(implementation: str, offload: Offload, precision: str) -> None:
    fields = {"implementation": implementation, "precision": precision, "optimizer": IN_BACKWARD}
    plain = assemble(recipe(**fields), CPU)
    moved = assemble(recipe(offload, **fields), CPU)
    moved.load_state_dict(plain.state_dict())
    assert trained(moved) == trained(plain)
    ours, theirs = moved.state_dict()["model"], plain.state_dict()["model"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_adapters_accumulation_and_dropout(implementation: str) -> None:
    fields = {
        "implementation": implementation,
        "adapter": Adapter(kind="lora", rank=2, dropout=0.2),
        "batch": Batch(micro=2, seq=16, accumulate=3),
    }
    plain, moved = assemble(recipe(**fields), CPU), assemble(recipe(BOTH, **fields), CPU)
    moved.load_state_dict(plain.state_dict())
    torch.manual_seed(5)
    expected = trained(plain)
    torch.manual_seed(5)
    assert trained(moved) == expected


def test_equal_seeds_start_from_equal_weights() -> None:
    """Of native models; transformers' constructors draw random numbers that a model built on meta does not."""
    fields = {"implementation": "native", "optimizer": IN_BACKWARD}
    plain, moved = assemble(recipe(**fields), CPU), assemble(recipe(BOTH, **fields), CPU)
    ours, theirs = moved.state_dict()["model"], plain.state_dict()["model"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_random_weights_are_the_models_own_kind() -> None:
    """Norms are ones, matrices have the config's spread, in every block and not in the slots' guests alone."""
    step = assemble(recipe(BOTH, optimizer=IN_BACKWARD), CPU)
    state = step.state_dict()["model"]
    assert all((value == 1).all() for name, value in state.items() if "norm" in name)
    matrices = [value for name, value in state.items() if "proj" in name]
    assert len(matrices) == 5 * 7
    assert all(0.015 < value.std().item() < 0.025 for value in matrices)
    assert len({value.sum().item() for value in matrices}) == len(matrices)


def test_only_some_blocks_are_on_the_device() -> None:
    step = assemble(recipe(Offload(weights=True), optimizer=IN_BACKWARD), CPU)
    blocks = step.model.model.layers
    storages = {p.untyped_storage().data_ptr() for block in blocks for p in block.parameters()}
    assert len(storages) == 3
    size = sum(-(-p.numel() * 4 // ALIGN) * ALIGN for p in blocks[0].parameters())
    assert {p.untyped_storage().nbytes() for block in blocks for p in block.parameters()} == {size}


def test_evaluation_reads_every_block() -> None:
    plain, moved = (
        assemble(recipe(way, optimizer=IN_BACKWARD), CPU) for way in (Offload(), Offload(weights=True))
    )
    moved.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for seed in range(2):
            batch = plain.random_batches(seed)[0]
            assert moved.loss(batch).item() == plain.loss(batch).item()


def test_predicted_memory() -> None:
    """llama-3.2-1b in bf16: what leaves the device is 16 blocks' weights less three slots, and all but a few inputs."""
    base = {
        "model": {"config": "llama-3.2-1b"},
        "batch": {"micro": 2, "seq": 1024},
        "recompute": "full",
        "optimizer": {"name": "sgd", "implementation": "foreach", "in_backward": True},
    }
    plain, inputs, weights = (
        predict(Recipe.model_validate({**base, "offload": offload}))
        for offload in ({}, {"activations": True}, {"weights": True})
    )
    block_bytes = 2 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 2048 * 8192 + 2 * 2048)
    assert plain.phases.after_init - weights.phases.after_init == pytest.approx(13 * block_bytes, rel=1e-4)
    input_bytes = 2 * 1024 * 2048 * 2
    saved = plain.phases.steady.forward - inputs.phases.steady.forward
    assert 13 * input_bytes <= saved <= 16 * input_bytes


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
        assemble(recipe(Offload(weights=True), **{"optimizer": IN_BACKWARD, **fields}), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", WAYS, ids=str)
@pytest.mark.parametrize("compiled", [False, "block"])
def test_on_a_gpu_it_is_the_same_to_the_bit(offload: Offload, compiled) -> None:
    """Where copies really run beside the computation: a missed wait would change a loss."""
    gpu = torch.device("cuda")
    fields = {
        "implementation": "native",
        "precision": "bf16",
        "optimizer": IN_BACKWARD,
        "batch": Batch(micro=4, seq=64),
        "compile": compiled,
    }
    plain, moved = assemble(recipe(**fields), gpu), assemble(recipe(offload, **fields), gpu)
    moved.load_state_dict(plain.state_dict())
    expected = trained(plain, 6)
    # Compiled, the two run different programs: one recomputes inside its graph.
    assert trained(moved, 6) == (pytest.approx(expected, rel=5e-3) if compiled else expected)
