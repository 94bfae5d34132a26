"""Gradients added up by the autograd engine: in place where the real engine does so, to the byte."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import trainfit

N = 2048
SQUARE = 4 * N * N  # Bytes of an N x N matrix in fp32: 16 MiB


class Scaled(torch.autograd.Function):
    """y = scale * x, whose gradient is a tensor of its own; ``made`` gets what the backward made."""

    made: ClassVar[list[Any]] = []
    keep: ClassVar[Callable[[Tensor], Any]] = Tensor.data_ptr

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradient = grads[0] * ctx.scale
        Scaled.made.append(Scaled.keep(gradient))
        return gradient, None


@pytest.mark.parametrize("held", [False, True])
def test_the_real_engine_adds_in_place_what_nobody_else_holds(held: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(Scaled, "made", [])
    monkeypatch.setattr(Scaled, "keep", (lambda t: t) if held else Tensor.data_ptr)
    weight = nn.Parameter(torch.ones(8, 8))
    (Scaled.apply(weight, 2.0).sum() + Scaled.apply(weight, 3.0).sum()).backward()
    first = Scaled.made[0].data_ptr() if held else Scaled.made[0]
    assert weight.grad is not None
    assert (weight.grad.data_ptr() == first) is not held


class Twice(nn.Module):
    """One matrix used twice, as a word embedding tied to the output is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N, N))

    def forward(self) -> Tensor:
        return Scaled.apply(self.weight, 2.0).sum() + Scaled.apply(self.weight, 3.0).sum()


def train() -> None:
    model = Twice().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


def test_the_virtual_gpu_adds_in_place_as_the_engine(monkeypatch: Any) -> None:
    monkeypatch.setattr(Scaled, "keep", lambda t: None)
    # Weight and both gradients: no third one for the sum.
    assert trainfit.trace(train).phases.first.backward // SQUARE == 3

    def step() -> None:
        model = Twice().to("cuda")
        for _ in range(2):
            (model() * 0 + model.weight.sum()).backward()
            model.weight.grad = None

    # Here one gradient is an expanded scalar, so the sum needs a new tensor.
    assert trainfit.trace(step).phases.first.backward // SQUARE == 3
