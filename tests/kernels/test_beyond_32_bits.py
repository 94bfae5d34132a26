"""Every kernel over more than 2^31 elements gives the last of them the results that they have alone.

On a GPU (4.3 GB per bf16 tensor, up to 50 GB per case), and in Triton's interpreter on small tensors. The
loss is in test_kernel_benchmark.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_runs import interpreted, interpreted_loops
from trainfit.bench.kernels import normed_swiglu
from trainfit.kernels.cross_entropy import gradients_in_forward
from trainfit.kernels.flash_attention.dispatch import backward_groups, forward_groups
from trainfit.kernels.flash_attention.hopper.launch import backward as gluon_backward
from trainfit.kernels.flash_attention.hopper.launch import gluon_forward
from trainfit.kernels.flash_attention.triton_launch import triton_backward, triton_forward
from trainfit.kernels.quantize import nf4
from trainfit.kernels.quantize import rowwise as rows
from trainfit.kernels.quantize.codebook import BLOCK, MomentLevels
from trainfit.kernels.rms_norm import op as rms_norm
from trainfit.kernels.rope import op as rope
from trainfit.kernels.stochastic_rounding import op as stochastic_rounding
from trainfit.kernels.swiglu import op as swiglu
from trainfit.optim import adafactor, adamw

LAST = 2  # Rows, matrices or sequences that are compared
NUMBERS = list(adamw.Numbers.of({"betas": (0.9, 0.999), "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}, 3))
Randn = Callable[..., Tensor]
Results = tuple[list[Tensor], list[Tensor]]  # The last of the whole's, and those of the last alone
Case = Callable[[int, int, Randn], Results]  # Of so many rows of so many elements


def last(*tensors: Tensor) -> list[Tensor]:
    return [x[-LAST:].clone() for x in tensors]


def both(run: Callable[..., list[Tensor]], *tensors: Tensor) -> Results:
    """``run`` of the tensors, and of their last alone, taken before anything is written."""
    alone = last(*tensors)
    return run(*tensors), run(*alone)


def norm(n: int, e: int, randn: Randn) -> Results:
    w = randn(e)

    def run(x: Tensor) -> list[Tensor]:
        y, scale = rms_norm.triton_forward(x, w, 1e-5)
        return last(y, scale, rms_norm.triton_backward(y, x, w, scale)[0])

    return both(run, randn(n, e))


def gates(n: int, f: int, randn: Randn) -> Results:
    def run(x: Tensor) -> list[Tensor]:
        gate, up = x.chunk(2, 1)
        y = swiglu.triton_forward(gate, up)
        return last(y, swiglu.triton_backward(y, gate, up))

    return both(run, randn(n, 2 * f))


def rotation(n: int, c: int, randn: Randn) -> Results:
    """Sequences of one position, heads of 128; angles for each sequence."""

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        return last(*rope.triton_rotate(q, k, cos, sin, False))

    q, k = (randn(n, 1, size // 128, 128).transpose(1, 2) for size in (c, c // 4))
    turns = randn(n, 1, 64).float()
    return both(run, q, k, turns.cos(), turns.sin())


def chain(n: int, f: int, randn: Randn) -> Results:
    w = randn(2 * f)
    return both(lambda x: last(normed_swiglu.triton_into(x, w, x.new_empty(len(x), f))), randn(n, 2 * f))


def plain_adamw(n: int, c: int, randn: Randn) -> Results:
    def run(*state: Tensor) -> list[Tensor]:
        adamw.triton_adamw(*state, NUMBERS, False, 0)
        return last(*state)

    return both(run, randn(n, c), randn(n, c), randn(n, c), randn(n, c).square_())


def coded_adamw(bits: int, n: int, c: int, randn: Randn) -> Results:
    table = MomentLevels(bits, randn(1).device).table

    def run(p: Tensor, g: Tensor) -> list[Tensor]:
        codes = [torch.zeros(p.numel() * bits // 8, dtype=torch.uint8, device=p.device) for _ in range(2)]
        scales = [torch.zeros(p.numel() // BLOCK[bits], device=p.device) for _ in range(2)]
        state = (codes[0], scales[0], codes[1], scales[1])
        adamw.triton_adamw_coded(p, g, *state, table, NUMBERS, False, 0)
        return last(p, *(x.view(len(p), -1) for x in state))

    return both(run, randn(n, c), randn(n, c))


def factored(n: int, c: int, randn: Randn) -> Results:
    """A matrix for every fourth of the rows."""

    def run(p: Tensor, g: Tensor) -> list[Tensor]:
        row, parts, weights = adafactor.triton_squares(p, g)
        col, mean, size = parts.sum(1), row.mean(1), torch.ones((), device=p.device)
        updates = adafactor.triton_update_squares(g, row, col, mean)
        adafactor.triton_apply(p, g, row, col, mean, size, 0.9, False, 0)
        return last(row, parts, p.view(-1, c), weights, updates)

    return both(run, *(randn(n, c).view(4, n // 4, c) for _ in range(2)))


def normal_floats(n: int, c: int, randn: Randn) -> Results:
    """The last two rows are one group of blocks; blocks have any codes."""
    levels, offset = nf4.make_levels(randn(1).device), randn(1).float()

    def run(weight: Tensor) -> list[Tensor]:
        rows_of = (len(weight), -1)
        codes, magnitudes = nf4.triton_quantize_blocks(weight, levels)
        groups, block_codes = magnitudes.view(-1, nf4.GROUP).amax(1), codes.view(-1, 32)[:, 0].contiguous()
        made = nf4.triton_dequantize(weight, codes, block_codes, groups, offset, levels, len(weight), c)
        return last(codes.view(rows_of), magnitudes.view(rows_of), made)

    return both(run, randn(n, c))


def byte_rows(n: int, c: int, randn: Randn) -> Results:
    like = randn(1)
    return both(
        lambda codes, scales: last(rows.triton_dequantize(like, codes, scales)),
        randn(n, c).mul_(20).to(torch.int8),
        randn(n).float(),
    )


def weighted_sum(n: int, c: int, randn: Randn) -> Results:
    """Each element is rounded by its own random bits, so all values are numbers of bf16."""
    p, g = (randn(n, c).to(torch.bfloat16) for _ in range(2))
    stochastic_rounding.triton_add_rounded(p, g, 0.0, -2.0, 7)
    return last(p), [-2 * x for x in last(g)]


def multiplication(n: int, c: int, randn: Randn) -> Results:
    ratio = torch.tensor(0.3, device=randn(1).device)

    def run(x: Tensor) -> list[Tensor]:
        gradients_in_forward.triton_multiply_unless_one(x, ratio)
        return last(x)

    return both(run, randn(n, c))


def attention(d: int, forward: Any, backward: Any, n: int, c: int, randn: Randn) -> Results:
    """``n`` sequences of one head of ``d``."""

    def run(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
        out, lse = forward(q, k, v, True, 0.1)
        return last(out, lse, *backward(gradient, q, k, v, out, lse, True, 0.1))

    return both(run, *(randn(n, c // d, 1, d).transpose(1, 2) for _ in range(4)))


def one_sequence(d: int, forward: Any, backward: Any, n: int, c: int, randn: Randn) -> Results:
    """``n`` rows of a head of ``d`` that lie ``c`` elements apart, and the same contiguous."""
    whole = randn(n, c)
    apart = [whole[:, d * each : d * (each + 1)][None, None] for each in range(4)]
    results = []
    for q, k, v, gradient in (apart, [x.contiguous() for x in apart]):
        out, lse = forward(q, k, v, True, 0.1)
        made = (out, lse[..., None], *backward(gradient, q, k, v, out, lse, True, 0.1))
        results.append(last(*(x[0, 0] for x in made)))
    return results[0], results[1]


PLAIN = (64, triton_forward, triton_backward)
CASES: dict[str, Case] = {
    "norm": norm, "gates": gates, "rotation": rotation, "chain": chain, "adamw": plain_adamw,
    "adamw8bit": partial(coded_adamw, 8), "adamw4bit": partial(coded_adamw, 4), "adafactor": factored,
    "nf4": normal_floats, "int8": byte_rows, "weighted sum": weighted_sum, "multiplication": multiplication,
    "attention, plain": partial(attention, *PLAIN), "one sequence, plain": partial(one_sequence, *PLAIN),
}  # fmt: skip
GLUON: dict[str, Case] = {
    f"{name}, Gluon {d}": partial(
        case,
        d,
        partial(gluon_forward, how=forward_groups(d, 8192, 4)),
        partial(gluon_backward, how=backward_groups(d, 8192, 4)),
    )
    for name, case in (("attention", attention), ("one sequence", one_sequence))
    for d in (64, 128)
}
ROW = 8192
ROWS = 2**18 + 8  # Of ROW elements: 2^16 more than 2^31


LOOPS = ("norm", "rotation", "adafactor", "attention, plain", "one sequence, plain")
"""Cases of kernels with a loop up to an argument."""


def agree(case: Case, n: int, c: int, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    found, wanted = case(n, c, lambda *shape: torch.randn(shape, device=device, dtype=dtype))
    assert found
    for got, want in zip(found, wanted, strict=True):
        assert want.any()
        torch.testing.assert_close(got, want)


@interpreted
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=interpreted_loops) if name in LOOPS else name for name in CASES]
)
def test_the_last_rows_of_a_small_tensor(name: str) -> None:
    agree(CASES[name], 16, ROW if name == "nf4" else 512, "cpu", torch.float16)


@pytest.mark.gpu
@pytest.mark.usefixtures("empty_gpu_after")
@pytest.mark.parametrize("name", [*CASES, *GLUON])
def test_the_last_rows_of_more_than_two_to_the_31_elements(name: str) -> None:
    """And more heads than a grid's second axis has room for."""
    if name in GLUON and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's instructions")
    assert ROWS * ROW > 2**31
    agree((CASES | GLUON)[name], ROWS, ROW, "cuda", torch.bfloat16)
