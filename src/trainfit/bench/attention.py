"""Attention as the experiments time it: bodies by name, their work, and a run that times forward and backward apart.

Shapes: q, k, v [b, n, d] or [b, h, n, d]; b batch, h heads, n sequence, d head size.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainfit.bench.experiment import Bench, Part, Point, fp32_products, of_work
from trainfit.bench.roofline import Work
from trainfit.bench.timing import TOTAL, Lap, Rule
from trainfit.kernels.flash_attention import flash_attention
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.hardware import PeakDtype

Body = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
PASSES = ("forward", "backward", "both")
LAP = {"forward": "forward", "backward": "backward", "both": TOTAL}


def written_out(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, operation by operation: scores of n x n are in memory."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        n = q.shape[-2]
        seen = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1) @ v


def pytorch(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """PyTorch's own choice of kernel."""
    if q.dim() == 3:
        return pytorch(q[:, None], k[:, None], v[:, None], is_causal)[:, 0]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def ours(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """kernels/flash_attention.py: Triton on CUDA, tiled PyTorch elsewhere."""
    return flash_attention(q, k, v, is_causal)


def body(name: str) -> Body:
    """The body called so; a compiled one is compiled anew, for its own shapes."""
    if name == "compiled":
        torch._dynamo.reset()
        return torch.compile(written_out, dynamic=False)
    return {"eager": written_out, "pytorch": pytorch, "ours": ours}[name]


def pairs(n: int, is_causal: bool) -> int:
    """Query and key pairs that are not masked."""
    return n * (n + 1) // 2 if is_causal else n * n


def flops(shape: tuple[int, ...], is_causal: bool, which: str) -> float:
    """FLOPs the mathematics needs: two products of n x n x d forward, four backward (what a kernel computes anew is not counted)."""
    *batches, n, d = shape
    forward = 4.0 * math.prod(batches) * d * pairs(n, is_causal)
    return {"forward": forward, "backward": 2 * forward, "both": 3 * forward}[which]


def rows(
    bench: Bench, point: Point, name: str, shape: tuple[int, ...], dtype: str, *, is_causal: bool, rule: Rule
) -> Iterator[BenchRow]:
    """Forward, backward and both of one body and shape, and the bytes held before backward where a GPU tells them."""
    numbers: dict[str, Cell] = {}
    peak: PeakDtype = "bf16" if dtype == "bf16" else "fp32"
    input_bytes = 3 * math.prod(shape) * DTYPES[dtype].itemsize

    def part(which: str) -> Part:
        count = flops(shape, is_causal, which)
        cold = 0 if which == "backward" else input_bytes  # The forward has just read them.
        return Part({**point, "pass": which}, LAP[which], Work(count, peak, cold), of_work(count))

    def build() -> Callable[[Lap], object]:
        run = forward_and_backward(body(name), shape, DTYPES[dtype], bench.device, is_causal)
        numbers.update(before_backward(run, bench.device))
        return run

    with fp32_products("fp32"):
        yield from bench.time([part(which) for which in PASSES], build, rule, numbers=numbers)


def forward_and_backward(
    attention: Body, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, is_causal: bool
) -> Callable[[Lap], object]:
    """A run that calls its lap as forward and as backward begin."""
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, dtype=dtype, device=device)

    def run(lap: Lap) -> Any:
        lap("forward")
        out = attention(q, k, v, is_causal)
        lap("backward")
        return torch.autograd.grad(out, (q, k, v), gradient)

    return run


def before_backward(run: Callable[[Lap], object], device: torch.device) -> dict[str, Cell]:
    """Bytes that the forward's output and what it saved hold as backward begins; nothing where the device does not tell."""
    if device.type != "cuda":
        return {}
    held: dict[str, int] = {}
    for _ in range(2):  # The first run makes library workspaces, which are not the forward's.
        torch.cuda.synchronize(device)
        run(lambda name: held.update({name: torch.cuda.memory_allocated(device)}))
    return {"before_backward_bytes": held["backward"] - held["forward"]}
