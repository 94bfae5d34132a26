"""Products of a few tokens by the weights of a decoder block: memory-bound, then compute-bound.

A product of m tokens by a weight [N, K] takes 2 m N K FLOPs and reads N K weights, whatever m is. With C
FLOP/s and W bytes/s, a block of weights P and b bytes an element takes max(2 m P / C, b (P + m A) / W), A
being the elements a token reads and writes. Both are equal at the crossover

    m = b P / (2 P W / C - b A)

which is about C / W tokens in 16 bits; below it a token more costs almost nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainfit.bench.harness.timing import Lap
from trainfit.flops.shape import Shape
from trainfit.spec.hardware import Gpu

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@dataclass(frozen=True)
class Block:
    """The weights of a block's linears, each [outputs, inputs], and bytes of an element."""

    weights: Sequence[tuple[int, int]]
    element_bytes: int

    @property
    def params(self) -> int:
        return sum(outputs * inputs for outputs, inputs in self.weights)

    @property
    def elements_per_token(self) -> int:
        """Read and written beside the weights."""
        return sum(outputs + inputs for outputs, inputs in self.weights)

    def flops(self, tokens: float) -> float:
        return 2.0 * tokens * self.params

    def read_bytes(self, tokens: float) -> float:
        return self.element_bytes * (self.params + tokens * sum(inputs for _, inputs in self.weights))

    def moved_bytes(self, tokens: float) -> float:
        return self.element_bytes * (self.params + tokens * self.elements_per_token)

    def least_s(self, tokens: float, flops_per_s: float, bytes_per_s: float) -> tuple[float, float]:
        """Return the seconds of the arithmetic and of the memory, at these rates."""
        return self.flops(tokens) / flops_per_s, self.moved_bytes(tokens) / bytes_per_s

    def crossover(self, flops_per_s: float, bytes_per_s: float) -> float | None:
        """Return the tokens at which arithmetic takes as long as memory; None: at no number of tokens."""
        a_token = 2 * self.params / flops_per_s - self.element_bytes * self.elements_per_token / bytes_per_s
        return self.element_bytes * self.params / bytes_per_s / a_token if a_token > 0 else None


def block_of(shape: Shape, element_bytes: int) -> Block:
    """Return the linears of one dense decoder block: Q, K and V in one, and gate and up in one."""
    heads = shape.heads * shape.head_dim
    up = 2 if shape.kind == "swiglu" else 1
    weights = (
        (heads + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        (shape.hidden, heads),
        (up * shape.feed_forward, shape.hidden),
        (shape.hidden, shape.feed_forward),
    )
    return Block(weights, element_bytes)


def products(block: Block, tokens: int, device: torch.device) -> Callable[[Lap], object]:
    """Return a run of the block's products with random data, one after the other."""
    options: dict[str, Any] = {"device": device, "dtype": DTYPES[device.type]}
    pairs = [
        (torch.randn(tokens, inputs, **options), torch.randn(outputs, inputs, **options))
        for outputs, inputs in block.weights
    ]
    return lambda lap: [torch.nn.functional.linear(x_mk, weight_nk) for x_mk, weight_nk in pairs]


def measured_crossover(seconds: dict[int, float]) -> float:
    """Return the tokens at which the time of the fewest, all memory, meets the line of the most, all compute.

    Args:
        seconds: of the products by number of tokens.
    """
    fewest, most = min(seconds), max(seconds)
    return seconds[fewest] / (seconds[most] / most)


def sheet_rates(gpu: Gpu | None) -> tuple[float, float] | None:
    """Return the data sheet's dense bf16 FLOP/s and bytes/s; None: there is none."""
    if gpu is None or "bf16" not in gpu.peak_flops_per_s or gpu.memory_bytes_per_s is None:
        return None
    return gpu.peak_flops_per_s["bf16"], gpu.memory_bytes_per_s
