"""Stochastic rounding in the optimizers: the mean is kept, small updates add up, seeds decide every bit."""

from typing import Any

import pytest
import torch
from torch import nn

from kernel_runs import BF16, interpreted, run, weights
from tiny_recipe import tiny_recipe
from trainfit.kernels.quantize.codebook import MomentLevels
from trainfit.kernels.stochastic_rounding import op as rounding
from trainfit.optim import adamw as kernel
from trainfit.optim.adafactor import FusedAdafactor
from trainfit.optim.stochastic import StochasticSGD
from trainfit.spec.recipe import Optimizer
from trainfit.step import assemble

CPU = torch.device("cpu")


@pytest.mark.parametrize("share", [0.0, 1 / 64, 0.3, 0.9])
@pytest.mark.parametrize(
    "run_sum", [rounding.reference_add_rounded, pytest.param(rounding.triton_add_rounded, marks=interpreted)]
)
def test_a_value_is_rounded_up_as_often_as_it_is_near(share: float, run_sum: Any):
    """A value ``share`` of the way between two neighbours becomes the upper with that probability."""
    num, ulp = 40_000, 2**-7
    target, update = torch.ones(num, dtype=BF16), torch.full((num,), 1.0, dtype=BF16)
    run_sum(target, update, 1.0, share * ulp, 11)
    ups = (target == 1 + ulp).sum().item()
    assert ups + (target == 1).sum().item() == num
    # The exact probability is of 16 bits; five standard deviations of the binomial.
    expected = round(share * 2**16) / 2**16
    assert abs(ups - num * expected) <= 5 * (num * expected * (1 - expected)) ** 0.5 + 1e-9


def test_values_of_bf16_infinities_and_nan_are_unchanged():
    exact = torch.tensor([1.5, -0.0, float("inf"), float("nan")])
    out = torch.empty(4, dtype=BF16)
    rounding.round_stochastically(out, exact.clone(), seed=2)
    torch.testing.assert_close(out.float(), exact, equal_nan=True, rtol=0, atol=0)
    assert out[1].signbit()


MAKERS: dict[str, Any] = {
    "sgd": lambda p, lr, sr: StochasticSGD(p, lr, 0.0, 0.0, seed=1) if sr else torch.optim.SGD(p, lr=lr),
    "sgd-momentum": lambda p, lr, sr: (
        StochasticSGD(p, lr / 10, 0.0, 0.9, seed=1) if sr else torch.optim.SGD(p, lr=lr / 10, momentum=0.9)
    ),
    "adamw": lambda p, lr, sr: (
        kernel.FusedAdamW(p, lr, 0.0, stochastic=True, seed=1) if sr else torch.optim.AdamW(p, lr=lr,
        weight_decay=0)
    ),
    **{
        f"adamw{bits}bit": lambda p, lr, sr, bits=bits: kernel.FusedAdamW(
            p, lr, 0.0, levels=MomentLevels(bits, CPU), stochastic=sr, seed=1
        )
        for bits in (8, 4)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_a_thousand_updates_below_half_the_last_bit_add_up(name: str):
    """From 2, with a constant gradient of 1: each update is lr = 2^-12, 1/8 of half of bf16's last bit.

    Each rounding errs by at most the last bit below 2, 2^-7, with mean 0. SGD with momentum reaches its pace
    after about 10 steps.
    """

    def moved(stochastic: bool, steps: int) -> torch.Tensor:
        weight = nn.Parameter(torch.full((4096,), 2.0 - 2**-7, dtype=BF16))
        optimizer = MAKERS[name]([weight], 2**-12, stochastic)
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return 2.0 - 2**-7 - weight.detach().double()

    assert moved(False, 100).abs().max() == 0
    found, expected = moved(True, 1000), 1000 * 2**-12
    # Bernoulli's variance of a step is at most lr * ulp; of the mean over 4096 weights, five deviations.
    deviation = (1000 * 2**-12 * 2**-7 / 4096) ** 0.5
    slack = 0.012 if name == "sgd-momentum" else 0.004  # What a momentum owes at the end; 8-bit levels.
    assert abs(found.mean() - expected) < 5 * deviation + slack * expected


def test_no_two_optimizers_of_a_step_draw_the_same_bits():
    settings = Optimizer(
        name="muon", momentum=0.95, implementation="fused", stochastic_rounding=True, in_backward=True
    )
    step = assemble(tiny_recipe(precision="bf16", optimizer=settings), CPU)
    numbers = [optimizer._seed for optimizer in step.optimizers]
    assert len({type(optimizer) for optimizer in step.optimizers}) == 2
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(
    "make",
    [
        lambda p, seed: kernel.FusedAdamW(p, 0.01, 0.1, stochastic=True, seed=seed),
        lambda p, seed: FusedAdafactor(p, lr=0.02, stochastic=True, seed=seed),
    ],
    ids=["adamw", "adafactor"],
)
def test_equal_seeds_repeat_and_others_differ(make: Any):
    runs = []
    for seed in (1, 1, 2):
        parameters = weights((64, 64), (64,), (3, 10, 12), dtype=BF16)
        run(make(parameters, seed), parameters)
        runs.append(torch.cat([p.detach().flatten() for p in parameters]))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
