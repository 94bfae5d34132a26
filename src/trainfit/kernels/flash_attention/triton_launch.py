"""Launchers and tile sizes of FlashAttention's Triton kernels; shapes as in op.py."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

ROWS = 128  # Rows per program before the backward; padded lengths are multiples of it and of every BLOCK_M


@dataclass(frozen=True)
class Tiles:
    """Query rows and keys per tile, warps, pipeline stages, and heads that run at once."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    heads_at_once: int = 8
    max_registers: int | None = None  # Registers per thread; fewer let more programs share a multiprocessor

    def arguments(self, q: Tensor) -> dict[str, Any]:
        """Return the launch arguments of a kernel for queries ``q``."""
        d = q.shape[-1]
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_D": block_d(d),
            "EVEN_D": block_d(d) == d, "HEADS_AT_ONCE": self.heads_at_once,
            "PRECISION": _precision(q.dtype),
            "num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.max_registers,
        }  # fmt: skip


def _precision(dtype: torch.dtype) -> str:
    """Return how tensor cores multiply fp32: three products of TF32, as in PyTorch's efficient kernel.

    One product rounds to 10 bits of mantissa; the user allows it as for any matrix product. AMD's GPUs
    multiply fp32 as such.
    """
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "tf32x3" if torch.version.hip is None else "ieee"
    return "tf32"


def block_d(d: int) -> int:
    """Return the columns of a tile: the next power of two."""
    return max(16, 1 << (d - 1).bit_length())


@dataclass(frozen=True)
class Passes:
    """Tiles of a backward in three kernels: dV, dK and dQ."""

    values: Tiles
    keys: Tiles
    queries: Tiles


def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, how: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``tiled_forward`` in one kernel, with the tiles ``how`` or those of ``tiles``."""
    b, h, n, d = q.shape
    out, lse = torch.empty_like(q), torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    how = how or tiles("forward", q)
    if out.numel():
        q, scale, _ = _with_positive(scale, q)
        _kernels().attention_forward_kernel[(-(-n // how.block_m) * b * h,)](
            q, k, v, out, lse, scale * math.log2(math.e), n, k.shape[2], d, h, b * h, h // k.shape[1],
            *q.stride(), *k.stride(), *v.stride(), *out.stride(), **how.arguments(q),
            CAUSAL=is_causal, ALL_KEYS=k.shape[2] > 0 and k.shape[2] % how.block_n == 0,
        )  # fmt: skip
    return out, lse


def triton_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float, how: tuple[Tiles, Tiles] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``tiled_backward`` in three kernels without atomics: delta, dK with dV, dQ; deterministic.

    Args:
        how: Tiles of the last two; None: those of ``tiles``.
    """
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    keys, queries = how or (tiles("keys", q), tiles("queries", q))
    q, scale, sign = _with_positive(scale, q)
    inputs = (q, k, v, gradient, *triton_prepared(gradient, out, lse))
    dk, dv = triton_key_gradients(inputs, is_causal, scale, keys)
    dq = triton_query_gradient(inputs, is_causal, scale, queries)
    return (dq if sign == 1 else dq * sign), dk, dv


def _with_positive(scale: float, q: Tensor) -> tuple[Tensor, float, int]:
    """Return q and a positive scale with the same product, as the kernels need, and the factor of dQ."""
    sign = (scale > 0) - (scale < 0)
    return (q, scale, 1) if sign == 1 else (q * sign, abs(scale) or 1.0, sign)


