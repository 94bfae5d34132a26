"""Attention: bodies by name, their work, and rows of forward and backward timed apart.

Shapes: q, k, v [b, h, n, d]; b batch, h heads (of k and v maybe fewer), n sequence, d head size. Every body
gets the same q, k, v and gradient.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from trainfit.bench.harness.bench import Bench, Part, Point, fp32_products, of_work
from trainfit.bench.harness.experiment import Column
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.timing import TOTAL, Lap, Rule
from trainfit.kernels.flash_attention.op import flash_attention
from trainfit.kernels.flash_attention.triton_launch import triton_backward, triton_forward
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import PeakDtype

Body = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
PASSES = ("forward", "backward", "both")
LAP = {"forward": "forward", "backward": "backward", "both": TOTAL}
PRODUCTS = {"forward": 2, "backward": 5, "both": 7}
"""Products of n x n x d that rates count; the backward recomputes the scores (Dao, arXiv:2307.08691, section
4.1)."""
LEAST_PRODUCTS = {"forward": 2, "backward": 4, "both": 6}  # Products that every implementation needs
NOT_SYNCHRONISED = "forward, not synchronised"

BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
"""Names of bodies in ``torch.nn.attention.SDPBackend``."""
HALF_ONLY = ("flash", "cudnn")
MASKABLE = ("pytorch", "cudnn", "efficient")  # Bodies that take a mask as a tensor
CUDA_ONLY = ("cudnn", "efficient", "flex", "plain")
MaskKind = Literal["none", "boolean", "additive"]
"""none: ``is_causal`` alone; boolean: True where a key is seen; additive: 0 or -inf in the query's dtype."""
BODY_NOTE = "ours: what attention: triton runs here; plain: without Hopper's features; others: torch's"
COLUMNS = (
    Column("body", note=BODY_NOTE),
    Column("tflops_per_s", "TFLOP/s"),
    Column("host_s", "host", note="host time to issue the pass"),
    Column("before_backward_bytes", "before backward", note="held by the forward's output and saved tensors"),
)
"""Columns of the experiments that time attention."""


@dataclass(frozen=True)
class Case:
    """One body and shape."""

    body: str
    dtype: str
    batch: int
    heads: int
    seq: int
    head: int
    is_causal: bool
    mask: MaskKind | None = None  # None: the row's point has no key mask
    kv_heads: int | None = None  # None: as many as heads, and the row's point has no such key

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.heads, self.seq, self.head)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.kv_heads or self.heads, self.seq, self.head)

    @property
    def point(self) -> Point:
        masked: Point = {} if self.mask is None else {"mask": self.mask}
        grouped: Point = {} if self.kv_heads is None else {"kv_heads": self.kv_heads}
        return {
            "dtype": self.dtype, "batch": self.batch, "heads": self.heads, **grouped, "head": self.head,
            "causal": self.is_causal, **masked, "seq": self.seq, "body": self.body,
        }  # fmt: skip


# -- bodies --


def written_out(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v operation by operation; scores of n x n are in memory."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        n = q.shape[-2]
        seen = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1) @ v


def pytorch(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None = None) -> Tensor:
    """Run the kernel that PyTorch chooses."""
    grouped = q.shape[1] != k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
    )


def backend(name: str, mask: Tensor | None = None) -> Body:
    """Return attention by one backend of PyTorch; efficient takes no grouped heads, so they are repeated."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    allowed = getattr(SDPBackend, BACKENDS[name])

    def run(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        if name == "efficient" and q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        with sdpa_kernel(allowed):
            return pytorch(q, k, v, is_causal, mask)

    return run


def flex(attention: Callable[..., Any]) -> Body:
    """Return FlexAttention with a causal block mask, created in the first run of a length."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    masks: dict[int, BlockMask | None] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        n = q.shape[-2] if is_causal else 0
        if is_causal and n not in masks:
            masks[n] = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=q.device)
        return attention(q, k, v, block_mask=masks.get(n))

    return run


