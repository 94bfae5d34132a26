"""Host tensors on the virtual GPU, and values that are known without data."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from compiled_blocks import on_h200
from trainfit.prediction.trace import trace
from trainfit.spec.recipe import Optimizer
from trainfit.step import assemble
from trainfit.virtual.trace.host_tensors import MAX_VALUES, is_host, known_value
from virtual_runs import recipe_of, with_layers

CPU = torch.device("cpu")


STATES = [("adamw", "fused", False, 3), ("adamw", "foreach", True, 2), ("adafactor", "forloop", True, 2)]
"""Optimizer, implementation, whether its step counters are on the host (torch/optim: fused and capturable
keep them on the device), device tensors a matrix has as state."""


@pytest.mark.parametrize(("name", "implementation", "counts_on_host", "num_device"), STATES)
@pytest.mark.parametrize("in_backward", [False, True])
def test_step_counters(
    name: Any, implementation: Any, counts_on_host: bool, num_device: int, in_backward: bool
) -> None:
    optimizer = Optimizer(name=name, implementation=implementation, in_backward=in_backward)
    with on_h200() as virtual:
        step = assemble(recipe_of(with_layers("llama-3.2-1b", 1), "native", optimizer=optimizer), CPU)
        virtual.model_is_complete(step.model, [])
        for _ in range(3):
            step(step.random_batches())
        states = [state for optimizer in step.optimizers for state in optimizer.state.values()]
        counters = [state["step"] for state in states]
        tensors = max(
            ([t for t in state.values() if isinstance(t, Tensor)] for state in states),
            key=lambda tensors: sum(t.numel() for t in tensors),
        )
        assert {is_host(counter) for counter in counters} == {counts_on_host}
        assert sum(not is_host(t) for t in tensors) == num_device
        if counts_on_host:
            assert {float(counter) for counter in counters} == {3.0}


def test_counters_take_memory_on_the_device_only_where_they_are() -> None:
    config = with_layers("llama-3.2-1b", 1)
    state = {}
    for implementation in ("fused", "forloop"):
        ledger = trace(recipe_of(config, optimizer=Optimizer(implementation=implementation)), whole=True)
        state[implementation] = sorted(s.num_bytes for s in ledger.storages if s.category == "optimizer")
    counters = [size for size in state["fused"] if size == 4]
    assert len(counters) == len(state["fused"]) // 3
    assert [size for size in state["fused"] if size != 4] == state["forloop"]


def test_small_values_are_carried() -> None:
    """transformers evaluates ``if mask.all():`` and then uses no mask."""
    with on_h200():
        ones = torch.ones(2, 8, dtype=torch.int64, device=CPU)
        padded = ones.clone()
        padded[0, 3] = 0
        assert isinstance(ones, FakeTensor)
        assert bool(ones.bool().all())
        assert not bool(padded.bool().all())
        assert torch.arange(5, device=CPU).max().item() == 4
        assert (torch.arange(6, device=CPU).view(2, 3) > 3).sum().item() == 2


def test_random_and_large_values_are_not() -> None:
    with on_h200():
        assert known_value(torch.randint(1, 5, (1,), device=CPU)) is None
        assert known_value(torch.rand(1, device=CPU)) is None
        assert known_value(torch.bernoulli(torch.full((1,), 0.5, device=CPU))) is None
        assert known_value(torch.ones(MAX_VALUES + 1, dtype=torch.int64, device=CPU).sum()) is None
        assert torch.rand(1, device=CPU).item() == 0.0  # no gradient is infinite, no norm large


def test_values_overwritten_with_unknown_ones_are_unknown() -> None:
    with on_h200():
        count = torch.zeros(1, dtype=torch.int64, device=CPU)
        whole = count.view(1, 1)
        assert known_value(count) == 0
        count += torch.randint(1, 5, (1,), device=CPU)
        assert known_value(count) is None
        assert known_value(whole) is None  # a view of the same memory


def test_where_factories_and_moves_put_tensors() -> None:
    with on_h200():
        on_host = [torch.tensor(0.0), torch.zeros(3), torch.arange(3, device="cpu"), torch.tensor([1, 2])]
        on_device = [torch.zeros(3, device=CPU), torch.tensor(1.0, device=CPU), torch.zeros(3).to(CPU)]
        on_device.append(torch.zeros(3).to(on_device[0]))
        with CPU:
            on_device.append(torch.zeros(3))
        assert all(is_host(t) for t in on_host)
        assert not any(is_host(t) for t in on_device)
        assert not is_host(torch.zeros(3) + torch.zeros(3, device=CPU).sum())
        assert is_host(torch.zeros(3) + 1)


def test_the_backward_knows_host_from_device() -> None:
    """A hook that counts, as an optimizer in the backward does: its counter is the host's."""
    counted: list[Tensor] = []
    with on_h200() as virtual:
        model = nn.Linear(4, 4, device=CPU)
        virtual.model_is_complete(model, [])

        def count(_: Tensor) -> None:
            counted.append(torch.tensor(0.0) if not counted else counted[-1] + 1)

        model.weight.register_post_accumulate_grad_hook(count)
        for _ in range(3):
            model(torch.ones(2, 4, device=CPU)).sum().backward()
    assert all(is_host(counter) for counter in counted)
    assert counted[-1].item() == 2.0


def test_no_operation_runs_for_real() -> None:
    """PyTorch has no fake kernel for fused SGD: it would run on zeros of the model's size."""
    import resource

    recipe = recipe_of(with_layers("llama-3.1-8b", 4), optimizer=Optimizer(name="sgd", momentum=0.9))
    trace(recipe_of(with_layers("gpt2", 2)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    params = trace(recipe, whole=True).params
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown_bytes < 0.1 * 2 * params
