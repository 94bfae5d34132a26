"""Where a backward's storages come from: their autograd node, also where autograd's own thread makes them and no Python frame tells."""

import pytest
import torch

from trainfit.bench.harness.memory_measure import follow, whole_step
from trainfit.spec.recipe_file import recipe_from
from trainfit.step import assemble

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("name", DEVICES)
def test_what_the_backward_makes_is_named_by_its_node_and_its_operation(name: str) -> None:
    device = torch.device(name)
    model = {"config": "tiny-llama-demo", "implementation": "native"}
    step = assemble(
        recipe_from({"model": model, "batch": {"micro": 1, "seq": 32}, "attention": "eager"}), device
    )
    batches = step.random_batches()
    account = follow(step, batches, lambda begin: whole_step(step, batches, begin))
    made = [piece for piece in account.pieces if piece.phase == "backward" and piece.num_bytes > 512]
    assert made
    assert {piece.where.partition(": ")[0] for piece in made} == {"backward"}
    operations: dict[str, set[str]] = {}
    for piece in made:
        operations.setdefault(piece.where, set()).add(piece.op)
    assert "aten._softmax_backward_data.default" in operations["backward: SoftmaxBackward0"]
    assert operations["backward: MmBackward0"] == {"aten.mm.default"}
    weights = sum(p.numel() * p.element_size() for p in step.model.parameters() if p.dim() == 2)
    gradients = sum(piece.num_bytes for piece in made if piece.category == "gradients")
    assert gradients >= weights
    forward = [piece for piece in account.pieces if piece.phase == "forward" and piece.num_bytes > 512]
    assert not any(piece.where.startswith("backward") for piece in forward)