class PlainKernels(torch.autograd.Function):
    """trainfit's Triton kernels without Hopper's features, on any CUDA GPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out, lse = triton_forward(q, k, v, is_causal, 1 / math.sqrt(q.shape[-1]))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        return (*triton_backward(gradients[0], q, k, v, out, lse, ctx.is_causal, scale), None)


def body(name: str) -> Body:
    """Return the body of this name; a compiled one is compiled anew, for its own shapes.

    eager: written out; compiled: the same compiled; pytorch: its own choice; flash, cudnn, efficient: its
        backends;
    flex: FlexAttention; plain: plain Triton kernels; ours: what ``attention: triton`` runs on this device.
    """
    if name in ("compiled", "flex"):
        torch._dynamo.reset()
    if name == "compiled":
        return torch.compile(written_out, dynamic=False)
    if name == "flex":
        from torch.nn.attention.flex_attention import flex_attention

        return flex(torch.compile(flex_attention, dynamic=False))
    if name in BACKENDS:
        return backend(name)
    # ``ours``: the fastest kernels of this device, tiled PyTorch where there are none.
    plain: Any = PlainKernels.apply
    return {"eager": written_out, "pytorch": pytorch, "plain": plain, "ours": flash_attention}[name]


def body_of(case: Case, device: torch.device) -> Body:
    """Return the case's body, with the case's mask where it has one."""
    if case.mask in (None, "none"):
        return body(case.body)
    mask = mask_of(case.mask, case.batch, case.seq, DTYPES[case.dtype], device)
    return partial(pytorch, mask=mask) if case.body == "pytorch" else backend(case.body, mask)


def check(case: Case, device: torch.device) -> None:
    """Check that the body supports the case on this device."""
    if case.body in CUDA_ONLY and device.type != "cuda":
        raise InputError(f"{case.body} trains on CUDA only", "use a GPU", field="body", value=case.body)
    if case.mask not in (None, "none") and case.body not in MASKABLE:
        remedy = f"use {', '.join(MASKABLE)}"
        raise InputError("this body takes no mask", remedy, field="body", value=case.body)
    if case.body in HALF_ONLY and device.type == "cuda" and case.dtype == "fp32":
        why = "this kernel takes fp16 and bf16 only"
        raise InputError(why, "use pytorch or ours", field="body", value=case.body)


def mask_of(kind: str, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a causal mask [batch, 1, n, n] of a sliding window of n / 2, as transformers passes it to SDPA.

    A boolean mask is expanded over the batch; an additive one is contiguous, as SDPA's conversion leaves it.
    No kernel of PyTorch skips what such a mask hides, so the window's width changes no time."""
    if kind not in ("boolean", "additive"):
        raise ValueError(f"kind = {kind}: must be boolean or additive")
    at = torch.arange(n, device=device)
    behind = at[:, None] - at[None, :]
    seen = ((behind >= 0) & (behind < max(1, n // 2))).expand(batch, 1, n, n)
    if kind == "boolean":
        return seen
    zero, hidden = (torch.tensor(value, dtype=dtype, device=device) for value in (0.0, float("-inf")))
    return torch.where(seen, zero, hidden)


# -- work --


def flops(case: Case, products: int) -> float:
    """Return the FLOPs of ``products`` products of n x n x d, half of each where causal, as published."""
    pairs = case.seq**2 / 2 if case.is_causal else case.seq**2
    return 2.0 * products * case.batch * case.heads * case.head * pairs


def work_of(case: Case, which: str) -> Work:
    """Return the least work; what the forward has just read is no cold read of the backward."""
    peak: PeakDtype = "bf16" if case.dtype == "bf16" else "fp32"
    elements = math.prod(case.shape) + 2 * math.prod(case.kv_shape)
    cold_bytes = 0 if which == "backward" else elements * DTYPES[case.dtype].itemsize
    return Work(flops(case, LEAST_PRODUCTS[which]), peak, cold_bytes)


# -- samples --

LIKELY_PER_S = {"bf16": 5e14, "fp32": 4e13}
"""FLOP/s that kernels roughly reach on a fast GPU; sets only the rests and the number of samples."""
REST, LEAST_REST_S, MOST_REST_S = 8, 0.015, 0.3
"""Resting eight times as long as it works keeps a GPU below its power limit; runs above ``LONG_S`` exceed
it."""
LONG_S = 0.012
SHORT = Rule(warmup=2, min_samples=12, max_samples=20, spread=0.03, cap_s=4.0, hide=True, rest_s=LEAST_REST_S)
LONG = replace(SHORT, warmup=1, min_samples=6, max_samples=9, cap_s=8.0)
SLOW = replace(LONG, max_samples=6, cap_s=30.0)
"""Of a long case in fp32, which may take seconds a run: the fewest samples that bound the median."""


def rule_of(case: Case) -> Rule:
    """Return the sampling rule of a case in full form."""
    likely_s = flops(case, PRODUCTS["both"]) / LIKELY_PER_S[case.dtype]
    rest_s = min(max(REST * likely_s, LEAST_REST_S), MOST_REST_S)
    rule = SHORT if likely_s <= LONG_S else SLOW if case.dtype == "fp32" else LONG
    return replace(rule, rest_s=rest_s)


# -- rows --


def rows(bench: Bench, case: Case) -> Iterator[BenchRow]:
    """Yield forward, backward and both; with the forward the bytes held before the backward, on a GPU."""
    held: dict[str, Cell] = {}

    def part(which: str) -> Part:
        rates, mine = of_work(flops(case, PRODUCTS[which])), held if which == "forward" else {}
        point: Point = {**case.point, "pass": which}
        return Part(point, LAP[which], work_of(case, which), rates, mine, has_host_time=True)

    def build() -> Callable[[Lap], object]:
        check(case, bench.device)
        run = forward_and_backward(body_of(case, bench.device), *tensors(case, bench.device), case.is_causal)
        held.update(before_backward(run, bench.device))
        return run

    rule = bench.rule if bench.tiny else rule_of(case)
    with fp32_products("fp32"):
        yield from bench.time([part(which) for which in PASSES], build, rule)


def unsynchronised(bench: Bench, case: Case) -> Iterator[BenchRow]:
    """Yield the forward by the host's clock without waiting for the GPU: wrong on purpose."""
    rule = Rule(warmup=1, min_samples=6, max_samples=6, flush=False)
    part = Part({**case.point, "pass": NOT_SYNCHRONISED}, "forward", work_of(case, "forward"))

    def build() -> Callable[[Lap], object]:
        check(case, bench.device)
        attention = body(case.body)
        q, k, v, _ = tensors(case, bench.device)

        def run(lap: Lap) -> object:
            lap("forward")
            return attention(q, k, v, case.is_causal)

        return run

    with fp32_products("fp32"):
        yield from bench.time([part], build, rule, on_host=True)


def tensors(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and the output's gradient, the same for every body of a shape."""
    generator = torch.Generator(device).manual_seed(case.seq + case.head)
    dtype = DTYPES[case.dtype]
    q, k, v, gradient = (
        torch.randn(shape, dtype=dtype, device=device, generator=generator)
        for shape in (case.shape, case.kv_shape, case.kv_shape, case.shape)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), gradient


def forward_and_backward(
    attention: Body, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, is_causal: bool
) -> Callable[[Lap], object]:
    """Return a run with the laps forward and backward."""

    def run(lap: Lap) -> Any:
        lap("forward")
        out = attention(q, k, v, is_causal)
        lap("backward")
        return torch.autograd.grad(out, (q, k, v), gradient)

    return run


def before_backward(run: Callable[[Lap], object], device: torch.device) -> dict[str, Cell]:
    """Return the bytes held by the forward's output and saved tensors; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    held: dict[str, int] = {}
    for _ in range(2):  # The first run allocates workspaces and masks, which are not the forward's.
        torch.cuda.synchronize(device)
        run(lambda name: held.update({name: torch.cuda.memory_allocated(device)}))
    return {"before_backward_bytes": held["backward"] - held["forward"]}
