"""Adafactor: PyTorch's results in fp32, Triton kernels equal to PyTorch, and stochastic rounding."""

import pytest
import torch
from torch import nn

from kernel_runs import between, interpreted_loops, run, weights
from trainfit.optim import adafactor

SHAPES = [(1, 7, 5), (1, 514, 130), (3, 33, 257)]


def test_it_is_torchs_adafactor_in_fp32() -> None:
    shapes = ((40, 24), (24,), (3, 10, 12), (700, 3))
    ours, theirs = weights(*shapes), weights(*shapes)
    run(adafactor.FusedAdafactor(ours, lr=0.02, weight_decay=0.1, stochastic=False, seed=0), ours)
    run(torch.optim.Adafactor(theirs, lr=0.02, weight_decay=0.1, foreach=False), theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


def test_absolute_steps_are_those_of_transformers_in_fp32() -> None:
    from transformers.optimization import Adafactor

    shapes = ((40, 24), (24,), (700, 3))
    ours, theirs = weights(*shapes), weights(*shapes)
    common = {"lr": 2e-3, "weight_decay": 0.1}
    run(adafactor.FusedAdafactor(ours, stochastic=False, seed=0, scaled=False, **common), ours)
    run(Adafactor(theirs, relative_step=False, scale_parameter=False, **common), theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("scaled", "lr"), [(True, 0.01), (False, 2e-4)])
def test_absolute_steps_leave_a_norms_bf16_weights_where_they_are(scaled: bool, lr: float) -> None:
    """Steps of 2e-4 are below half of 2^-8, the distance of bf16's neighbours below 1; 0.01 is above."""
    norm = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    small = nn.Parameter(torch.full((64, 64), 0.02, dtype=torch.bfloat16))
    optimizer = adafactor.FusedAdafactor([norm, small], lr=lr, stochastic=False, seed=0, scaled=scaled)
    for _ in range(3):
        for weight in (norm, small):
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert bool((norm == 1).all()) is not scaled
    assert not (small == 0.02).any()


@interpreted_loops
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 7, 5), torch.float32), ((1, 66, 130), torch.bfloat16), ((3, 33, 257), torch.float32)],
    ids=str,
)
def test_kernels_in_the_interpreter(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adafactor, "ROWS_A_PART", 64)
    compare(shape, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 10800, 2048)], ids=str)
def test_kernels_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    compare(shape, dtype, "cuda")


def compare(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(1)
    p, g = ((torch.randn(shape) / 50).to(dtype).to(device) for _ in range(2))
    for a, b in zip(adafactor.triton_squares(p, g), adafactor.plain_squares(p, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)
    row, col, _ = adafactor.plain_squares(p, g)
    col = col.sum(1) / shape[1]
    mean = row.mean(1)
    torch.testing.assert_close(
        adafactor.triton_update_squares(g, row, col, mean),
        adafactor.plain_update_squares(g, row, col, mean),
        rtol=1e-5, atol=1e-9,
    )  # fmt: skip
    size = torch.tensor(0.01, device=device)
    ours, theirs = p.clone(), p.clone()
    adafactor.triton_apply(ours, g, row, col, mean, size, 0.999, False, 0)
    adafactor.plain_apply(theirs, g, row, col, mean, size, 0.999, False, 0)
    torch.testing.assert_close(ours, theirs)
    if dtype == torch.bfloat16:
        adafactor.triton_apply(ours := p.clone(), g, row, col, mean, size, 0.999, True, 5)
        wide = p.float()
        adafactor.plain_apply(wide, g, row, col, mean, size, 0.999, False, 0)
        between(ours, wide, p)


def test_updates_below_the_last_bit_are_not_lost() -> None:
    """A weight of 1 that moves by 2^-12 a step: rounded to nearest it stays."""

    def moved(stochastic: bool) -> float:
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = adafactor.FusedAdafactor([weight], lr=2**-12, stochastic=stochastic, seed=1)
        for _ in range(200):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return 1 - weight.double().mean().item()

    # Adafactor's update is lr times the weights' root mean square, here falling from 1.
    expected = 1 - (1 - 2**-12) ** 200
    assert moved(False) == 0
    assert moved(True) == pytest.approx(expected, rel=0.03)
