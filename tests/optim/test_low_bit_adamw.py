"""AdamW with moments in 8 or 4 bits: torchao's, and kernels equal to plain PyTorch."""

import pytest
import torch

from kernel_runs import BF16, between, interpreted, run, weights
from trainfit.kernels.quantize.codebook import MomentLevels, levels, zeros
from trainfit.kernels.stochastic_rounding import op as rounding
from trainfit.optim import adamw as kernel

CPU = torch.device("cpu")
NUMBERS = [0.01, 0.001, 0.1, 0.001, 1e-8, 0.19, 0.045]
SIZES = [(7,), (5003,), (40, 96)]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("bits", [8, 4])
def test_low_bit_adamw_is_torchaos(bits: int, dtype: torch.dtype):
    """The same levels and codes, and weights equal to the last bits of fp32; small weights have no codes."""
    optim = pytest.importorskip("torchao.optim")
    quantised = pytest.importorskip(f"torchao.optim.subclass_{bits}bit")
    for signed, maps in ((True, quantised.get_qmap_signed()), (False, quantised.get_qmap_unsigned())):
        assert len(maps) == 2**bits
        assert levels(bits, signed=signed) == pytest.approx(maps, rel=2e-7)
    shapes = ((64, 96), (63,), (4096,))
    ours, theirs = weights(*shapes, dtype=dtype), weights(*shapes, dtype=dtype)
    mine = kernel.FusedAdamW(ours, 0.01, 0.1, levels=MomentLevels(bits, CPU), stochastic=False, seed=0)
    other = getattr(optim, f"AdamW{bits}bit")(theirs, lr=0.01, weight_decay=0.1)
    run(mine, ours)
    with torch.compiler.set_stance("force_eager"):
        run(other, theirs)
    for a, b in zip(ours, theirs, strict=True):
        if a.numel() < 4096 and dtype == BF16:
            continue  # torchao keeps bf16 moments there, we fp32.
        if dtype == BF16:
            # A last bit of fp32 decides now and then which neighbour is the nearer.
            assert (a != b).float().mean() < 2e-3
            torch.testing.assert_close(a, b, rtol=2**-6, atol=0)
        else:
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        if a.numel() < 4096:
            continue
        for moment in ("exp_avg", "exp_avg_sq"):
            codes = mine.state[a][f"{moment}_codes"]
            assert (codes != other.state[b][moment].codes).float().mean() < 1e-3
            torch.testing.assert_close(mine.state[a][f"{moment}_scales"], other.state[b][moment].scale)


def test_without_codes_it_is_torchs_adamw():
    ours, theirs = weights((40, 24), (24,)), weights((40, 24), (24,))
    run(kernel.FusedAdamW(ours, 0.01, 0.1, stochastic=False, seed=0), ours)
    run(torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1), theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# -- kernels


@interpreted
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_in_the_interpreter(size: tuple[int, ...]):
    compare_kernels(size, "cpu", most_away=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*SIZES, (10800, 2048)], ids=str)
def test_kernels_on_a_gpu(size: tuple[int, ...]):
    """A GPU fuses products into sums, and a last bit decides between levels; on an H200 for at most 0.2 %."""
    compare_kernels(size, "cuda", most_away=3e-3)


def compare_kernels(size: tuple[int, ...], device: str, most_away: float) -> None:
    torch.manual_seed(2)
    p, g = ((torch.randn(size) / 50).to(BF16).to(device) for _ in range(2))
    m, v = torch.zeros_like(p), torch.rand_like(p) / 100
    wide = [t.float() for t in (p, m, v)]
    ours = [t.clone() for t in wide]
    kernel.triton_adamw(ours[0], g, *ours[1:], NUMBERS, False, 0)
    kernel.plain_adamw(wide[0], g, *wide[1:], NUMBERS, False, 0)
    for a, b in zip(ours, wide, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    rounded = [t.clone() for t in (p, m, v)]
    kernel.triton_adamw(rounded[0], g, *rounded[1:], NUMBERS, True, 5)
    for a, b, before in zip(rounded, wide, (p, m, v), strict=True):
        between(a, b, before)
    # A small weight's moments are in fp32: nothing of them may be rounded at random.
    mixed = [p.clone(), m.float(), v.float()]
    kernel.triton_adamw(mixed[0], g, *mixed[1:], NUMBERS, True, 5)
    between(mixed[0], wide[0], p)
    for a, b in zip(mixed[1:], wide[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    total = p.clone()
    rounding.triton_add_rounded(total, g, 0.99, -0.01, 3)
    between(total, p.float() * 0.99 - g.float() * 0.01, p)
    for bits in (8, 4):
        compare_coded(p, g, bits, most_away)


def compare_coded(p: torch.Tensor, g: torch.Tensor, bits: int, most_away: float) -> None:
    """Three steps, each from the reference's state; the interpreter truncates bf16, so fp32 weights."""
    table = MomentLevels(bits, p.device).table
    state = [p.float(), *zeros(p.shape, bits, p.device), *zeros(p.shape, bits, p.device)]
    for step in range(3):
        gradient, ours = g / 10**step, [t.clone() for t in state]
        kernel.triton_adamw_coded(ours[0], gradient, *ours[1:], table, NUMBERS, False, 0)
        kernel.plain_adamw_coded(state[0], gradient, *state[1:], table, NUMBERS, False, 0)
        for a, b in zip(ours, state, strict=True):
            if a.dtype == torch.uint8:
                neighbours(a, b, bits, most_away)
            else:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    rounded, exact = ([start, *(t.clone() for t in state[1:])] for start in (p.clone(), p.float()))
    kernel.triton_adamw_coded(rounded[0], g, *rounded[1:], table, NUMBERS, True, 7)
    kernel.plain_adamw_coded(exact[0], g, *exact[1:], table, NUMBERS, False, 0)
    between(rounded[0], exact[0], p)


def neighbours(found: torch.Tensor, expected: torch.Tensor, bits: int, most_away: float) -> None:
    """Codes are equal, except for a share of at most ``most_away`` that are the next level up or down."""
    a, b = (t.int() if bits == 8 else torch.stack([t >> 4, t & 15]).int() for t in (found, expected))
    apart = (a - b).abs()
    assert apart.max() <= 1
    assert apart.float().mean() <= most_away
