"""Operations that loss_and_blocks.py compares: inputs, definition, and the ways of computing them.

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
from torch.optim.adamw import adamw as functional_adamw

from trainfit.kernels.cross_entropy import fused as fused_cross_entropy
from trainfit.kernels.cross_entropy.chunked import Head, linear_cross_entropy
from trainfit.kernels.cross_entropy.terms import Terms
from trainfit.kernels.rms_norm import op as rms_norm
from trainfit.kernels.rope import op as rope
from trainfit.kernels.swiglu import op as swiglu
from trainfit.optim import adamw

EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Sizes of the loss (first three), norm and gates (``rows``), and rotation (``length``, ``heads``)."""

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
    """One operation. ``ways``: functions of ``inputs`` by name; ``upstream``: gradients of the result."""

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
    size: str = ""
    """For people."""
    in_place: bool = False
    """The ways write into their inputs, and give those back."""


def _randn(device: torch.device, dtype: torch.dtype, *shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad)


def _with_compiler(ways: dict[str, Callable[..., Any]], definition: Any, compiled: bool) -> dict[str, Any]:
    return {"eager": definition, **({"compiled": torch.compile(definition)} if compiled else {}), **ways}


def loss(sizes: Sizes, device: torch.device, dtype: torch.dtype, compiled: bool) -> Case:
    """Every 13th token is ignored. The gradients are computed in our forwards, so only the whole is timed.

    Of the chunk sizes, 32 chunks are Liger-Kernel's choice for 131,072 x 4,096 (as many logits as there are
    hidden values).
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
        flops=6 * n * v * e, parts=("both",), size=_loss_size(sizes),
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
        size=f"{n:,} rows of {e:,}",
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
        size=f"{n:,} rows of 2 x {f:,}",
    )  # fmt: skip


def rotation(sizes: Sizes, device: torch.device, dtype: torch.dtype, compiled: bool) -> Case:
    """Heads next to each other in memory, as products give them; angles in fp32."""
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
        size=f"{b:,} x {n:,} positions, {h} and {h // 4} heads of {d}",
    )  # fmt: skip


def update(sizes: Sizes, device: torch.device, dtype: torch.dtype, compiled: bool) -> Case:
    """AdamW of one weight and its moments, in place. ``eager`` and ``compiled`` round bf16 at random as our
    kernel does, by PyTorch's random numbers; what only rounds to nearest says so. Other dtypes are always
    rounded to nearest.
    """
    n, e = sizes.rows, sizes.hidden
    p, g, m = (_randn(device, dtype, n, e, grad=False) * scale for scale in (0.1, 1e-3, 1e-4))
    v = _randn(device, dtype, n, e, grad=False).square() * 1e-6
    group = {"betas": (0.9, 0.999), "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
    numbers = adamw.Numbers.of(group, 10)
    # Where torch's optimizers keep it: foreach reads it on the host.
    steps = {"fused": torch.tensor(9.0, device=device), "foreach": torch.tensor(9.0)}

    def definition(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        a, b, c, d = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (p, g, m, v))
        for target, values in zip((p, m, v), adamw.updated(a, b, c, d, numbers), strict=True):
            if target.dtype == torch.bfloat16:
                noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device)
                values = (values.view(torch.int32) + noise).bitwise_and(-65536).view(torch.float32)
            target.copy_(values)
        return p, m, v

    def ours(stochastic: bool, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        adamw.register()
        torch.ops.trainfit.adamw_(p, g, m, v, list(numbers), stochastic, 1)
        return p, m, v

    def torchs(kind: str, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        chosen: dict[str, Any] = {"foreach": kind == "foreach", "fused": kind == "fused"}
        functional_adamw(
            [p], [g], [m], [v], [], [steps[kind].clone()], amsgrad=False, beta1=0.9, beta2=0.999, lr=1e-3,
            weight_decay=0.1, eps=1e-8, maximize=False, **chosen,
        )  # fmt: skip
        return p, m, v

    ways: dict[str, Callable[..., Any]] = {
        "ours": partial(ours, True), "ours, to nearest": partial(ours, False),
        "torch fused, to nearest": partial(torchs, "fused"),
        "torch foreach, to nearest": partial(torchs, "foreach"),
    }  # fmt: skip
    return Case(
        "update", (p, g, m, v), definition, _with_compiler(ways, definition, compiled), parts=("forward",),
        bytes_moved={"forward": 7 * p.numel() * dtype.itemsize}, size=f"{n * e:,} weights", in_place=True,
    )  # fmt: skip


CASES = (loss, norm, gates, rotation, update)


def _loss_size(sizes: Sizes) -> str:
    return f"{sizes.tokens:,} tokens, {sizes.vocabulary:,} words, hidden size {sizes.hidden:,}"


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
    return Case(
        "products",
        (hidden, weight),
        run,
        ways,
        flops=6 * n * v * e,
        parts=("forward",),
        size=_loss_size(sizes),
    )


def tilings(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    """The kernel alone over one chunk of logits, which it overwrites each time, by block and warps."""
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
    return Case(
        "tilings",
        (logits, targets),
        run,
        ways,
        bytes_moved=moved,
        parts=("forward",),
        size=f"{n:,} x {v:,} logits",
    )


def gate_tilings(backward: bool, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    """SwiGLU's forward or backward kernel alone, by block and warps."""
    n, f = sizes.rows, sizes.feedforward
    both, given = _randn(device, dtype, n, 2 * f, grad=False), _randn(device, dtype, n, f, grad=False)

    def run(tile: swiglu.Tile | None, both: Tensor, given: Tensor) -> Tensor:
        gate, up = both.chunk(2, 1)
        if tile is None:
            plain = swiglu.reference_backward if backward else swiglu.reference_forward
            return plain(*((given, gate, up) if backward else (gate, up)))
        return (
            swiglu.triton_backward(given, gate, up, tile)
            if backward
            else swiglu.triton_forward(gate, up, tile)
        )

    ways: dict[str, Callable[..., Any]] = {"plain": partial(run, None)}
    if device.type == "cuda":
        ways = {
            f"block {block}, {warps} warps": partial(run, swiglu.Tile(block, warps))
            for block in (512, 1024, 2048, 4096)
            for warps in (1, 2, 4, 8, 16)
            if 4 <= block // (32 * warps) <= 16
        }
    name = "gate tilings, backward" if backward else "gate tilings"
    moved = {"forward": (5 if backward else 3) * given.numel() * dtype.itemsize}
    size = f"{n:,} rows of 2 x {f:,}"
    return Case(name, (both, given), run, ways, bytes_moved=moved, parts=("forward",), size=size)


TUNINGS = (products, tilings, partial(gate_tilings, False), partial(gate_tilings, True))


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
        "case": "loss", "size": f"{c:,} x {v:,} logits", "way": "ours, over 2^31 logits",
        "part": "errors", "error": [error.item()],
        "losses": [losses[-1].item(), expected.item()], "of_eager": error.item() / 2**-8,
    }  # fmt: skip
