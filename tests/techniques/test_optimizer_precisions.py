"""Every optimizer in 16 bits on a CPU: loss falls, updates equal a reference, overflows skip the update."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tiny_recipe import tiny_recipe, wide_recipe
from trainfit.prediction.trace import trace
from trainfit.spec.recipe import Batch, Hardware, Optimizer, OptimizerName, Recipe
from trainfit.step import Step, assemble
from virtual_runs import steady

CPU = torch.device("cpu")
RATES = {"sgd": 0.1, "sgd-momentum": 0.05, "adafactor": 0.05, "adafactor-momentum": 0.05}
"""The learning rate with which an optimizer learns the tiny model; 1e-2 for the others."""


OF_LIBRARIES = ("bnb-", "paged-", "torchao-")
"""Names of other libraries' optimizers, which tests of their own train."""


def optimizers() -> Iterator[tuple[str, Optimizer]]:
    """Every optimizer with each implementation, and with momentum where that is another code path."""
    names = [name for name in get_args(OptimizerName) if not name.startswith(OF_LIBRARIES)]
    for name, implementation in itertools.product(names, ("fused", "foreach", "forloop")):
        if implementation == "fused" or not name.endswith("bit"):
            yield _optimizer(name, implementation)
        if name == "sgd":
            yield _optimizer("sgd-momentum", implementation, momentum=0.9)
    yield _optimizer("adafactor-momentum", "forloop", momentum=0.9)


def _optimizer(case: str, implementation: Any, **fields: Any) -> tuple[str, Optimizer]:
    name: Any = case.removesuffix("-momentum")
    found = Optimizer(name=name, implementation=implementation, lr=RATES.get(case, 1e-2), **fields)
    return f"{case}:{implementation}", found


OPTIMIZERS = dict(optimizers())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_learns_and_every_matrix_moves(name: str):
    step = assemble(wide_recipe(2, precision="bf16", optimizer=OPTIMIZERS[name]), CPU)
    before = {key: value.detach().clone() for key, value in step.model.named_parameters()}
    batches = step.random_batches()
    losses = [step(batches).item() for _ in range(10)]
    assert losses[-1] < losses[0] - 0.1, losses
    for key, value in step.model.named_parameters():
        if value.dim() == 2 and "embed" not in key:  # Rows of tokens that the batch lacks have no gradient.
            assert (value != before[key]).float().mean() > 0.5, key


# -- the update itself

REFERENCES: dict[str, Callable[[list[nn.Parameter], Optimizer], torch.optim.Optimizer]] = {
    "adamw": lambda p, o: torch.optim.AdamW(p, lr=o.lr, weight_decay=o.weight_decay, foreach=False),
    "sgd": lambda p, o: torch.optim.SGD(
        p, lr=o.lr, weight_decay=o.weight_decay, momentum=o.momentum, foreach=False
    ),
}
AGREE = [name for name in OPTIMIZERS if name.partition(":")[0] in (*REFERENCES, "sgd-momentum")]


@pytest.mark.parametrize("precision", ["bf16", "amp-bf16"])
@pytest.mark.parametrize("name", AGREE)
def test_four_updates_are_those_of_fp64(name: str, precision: Any):
    """Updates of N(0, 1) weights by N(0, 1) gradients agree within bf16's rounding of each partial sum."""
    wanted = OPTIMIZERS[name].model_copy(update={"weight_decay": 0.1, "lr": 0.1})
    step = assemble(tiny_recipe(precision=precision, optimizer=wanted), CPU)
    (optimizer,) = step.optimizers
    torch.manual_seed(0)
    given = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in given:
        parameter.data.normal_()
    start = [parameter.detach().double() for parameter in given]
    wide = [nn.Parameter(values.clone()) for values in start]
    reference = REFERENCES[wanted.name](wide, wanted)
    for _ in range(4):
        for parameter, exact in zip(given, wide, strict=True):
            parameter.grad = torch.randn_like(parameter)
            exact.grad = parameter.grad.double()
        optimizer.step()
        reference.step()
    for parameter, exact, first in zip(given, wide, start, strict=True):
        error = (parameter.double() - exact).norm() / (exact - first).norm()
        assert error < (0.06 if parameter.dtype == torch.bfloat16 else 1e-5), parameter.shape


