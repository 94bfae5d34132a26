"""Products in fp8 that add to a sum, by cuBLASLt on a GPU, against fp64 of the codes."""

import pytest
import torch
from torch import Tensor

from trainfit.kernels.weight_gradient import op

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="products in fp8 need a GPU from Ada on",
    ),
]
SHAPES = [(16, 16, 16), (48, 80, 112), (896, 4864, 2048), (1040, 528, 272), (3584, 18944, 4096)]
"""Outputs, inputs, tokens."""


def factors(outputs: int, inputs: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    d = torch.randn(outputs, tokens, device="cuda").to(torch.float8_e5m2)
    x = torch.randn(inputs, tokens, device="cuda").to(torch.float8_e4m3fn)
    return d, torch.tensor([0.5], device="cuda"), x, torch.tensor([0.125], device="cuda")


def product(d: Tensor, d_scale: Tensor, x: Tensor, x_scale: Tensor) -> Tensor:
    return d.double() @ x.double().T * (d_scale * x_scale)


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def registered() -> None:
    op.register_fp8()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_in_fp64(shape: tuple[int, int, int]) -> None:
    operands = factors(*shape)
    kept = torch.randn(*shape[:2], device="cuda").bfloat16()
    expected = kept.double()
    for _ in range(2):
        torch.ops.trainfit.add_fp8_weight_gradient_(*operands, kept)
        expected = expected + product(*operands)
    assert off(kept, expected) < 2**-7


def test_rows_of_the_sum_may_be_apart() -> None:
    operands = factors(64, 96, 128)
    memory = torch.zeros(64, 160, device="cuda", dtype=torch.bfloat16)
    torch.ops.trainfit.add_fp8_weight_gradient_(*operands, memory[:, :96])
    assert off(memory[:, :96], product(*operands)) < 2**-8
    assert not memory[:, 96:].any()


def test_codes_by_columns_are_refused() -> None:
    d, d_scale, x, x_scale = factors(64, 64, 64)
    kept = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="contiguous codes"):
        torch.ops.trainfit.add_fp8_weight_gradient_(d.t(), d_scale, x, x_scale, kept)


def test_two_streams_have_their_own_products() -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    operands = [factors(1024, 2048, 4096, seed) for seed in range(2)]
    sums = [torch.zeros(1024, 2048, device="cuda", dtype=torch.bfloat16) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(8):
        for stream, each, kept in zip(streams, operands, sums, strict=True):
            with torch.cuda.stream(stream):
                torch.ops.trainfit.add_fp8_weight_gradient_(*each, kept)
    torch.cuda.synchronize()
    for each, kept in zip(operands, sums, strict=True):
        assert off(kept, 8 * product(*each)) < 2**-6