def triton_prepared(gradient: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``lse`` in base 2 and delta (row sums of dO * O), fp32 [b, h, n padded to whole tiles]."""
    b, h, n, d = out.shape
    blocks = -(-n // ROWS)
    lse_2, delta = torch.empty(2, b, h, blocks * ROWS, dtype=torch.float32, device=out.device)
    _kernels().attention_prepare_kernel[(blocks * b * h,)](
        out, gradient, lse, lse_2, delta, n, blocks * ROWS, d, h, *out.stride(), *gradient.stride(),
        BLOCK_M=ROWS, BLOCK_D=block_d(d), EVEN_D=block_d(d) == d, num_warps=4 if d <= 256 else 16,
    )  # fmt: skip
    return lse_2, delta


def triton_key_gradients(
    inputs: tuple[Tensor, ...], is_causal: bool, scale: float, how: Tiles
) -> tuple[Tensor, Tensor]:
    """Return dK and dV from q, k, v, dO, ``lse`` in base 2 and delta."""
    q, k, v, gradient, lse_2, _ = inputs
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    (b, h, n, d), (kv_heads, m) = q.shape, k.shape[1:3]
    _kernels().key_gradient_kernel[(-(-m // how.block_n) * b * kv_heads,)](
        *inputs, dk, dv, scale, scale * math.log2(math.e), n, m, lse_2.shape[-1], d, h, kv_heads,
        b * kv_heads, *q.stride(), *k.stride(), *v.stride(), *gradient.stride(), *dk.stride(), *dv.stride(),
        **how.arguments(q), CAUSAL=is_causal, ALL_ROWS=n % how.block_m == 0,
    )  # fmt: skip
    return dk, dv


def triton_query_gradient(inputs: tuple[Tensor, ...], is_causal: bool, scale: float, how: Tiles) -> Tensor:
    """Return dQ from q, k, v, dO, ``lse`` in base 2 and delta."""
    q, k, v, gradient, lse_2, _ = inputs
    dq = torch.empty_like(q)
    (b, h, n, d), m = q.shape, k.shape[2]
    _kernels().query_gradient_kernel[(-(-n // how.block_m) * b * h,)](
        *inputs, dq, scale, scale * math.log2(math.e), n, m, lse_2.shape[-1], d, h, b * h, h // k.shape[1],
        *q.stride(), *k.stride(), *v.stride(), *gradient.stride(), *dq.stride(),
        **how.arguments(q), CAUSAL=is_causal,
    )  # fmt: skip
    return dq


def backward_in_passes(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float, how: Passes,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v without atomics; scratch: two fp32 values per row."""
    inputs = (q, k, v, gradient, *triton_prepared(gradient, out, lse))
    dk, dv, dq = torch.empty_like(k), torch.empty_like(v), torch.empty_like(q)
    _launch_pass("key_gradient_tma_kernel", dv, inputs, is_causal, scale, how.values, {"OF_VALUES": True})
    _launch_pass("key_gradient_tma_kernel", dk, inputs, is_causal, scale, how.keys, {"OF_VALUES": False})
    _launch_pass("query_gradient_tma_kernel", dq, inputs, is_causal, scale, how.queries, {})
    return dq, dk, dv


def _launch_pass(
    kernel: str, made: Tensor, inputs: tuple[Tensor, ...], is_causal: bool, scale: float, how: Tiles,
    more: dict[str, bool],
) -> None:  # fmt: skip
    """Launch one kernel of ``backward_in_passes``, which writes ``made``."""
    from trainfit.kernels.flash_attention import triton_tma as kernels
    from trainfit.kernels.flash_attention.hopper import launch_cache

    q, k, v, gradient, lse_2, delta = inputs
    (b, h, n, d), (kv_heads, m), columns = q.shape, k.shape[1:3], block_d(q.shape[-1])
    of_rows, of_keys = (1, 1, how.block_m, columns), (1, 1, how.block_n, columns)
    if "OF_VALUES" in more:
        programs, heads = -(-m // how.block_n) * b * kv_heads, (h, kv_heads, b * kv_heads)
    else:
        programs, heads = -(-n // how.block_m) * b * h, (h, b * h, h // kv_heads)
    launch_cache.launch(
        getattr(kernels, kernel), (programs,),
        ((q, of_rows), (k, of_keys), (v, of_keys), (gradient, of_rows)),
        (
            made, lse_2, delta, scale, scale * math.log2(math.e), n, m, lse_2.shape[-1], d, *heads,
            *made.stride()[:3],
        ),
        {
            "BLOCK_M": how.block_m, "BLOCK_N": how.block_n, "BLOCK_D": columns, "CAUSAL": is_causal,
            "HEADS_AT_ONCE": how.heads_at_once, **more,
        },
        in_gluon=False, options={"num_warps": how.warps, "num_stages": how.stages},
    )  # fmt: skip


def _kernels() -> Any:
    from trainfit.kernels.flash_attention import triton

    return triton


def tiles(kernel: str, x: Tensor) -> Tiles:
    """Return the tiles of a kernel (forward, keys or queries) for queries like ``x``.

    A program has 227 KB of shared memory on an H200 and 99 KB on most other GPUs.
    """
    d, narrow = x.shape[-1], _shared_bytes(x.device) < HOPPER_SHARED_BYTES
    if x.dtype != torch.float32 and d <= 128:
        return (NARROW_TILES if narrow else TILES)[kernel][d > 64]
    if x.dtype != torch.float32 and not narrow:
        return WIDE_TILES[kernel][d > 256]
    if d <= 128 and not narrow and _is_hopper(x.device):
        return FP32_TILES[kernel][d > 64]
    row_bytes = block_d(d) * x.element_size()
    if row_bytes > 512:
        return Tiles(16, 16, 4, 1)  # Larger ones spill thousands of registers
    # On Blackwell Triton 3.6 compiles three TF32 products of 128 rows and columns to an empty kernel.
    return Tiles(32, 32, 4, 2) if row_bytes > 256 or not narrow else Tiles(64, 32, 4, 2)


HOPPER_SHARED_BYTES = 227 * 1024  # Shared memory per program (CUDA programming guide, compute capability 9.0)
TILES = {
    "forward": (Tiles(128, 64, 4, 4), Tiles(128, 128, 8, 3, 4)),
    "keys": (Tiles(32, 128, 4, 3), Tiles(64, 128, 8, 3)),
    "queries": (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3)),
}
"""Tiles by kernel on an H200, in 16 bits: for head sizes up to 64 and up to 128."""
WIDE_TILES = {
    "forward": (Tiles(128, 64, 8, 2), Tiles(64, 32, 8, 2)),
    "keys": (Tiles(64, 32, 4, 2), Tiles(16, 16, 4, 1)),
    "queries": (Tiles(64, 32, 4, 2), Tiles(16, 16, 4, 1)),
}
"""The same for head sizes up to 256 and up to 512, on an H100."""
FP32_TILES = {
    "forward": (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
    "keys": (Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 2)),
    "queries": (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2)),
}
"""Tiles by kernel in fp32, fastest of three or four on an H100, 2,048 tokens: up to 64 and up to 128."""
NARROW_TILES = {
    "forward": (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2)),
    "keys": (Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2)),
    "queries": (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
}
"""The same with 99 KB (RTX 4090, compute capability 8.9); they use at most 72 KB, compiled for 8.0."""


@cache
def _is_hopper(device: torch.device) -> bool:
    """Return whether a GPU has compute capability 9; without CUDA, as an H200."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


@cache
def _shared_bytes(device: torch.device) -> int:
    """Return the shared memory per program; without CUDA, an H200's."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
