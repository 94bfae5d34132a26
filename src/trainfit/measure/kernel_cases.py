"""What ``kernel_benchmark`` compares: for each operation its inputs, its definition, and the ways of computing it.

Shapes: n tokens, v vocabulary, e hidden size, f feed-forward size, h heads (a quarter of them keys) of 128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.kernels import fused_cross_entropy, rms_norm, rope, swiglu
from trainfit.kernels.chunked_cross_entropy import Head, linear_cross_entropy
from trainfit.kernels.loss_terms import Terms

EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """``tokens``, ``vocabulary``, ``hidden`` of the loss; ``rows`` of norm and gates; ``length`` and ``heads`` of a rotation."""

    tokens: int
    vocabulary: int
    hidden: int
    rows: int
    feedforward: int
    length: int
    heads: int


SMALL = Sizes(tokens=509, vocabulary=3001, hidden=256, rows=509, feedforward=771, length=131, heads=8)
"""Of the comparison with fp64: primes and odd numbers among them."""


@dataclass(frozen=True)
class Case:
    """One operation. ``ways``: name -> a function of ``inputs``; ``upstream``: its result's gradients, None of a scalar."""

    name: str
    inputs: tuple[Tensor, ...]
    definition: Callable[..., Any]
    ways: dict[str, Callable[..., Any]]
    upstream: tuple[Tensor, ...] | None = None
    flops: int = 0
    bytes_moved: dict[str, int] = field(default_factory=dict)
    """By part."""
    parts: tuple[str, ...] = ("forward", "both")
    """What is timed: the forward alone, and with the backward."""


def _randn(device: torch.device, dtype: torch.dtype, *shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad)


def _with_compiler(ways: dict[str, Callable[..., Any]], definition: Any, compiled: bool) -> dict[str, Any]:
    return {"eager": definition, **({"compiled": torch.compile(definition)} if compiled else {}), **ways}


