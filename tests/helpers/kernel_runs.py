"""Shared by tests of kernels: Triton's interpreter, gradients, stochastic rounding, the loops of SASS."""

import os
import re
import warnings
from importlib.metadata import version
from importlib.util import find_spec

import numpy
import pytest
import torch
from torch import Tensor, nn

BF16 = torch.bfloat16
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels run for real, in tests marked gpu"
)


def _interpreter_loops() -> bool:
    """Return whether Triton's interpreter runs loops up to an argument of the kernel, as those of 3.7 do.

    That of 3.6 makes a number of an array with one element, which NumPy 2.4 no longer does.
    """
    if not find_spec("triton") or tuple(map(int, version("triton").split(".")[:2])) >= (3, 7):
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            int(numpy.zeros(1))
        except TypeError:
            return False
    return True


INTERPRETER_RUNS = _interpreter_loops()
NO_INTERPRETER = "triton 3.6's interpreter does not run beside NumPy 2.4 or later"
interpreted_loops = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or not INTERPRETER_RUNS, reason=NO_INTERPRETER
)
"""For kernels with a loop up to one of their arguments, whose error a test hides; others skip by it."""


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """N(0, 1), the same at every call."""
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def run(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 6) -> None:
    """Steps with gradients that shrink tenfold from one to the next."""
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in parameters:
            parameter.grad = (torch.randn(parameter.shape) / 10**step).to(parameter.dtype)
        optimizer.step()


def between(rounded: Tensor, wide: Tensor, before: Tensor) -> None:
    """Each is one of the two bf16 neighbours of the fp32 value that ``before`` was updated to, and not always
    the nearer.

    The fp32 value is the kernel's own, which is not the reference's to the bit: a GPU fuses products into
    sums, and its quotients and roots are up to 2 last bits off. Where weight and update nearly cancel, that
    is more than the result's own last bits; so 16 last bits of the larger of the two are granted, a 4096th of
    its bf16 step.
    """
    operand = torch.maximum(before.float().abs(), (before.float() - wide).abs())
    assert ((rounded.float() - wide).abs() <= wide.abs() * 2**-7 + operand * 2**-19).all()
    moved = wide != wide.to(BF16).float()
    if moved.sum() > 1000:
        # The farther neighbour has probability 1/4 on average.
        assert 0.15 < (rounded != wide.to(BF16))[moved].float().mean() < 0.35


def loops(sass: str) -> list[str]:
    """The instructions of each loop, from where a branch jumps back to until that branch."""
    instructions = [
        (int(at, 16), text.strip())
        for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)
    ]
    found = []
    for at, text in instructions:
        branch = re.search(r"\bBRA (?:`\(.*\)|0x([0-9a-f]+))", text)
        if branch and branch[1] and int(branch[1], 16) < at:
            start = int(branch[1], 16)
            found.append("\n".join(f"{one} " for where, one in instructions if start <= where <= at))
    return found