def test_predictions_keep_the_kernel_of_their_device():
    """A CPU, fake or real, runs no fused SGD over 16-bit weights; a GPU does, and so does fp32 on a CPU."""

    def fuses(precision: Any, gpu: str) -> bool:
        recipe = tiny_recipe(precision=precision, optimizer=Optimizer(name="sgd"), hardware=Hardware(gpu=gpu))
        return "aten._fused_sgd_.default" in {op.name for op in steady(trace(recipe))}

    assert fuses("bf16", "h200")
    assert fuses("fp32", "cpu")
    assert not fuses("bf16", "cpu")


# -- overflow in amp-fp16


def overflowing(step: Step, chosen: nn.Parameter, at: list[int]) -> None:
    """An infinity in one element of one weight's gradient, in the steps (from 0) of ``at``."""
    calls = itertools.count()

    def spoil(gradient: Tensor) -> Tensor:
        if next(calls) // step.recipe.batch.accumulate in at:
            gradient = gradient.clone()
            gradient.view(-1)[-1] = torch.inf
        return gradient

    chosen.register_hook(spoil)


def tensors(step: Step) -> list[Tensor]:
    """Copies of all weights and of all optimizer state."""
    state = [
        value
        for optimizer in step.optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    ]
    return [value.detach().clone() for value in (*step.model.parameters(), *state)]


def recipe_for(name: str, **fields: Any) -> Recipe:
    return wide_recipe(2, precision="amp-fp16", optimizer=OPTIMIZERS[name], **fields)


OVERFLOWS = (("layers.0.mlp.down.weight", None, 1), ("norm.weight", 1.0, 2), ("embed.weight", None, 2))
"""The weight, ``clip_norm`` and the number of micro-batches."""


@pytest.mark.parametrize(
    ("name", "weight", "clip_norm", "accumulate"),
    [
        (name, *how)
        for index, name in enumerate(OPTIMIZERS)
        for number, how in enumerate(OVERFLOWS)
        if name.endswith("fused") or index % len(OVERFLOWS) == number
    ],
)
def test_an_overflow_in_one_weight_skips_the_whole_update(
    name: str, weight: str, clip_norm: float | None, accumulate: int
):
    recipe = recipe_for(name, batch=Batch(micro=2, seq=16, accumulate=accumulate))
    optimizer = recipe.optimizer.model_copy(update={"clip_norm": clip_norm})
    step = assemble(recipe.model_copy(update={"optimizer": optimizer}), CPU)
    chosen = step.model.get_parameter(weight)
    overflowing(step, chosen, at=[1])
    batches = step.random_batches()
    step(batches)
    before, scale = tensors(step), step.scaler.get_scale()
    step(batches)
    assert step.scaler.get_scale() == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(step), strict=True))
    assert all(parameter.grad is None for parameter in step.model.parameters())
    step(batches)
    for a, b in zip(before, tensors(step), strict=True):
        assert b.isfinite().all()
        if a.dim() == 2 and a.is_floating_point() and a.numel() > 64:
            assert not torch.equal(a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_in_the_first_step_leaves_no_trace(name: str):
    """The weights after it, and one update, are those of a run without it."""
    after = []
    for at in ([], [0]):
        step = assemble(recipe_for(name), CPU)
        scale = 2.0**10
        step.scaler.load_state_dict(step.scaler.state_dict() | {"scale": scale * 2 if at else scale})
        overflowing(step, next(iter(step.model.parameters())), at)
        batches = step.random_batches()
        for _ in range(2 if at else 1):
            rubbish = [torch.full_like(p, 1e30) for p in step.model.parameters()]
            del rubbish  # What uninitialised memory may hold.
            step(batches)
        after.append([parameter.detach().clone() for parameter in step.model.parameters()])
    for a, b in zip(*after, strict=True):
        assert torch.equal(a, b)


def test_a_weight_that_has_no_gradient_at_first_joins_later():
    """torch's fused SGD with momentum fails where some weights have a momentum and others none."""
    wanted = OPTIMIZERS["sgd-momentum:fused"].model_copy(update={"weight_decay": 0.0})
    step = assemble(wide_recipe(1, precision="fp32", optimizer=wanted), CPU)
    (optimizer,) = step.optimizers
    first, second = optimizer.param_groups[0]["params"][:2]
    for given in ([first], [first, second]):
        for parameter in given:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.equal(optimizer.state[first]["momentum_buffer"], torch.full_like(first, 1.9))
    assert torch.equal(optimizer.state[second]["momentum_buffer"], torch.ones_like(second))
