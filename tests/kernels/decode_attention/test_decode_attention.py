"""Attention of one new token over a cache: the kernel against written-out attention in fp64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trainfit.kernels.custom_op import interprets_triton
from trainfit.kernels.decode_attention import op
from trainfit.kernels.decode_attention.op import decode_attention
from trainfit.spec.errors import InputError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def written_out(
    q: Tensor, keys: Tensor, values: Tensor, lengths: list[int], window: int, slopes: Tensor | None
) -> Tensor:
    """Attention of each head of each sequence by itself, in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for b, length in enumerate(lengths):
        first = max(0, length - window) if window else 0
        for h in range(q.shape[1]):
            k, v = (x[b, h // group, first:length].double().cpu() for x in (keys, values))
            scores = k @ q[b, h].double().cpu() / math.sqrt(q.shape[2])
            if slopes is not None:
                scores -= slopes[h].double().cpu() * (length - 1 - torch.arange(first, length))
            if length:
                out[b, h] = scores.softmax(0) @ v
    return out


def inputs(b: int, h: int, k: int, m: int, d: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(b + h + k + m + d)
    shapes = ((b, h, d), (b, k, m, d), (b, k, m, d))
    return tuple(torch.randn(s, generator=generator).to(device, dtype) for s in shapes)


CASES: dict[str, dict[str, Any]] = {
    "one part": {"shape": (3, 4, 2, 96, 16), "lengths": [1, 64, 96]},
    "parts": {"shape": (2, 4, 1, 1100, 16), "lengths": [5, 1100]},
    "window": {"shape": (2, 2, 2, 600, 16), "lengths": [40, 599], "window": 70},
    "alibi": {"shape": (2, 4, 4, 300, 8), "lengths": [3, 300], "slopes": True},
    "odd head, empty sequence": {"shape": (2, 6, 2, 70, 20), "lengths": [0, 65]},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", ["reference", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_as_written_out(name: str, kernel: str, device: str) -> None:
    case = CASES[name]
    q, keys, values = inputs(*case["shape"], device=device, dtype=torch.float32)
    window, h = case.get("window", 0), q.shape[1]
    slopes = torch.linspace(0.1, 0.5, h, device=device) if case.get("slopes") else None
    lengths = torch.tensor(case["lengths"], dtype=torch.int32, device=device)
    if kernel == "triton" and device == "cpu" and not interprets_triton():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    run = op.triton_decode if kernel == "triton" else op.reference
    found = run(q, keys, values, lengths, window, slopes)
    expected = written_out(q, keys, values, case["lengths"], window, slopes)
    torch.testing.assert_close(found.double().cpu(), expected, atol=2e-6, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_caches_on_a_gpu(dtype: torch.dtype) -> None:
    q, keys, values = inputs(4, 28, 4, 5000, 128, "cuda", dtype)
    lengths = [5000, 1, 777, 4096]
    found = decode_attention(q, keys, values, torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    expected = written_out(q, keys, values, lengths, 0, None)
    assert (found.double().cpu() - expected).abs().max() < 0.02 * expected.abs().max()


def test_parts_fill_a_gpu_and_stay_long() -> None:
    assert [op.num_parts(*case) for case in ((64, 8, 1024), (1, 8, 4096), (1, 2, 512), (8, 4, 1 << 17))] == [
        1, 16, 2, 9,
    ]  # fmt: skip


def test_shapes_that_do_not_match_are_refused() -> None:
    q, keys, values = inputs(2, 3, 2, 8, 4, "cpu", torch.float32)
    with pytest.raises(InputError, match="decode_attention takes"):
        decode_attention(q, keys, values, torch.ones(2, dtype=torch.int32))
