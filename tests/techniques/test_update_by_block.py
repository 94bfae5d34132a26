"""``optimizer.in_backward: block``: the ordinary update, as soon as a block's last gradient has come."""

from typing import Any

import pytest
import torch

from tiny_step import step_of
from trainfit.spec.recipe import Optimizer


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "adamw8bit", "muon"])
def test_updating_by_block_is_the_ordinary_update(name: Any):
    asked = Optimizer(name=name, lr=1e-2)
    ordinary, hooked = (
        step_of(optimizer=asked.model_copy(update={"in_backward": when}), precision="fp32")
        for when in (False, "block")
    )
    for index in range(3):
        assert hooked(hooked.random_batches(index)).item() == pytest.approx(
            ordinary(ordinary.random_batches(index)).item(), rel=1e-6
        )
    for a, b in zip(hooked.model.parameters(), ordinary.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # Two blocks; embedding, head and last norm each by itself. Muon has two kinds in a block.
    assert len(hooked.optimizers) == 2 * (2 if name == "muon" else 1) + 3
    assert all(parameter.grad is None for parameter in hooked.model.parameters())


def test_a_block_is_updated_when_its_last_gradient_has_come_and_not_before():
    step = step_of(optimizer=Optimizer(in_backward="block"))
    blocks = step.model.get_submodule("model.layers")
    held: list[int] = []

    def count(_: torch.Tensor) -> None:
        held.append(sum(p.grad is not None for p in step.model.parameters()))

    for parameter in blocks[0].parameters():  # pyright: ignore
        parameter.register_post_accumulate_grad_hook(count)
    step(step.random_batches())
    # Block 1 and the head are updated by then; the hook that comes last here sees none of block 0's left.
    assert held == [1, 2, 3, 4, 5, 6, 7, 8, 0]


def test_what_backward_does_not_reach_keeps_nothing_waiting():
    step = step_of(optimizer=Optimizer(name="sgd", lr=0.1, in_backward="block"), precision="fp32")
    norm: Any = step.model.get_submodule("model.layers.0.input_layernorm")
    before = step.model.get_parameter("model.layers.0.mlp.up_proj.weight").detach().clone()
    norm.forward = lambda x: x  # Its weight gets no gradient.
    step(step.random_batches())
    assert not torch.equal(before, step.model.get_parameter("model.layers.0.mlp.up_proj.weight"))
    assert all(parameter.grad is None for parameter in step.model.parameters())
