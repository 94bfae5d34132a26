"""Shared by tests of ``trainfit.trace``: a small model, a plain training loop, and a check run inside."""

from collections.abc import Callable

import torch
from torch import nn

import trainfit
from trainfit.spec.result import Estimate

MIB = 1 << 20
N = 4096
SQUARE = 4 * N * N  # Bytes of an N x N matrix in fp32: 64 MiB, so that no rounding of the allocator's shows


def mlp(width: int = 256) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3, width: int = 256) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(8, width, device="cuda")).square().mean().backward()
        optimizer.step()


def inside(check: Callable[[], None]) -> Estimate:
    """Run ``check`` on the virtual GPU, and train a little so that there is something to trace."""

    def run() -> None:
        check()
        model = mlp().cuda()
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)

    return trainfit.trace(run)