def loss(sizes: Sizes, device: torch.device, dtype: torch.dtype, compiled: bool) -> Case:
    """Every 13th token is ignored. The gradients are computed in our forwards, so only the whole is timed.

    Of the chunk sizes, 32 chunks are Liger-Kernel's choice for 131,072 x 4,096 (as many logits as there are hidden values).
    """
    n, v, e = sizes.tokens, sizes.vocabulary, sizes.hidden
    hidden = _randn(device, dtype, n, e)
    weight = (_randn(device, dtype, v, e, grad=False) * e**-0.5).requires_grad_()
    targets = torch.randint(v, (n,), device=device)
    targets[::13] = -100

    def definition(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return fused_cross_entropy.plain_linear_cross_entropy(h, Head(w), t)

    def chunked(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return linear_cross_entropy(h, Head(w), t)

    def fused(rows: int | None, terms: Terms, h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return fused_cross_entropy.fused_linear_cross_entropy(h, Head(w), t, terms, rows=rows)

    ways: dict[str, Callable[..., Any]] = {
        "ours chunked": chunked,
        "ours fused": partial(fused, None, Terms()),
    }
    for parts in (32, 8, 4, 2, 1):
        ways[f"ours fused, {parts} chunks"] = partial(fused, -(-n // parts), Terms())
    return Case(
        "loss", (hidden, weight, targets), definition, _with_compiler(ways, definition, compiled),
        flops=6 * n * v * e, parts=("both",),
    )  # fmt: skip


def norm(sizes: Sizes, device: torch.device, dtype: torch.dtype, compiled: bool) -> Case:
    n, e = sizes.rows, sizes.hidden
    x, weight = _randn(device, dtype, n, e), _randn(device, dtype, e)

    def definition(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, w.shape, w, EPS)

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm.rms_norm(x, w, EPS)

    size = n * e * dtype.itemsize
    return Case(
        "norm", (x, weight), definition, _with_compiler({"ours": ours}, definition, compiled),
        (_randn(device, dtype, n, e, grad=False),), bytes_moved={"forward": 2 * size, "both": 5 * size},
    )  # fmt: skip


def gates(sizes: Sizes, device: torch.device, dtype: torch.dtype, compiled: bool) -> Case:
    """Halves of one tensor, as a fused product gives them."""
    n, f = sizes.rows, sizes.feedforward

    def definition(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, 1)
        return F.silu(gate) * up

    size = n * f * dtype.itemsize
    return Case(
        "gates", (_randn(device, dtype, n, 2 * f),), definition,
        _with_compiler({"ours": swiglu.swiglu}, definition, compiled),
        (_randn(device, dtype, n, f, grad=False),), bytes_moved={"forward": 3 * size, "both": 8 * size},
    )  # fmt: skip


def rotation(sizes: Sizes, device: torch.device, dtype: torch.dtype, compiled: bool) -> Case:
    """Heads beside each other in memory, as products give them; angles in fp32."""
    b, n, h, d = max(1, sizes.rows // sizes.length), sizes.length, sizes.heads, 128
    q, k = (
        _randn(device, dtype, b, n, heads, d, grad=False).transpose(1, 2).requires_grad_()
        for heads in (h, h // 4)
    )
    turns = torch.arange(n, device=device)[:, None] * 1e4 ** (-torch.arange(d // 2, device=device) / (d // 2))
    cos, sin = turns.cos(), turns.sin()

    def definition(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

        return turn(q), turn(k)

    size = (q.numel() + k.numel()) * dtype.itemsize
    upstream = tuple(torch.randn_like(x, requires_grad=False) for x in (q, k))
    return Case(
        "rotation", (q, k, cos, sin), definition, _with_compiler({"ours": rope.rope}, definition, compiled),
        upstream, bytes_moved={"forward": 2 * size, "both": 4 * size},
    )  # fmt: skip


CASES = (loss, norm, gates, rotation)


def products(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    """The loss's three products alone, at once and in chunks: what no loss built on them can beat."""
    n, v, e = sizes.tokens, sizes.vocabulary, sizes.hidden
    hidden, weight = _randn(device, dtype, n, e, grad=False), _randn(device, dtype, v, e, grad=False)
    sum_of_parts, result = torch.empty_like(weight), torch.empty_like(hidden)

    def run(parts: int, hidden: Tensor, weight: Tensor) -> None:
        rows = -(-n // parts)
        logits = torch.empty(rows, v, dtype=dtype, device=device)
        for first in range(0, n, rows):
            x = hidden[first : first + rows]
            torch.mm(x, weight.t(), out=logits[: len(x)])
            torch.mm(logits[: len(x)], weight, out=result[first : first + rows])
            sum_of_parts.addmm_(logits[: len(x)].t(), x, beta=int(first > 0))

    ways = {f"cuBLAS, {parts} chunks": partial(run, parts) for parts in (32, 8, 4, 2, 1)}
    return Case("products", (hidden, weight), run, ways, flops=6 * n * v * e, parts=("forward",))


def tilings(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    """The kernel alone over one chunk of logits, by block and warps; the logits go on being overwritten, which costs the same."""
    n, v = max(1, sizes.tokens // 4), sizes.vocabulary
    logits = _randn(device, dtype, n, v, grad=False)
    targets, factor = torch.randint(v, (n,), device=device), torch.ones((), device=device)

    def run(options: dict[str, int], logits: Tensor, targets: Tensor) -> Tensor:
        kernel = (
            fused_cross_entropy.triton_cross_entropy
            if logits.is_cuda
            else fused_cross_entropy.plain_cross_entropy
        )
        return kernel(logits, targets, factor, 1.0, 0.0, Terms(), True, **options)

    ways: dict[str, Callable[..., Any]] = {"plain": partial(run, {})}
    if device.type == "cuda":
        ways = {
            f"block {block}, {warps} warps": partial(run, {"block": block, "num_warps": warps})
            for block in (1024, 2048, 4096, 8192, 16384)
            for warps in (4, 8, 16, 32)
            if 4 <= block // (32 * warps) <= 64
        }
    moved = {"forward": 2 * logits.numel() * dtype.itemsize}
    return Case("tilings", (logits, targets), run, ways, bytes_moved=moved, parts=("forward",))


def beyond_32_bits(device: torch.device) -> dict[str, Any]:
    """The kernel over 2^31 + 2^17 logits: the rows past 2^31 elements against the PyTorch body."""
    c, v = 2**14 + 1, 2**17
    logits = torch.randn(c, v, device=device, dtype=torch.bfloat16)
    targets, factor = torch.randint(v, (c,), device=device), torch.ones((), device=device)
    last = logits[-1:].clone()
    losses = fused_cross_entropy.triton_cross_entropy(logits, targets, factor, 1.0, 0.0, Terms(), True)
    expected = fused_cross_entropy.plain_cross_entropy(last, targets[-1:], factor, 1.0, 0.0, Terms(), True)
    error = (logits[-1:].float() - last.float()).norm() / last.float().norm()
    return {
        "case": "loss", "way": "ours, over 2^31 logits", "part": "errors", "error": [error.item()],
        "losses": [losses[-1].item(), expected.item()], "of_eager": error.item() / 2**-8,
    }  # fmt: skip
