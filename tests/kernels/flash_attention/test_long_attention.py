"""Attention of 131,072 tokens: rows of output and gradients against fp32, and memory linear in the length."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from trainfit.kernels.flash_attention.op import flash_attention

HEAD = 64
LONG = 131_072
ROWS = (200, 4_095, 65_535, 65_536, 100_003, LONG - 1)
"""Ends and beginnings of tiles; gradients of the first rows are differences of nearly equal numbers."""
WORST = 1e-2  # Of |difference| / |row|: bf16 rounds each exponential by 2^-9, and the result once more


class Rows(NamedTuple):
    """Some rows of the output and of the three gradients, [rows, d]."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def reference(given: list[Tensor], is_causal: bool, rows: Tensor, tile: int) -> Rows:
    """From q, k, v and the gradient of the output, [n, d], in fp32, ``tile`` query rows at once."""
    q, k, v, gradient = (x.float() for x in given)
    scale, at = 1 / math.sqrt(q.shape[1]), torch.arange(q.shape[0], device=q.device)

    def scores(queries: Tensor, keys: Tensor) -> Tensor:
        found = q[queries] @ k[keys].T * scale
        return found.masked_fill_(at[keys] > at[queries, None], -math.inf) if is_causal else found

    outs, sums = [], []
    for queries in at.split(tile):
        some = scores(queries, at)
        sums.append(some.logsumexp(1, keepdim=True))
        outs.append((some - sums[-1]).exp_() @ v)
    out, lse = torch.cat(outs), torch.cat(sums)
    delta = (gradient * out).sum(1, keepdim=True)

    def d_scores(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        p = (scores(queries, keys) - lse[queries]).exp_()
        return p, scale * p * (gradient[queries] @ v[keys].T - delta[queries])

    p, of_keys = d_scores(at, rows)
    return Rows(out[rows], d_scores(rows, at)[1] @ k, of_keys.T @ q, p.T @ gradient)


def forward_and_backward(given: list[Tensor], is_causal: bool) -> list[Tensor]:
    """Output and gradients, [n, d]."""
    *leaves, gradient = (x.detach()[None, None].requires_grad_() for x in given)
    out = flash_attention(*leaves, is_causal)
    return [x.detach()[0, 0] for x in (out, *torch.autograd.grad(out, leaves, gradient))]


def tensors(n: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(n, HEAD, device=device, dtype=dtype) for _ in range(4)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_reference_is_what_autograd_makes(is_causal: bool) -> None:
    given = tensors(300, "cpu", torch.float64)
    rows = torch.tensor([128, 200, 299])
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    seen = q @ k.T / math.sqrt(HEAD)
    out = (seen.masked_fill(torch.ones_like(seen).triu(1) > 0, -math.inf) if is_causal else seen).softmax(
        1
    ) @ v
    wanted = [out, *torch.autograd.grad(out, (q, k, v), given[3])]
    for found in (
        reference(given, is_causal, rows, 64),
        [x[rows] for x in forward_and_backward(given, is_causal)],
    ):
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.double(), want.detach()[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("empty_gpu_after")
@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_and_memory_of_131072_tokens(is_causal: bool) -> None:
    given = tensors(LONG, "cuda", torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = forward_and_backward(given, is_causal)
    peak_bytes = torch.cuda.max_memory_allocated() - before
    # Output, gradients and dQ's sums in fp32 are 1.5 times the inputs; scores of one byte would be 256 times.
    assert peak_bytes <= 2.5 * sum(x.nbytes for x in given)
    rows = torch.tensor(ROWS, device="cuda")
    for name, got, want in zip(Rows._fields, found, reference(given, is_causal, rows, 2048), strict=True):
        apart = (got[rows].float() - want).norm(dim=1) / want.norm(dim=1)
        assert apart.max() <= WORST, (name, apart.tolist())
