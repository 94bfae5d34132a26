"""The host's time of a traced script: launches, Python functions, and where it waits for the GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import trainfit
from trainfit.catalog.rates import rates
from trainfit.spec.result import Estimate
from user_training import mlp


def _traced(train: Callable[[], None]) -> Estimate:
    return trainfit.trace(train, gpu="h100-sxm", steps=2)


def test_python_between_operations_takes_time() -> None:
    """A thousand calls of a Python function in each step lengthen it by their cost, and nothing else."""

    def idle() -> None:
        pass

    def train(calls: int) -> None:
        model = mlp().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(calls):
                idle()
            model(torch.randn(4, 256, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    few, many = _traced(lambda: train(0)), _traced(lambda: train(1000))
    assert few.code is not None
    assert many.code is not None
    assert many.code.num_launches == few.code.num_launches
    assert many.code.num_python_calls - few.code.num_python_calls == pytest.approx(1000, abs=5)
    cost_s = 1000 * rates().host.script_call
    assert many.step_s - few.step_s == pytest.approx(cost_s, rel=0.01)


def test_the_functions_of_a_module_are_counted_and_those_of_the_virtual_gpu_are_not() -> None:
    """Linear.forward, two of Module's own, and the script's own two: five a call, whatever the trace adds."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    def train(layers: int) -> None:
        model = nn.Sequential(*(Own() for _ in range(layers))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        for _ in range(3):
            model(torch.randn(4, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    few, many = (_traced(lambda n=n: train(n)).code for n in (10, 20))
    assert few is not None
    assert many is not None
    assert 10 * 5 <= many.num_python_calls - few.num_python_calls <= 10 * 25


def test_a_blocking_copy_makes_the_host_wait_for_the_gpu() -> None:
    """The GPU is busy with large products, so the host cannot begin the next step before they end."""

    def train(blocks: bool) -> None:
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).cuda().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(8192, 4096, dtype=torch.bfloat16)
            x = x.cuda() if blocks else x.pin_memory().cuda(non_blocking=True)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    waits, free = _traced(lambda: train(True)), _traced(lambda: train(False))
    assert waits.time is not None
    assert free.time is not None
    assert waits.time.host_s > free.time.host_s
    assert waits.step_s > free.step_s


def test_a_calibrated_host_scales_the_costs_of_scripts() -> None:
    known = rates()
    slower = known.on_host(2 * known.script_host_ratio)
    assert slower.host.script_call == 2 * known.host.script_call
    assert slower.host.forward == 2 * known.script_host_ratio * known.host.forward
