"""FlashAttention on Hopper: who launches the kernels in Gluon, whose tiles come and go by TMA.

Shapes as in flash_attention.py. ``fits`` says which tensors the tensor memory accelerator can carry; all others keep to the
kernels in Triton. ``Groups`` and ``GroupsBackward`` are configurations; the tuning command tries many
(flash_attention_tune.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.kernels.flash_attention_launch import ROWS, block_d


@dataclass(frozen=True)
class Groups:
    """The Gluon forward: groups of 64 query rows (2 or 3), keys of a tile, stages, heads at once, whether groups alternate.

    ``persistent``: a program each multiprocessor, with many tiles one after the other, else a program each tile. ``late``:
    earlier results shrink under the next scores' product instead of before it. ``short``: maxima in four chains, and a row's
    four threads add up their sums only at the end. ``lazy``: earlier results shrink only where a maximum grew by a factor over
    2^8. ``arrive``: groups signal at named barriers without waiting for one another's warps. ``ahead`` (persistent): the next
    tile's first scores beside a tile's last values.
    """

    groups: int
    block_n: int
    stages: int
    heads_at_once: int = 8
    take_turns: bool = True
    persistent: bool = False
    late: bool = False
    short: bool = False
    lazy: bool = False
    arrive: bool = False
    ahead: bool = False


@dataclass(frozen=True)
class GroupsBackward:
    """The Gluon backward: stages and heads at once; its tiles follow from the head size (over 32). Adds dQ up in fp32.

    ``late``: dQ one step late (flash_attention_backward_late_gluon.py, two stages); there ``low_p`` takes dS from P in 16
    bits, ``direct`` adds dQ from registers instead of by TMA, ``flat`` adds it in the order in which threads hold it, ``turns``
    lets the groups issue their products one after the other, ``ahead`` computes a step's scores and probabilities before the
    last step's dQ is added, so that a group need not wait for the other's dS so soon. ``fused``: one kernel scales and casts dQ (always with ``flat``).
    """

    stages: int
    heads_at_once: int = 8
    late: bool = False
    low_p: bool = False
    direct: bool = False
    turns: bool = False
    flat: bool = False
    ahead: bool = False
    fused: bool = True


def fits(*tensors: Tensor, scale: float) -> bool:
    """Whether TMA carries these [b, heads, rows, d] tensors and the kernels hold for ``scale``: 16 bits, d up to 128,
    contiguous heads, everything else on multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled)."""
    return scale > 0 and all(
        x.dtype in (torch.float16, torch.bfloat16) and x.shape[-1] <= 128 and x.stride(-1) == 1 and x.numel() > 0
        and all(stride % 8 == 0 for stride in x.stride()[:-1]) and _first_byte(x) % 16 == 0
        for x in tensors
    )  # fmt: skip


def _first_byte(x: Tensor) -> int:
    """Its address. A fake tensor has none: CUDA's allocator aligns storages to more than is asked here."""
    return int(x.storage_offset()) * x.element_size() if isinstance(x, FakeTensor) else x.data_ptr()


def _descriptor(x: Tensor, rows: int, d: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, block_d(d)])


def _gluon(x: Tensor, rows: int, columns: int) -> Any:
    """Gluon's descriptor of x, [b, heads, rows, d], or [heads, rows] one head a tile (``columns`` 0), or two-dimensional."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if x.dim() == 2:
        layout: Any = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        block = [rows, columns] if columns else [1, rows]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
    types = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, types[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def gluon_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, how: Groups
) -> tuple[Tensor, Tensor]:
    """Output (q's dtype and layout) and log-sum-exp ([b, h, n], fp32).

    Some warps only load, and groups of warps only compute.
    """
    from triton import cdiv

    from trainfit.kernels import flash_attention_gluon

    kernels: Any = flash_attention_gluon  # a constexpr argument takes a plain value

    b, h, n, d = q.shape
    out, lse = torch.empty_like(q), torch.empty(b, h, n, dtype=torch.float32, device=q.device)

    rows = kernels.GROUP_ROWS.value
    programs, table = cdiv(n, how.groups * rows) * b * h, lse
    if how.persistent:
        programs = min(programs, _multiprocessors(q.device))
        table = _table(n, k.shape[2], b * h, is_causal, how, programs, q.device)
    kernels.forward_gluon_kernel[(programs,)](
        _gluon(q, rows, block_d(d)), _gluon(k, how.block_n, block_d(d)), _gluon(v, how.block_n, block_d(d)),
        _gluon(out, rows, block_d(d)), lse, table,
        scale * math.log2(math.e), n, k.shape[2], h, b * h, h // k.shape[1], table.shape[-1],
        GROUPS=how.groups, BLOCK_N=how.block_n, BLOCK_D=block_d(d), STAGES=how.stages, CAUSAL=is_causal,
        HEADS_AT_ONCE=how.heads_at_once, PERSISTENT=how.persistent, TAKE_TURNS=how.take_turns, LATE=how.late,
        SHORT=how.short, LAZY=how.lazy, ARRIVE=how.arrive, AHEAD=how.ahead, num_warps=4,
    )  # fmt: skip
    return out, lse


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=32)
def _table(
    n: int, m: int, heads: int, is_causal: bool, how: Groups, programs: int, device: torch.device
) -> Tensor:
    """Each program's tiles, [programs, columns], int32: their count, then their numbers.

    In the order of ``_place`` (heads in groups, longest rows first), each tile goes to the program that is free first.
    """
    from trainfit.kernels import flash_attention_gluon

    rows = how.groups * flash_attention_gluon.GROUP_ROWS.value
    blocks = -(-n // rows)
    free, lists = [(0, program) for program in range(programs)], [[] for _ in range(programs)]
    for number in range(blocks * heads):
        first_head = number // (how.heads_at_once * blocks) * how.heads_at_once
        block = blocks - 1 - (number - first_head * blocks) // min(how.heads_at_once, heads - first_head)
        keys = max(0, min(m, (block + 1) * rows + m - n)) if is_causal else m
        until, program = heappop(free)
        lists[program].append(number)
        heappush(free, (until + max(1, -(-keys // how.block_n)) + 1, program))  # and 1 to begin and end it
    columns = -(-(1 + max(map(len, lists))) // 16) * 16
    padded = [[len(each), *each, *[0] * (columns - 1 - len(each))] for each in lists]
    return torch.tensor(padded, dtype=torch.int32, device=device)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float,
    how: GroupsBackward,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, in their dtypes and layouts.

    Beside them: two fp32 numbers a row and an fp32 dQ.
    """
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dq = torch.empty_like(q, dtype=torch.float32)
    if how.direct or how.flat:
        b, h, n, d = q.shape
        dq = torch.empty(b, h, -(-n // ROWS) * ROWS, block_d(d), dtype=torch.float32, device=q.device)
    lse_2, delta = _prepared(gradient, out, lse, dq)
    inputs = (q, k, v, gradient, lse_2, delta)
    _gluon_gradients(inputs, (dq, dk, dv), is_causal, scale, how)
    if how.flat:
        return _scaled_by_thread(dq, q, scale), dk, dv
    if how.fused:
        return _scaled(dq[:, :, : q.shape[2], : q.shape[3]], q, scale), dk, dv
    return dq.mul_(scale).to(q.dtype), dk, dv


def _prepared(gradient: Tensor, out: Tensor, lse: Tensor, dq: Tensor) -> tuple[Tensor, Tensor]:
    """``lse`` in base 2 and delta, [b, h, n rounded up to whole tiles]; zeros in dQ."""
    from trainfit.kernels import flash_attention_prepare_triton

    kernels: Any = flash_attention_prepare_triton  # a constexpr argument takes a plain value

    b, h, n, d = out.shape
    blocks = -(-n // ROWS)
    lse_2, delta = torch.empty(2, b, h, blocks * ROWS, dtype=torch.float32, device=out.device)
    kernels.prepare_tma_kernel[(blocks, b * h)](
        _descriptor(out, ROWS, d), _descriptor(gradient, ROWS, d), _descriptor(dq, ROWS, d), lse, lse_2, delta,
        n, blocks * ROWS, h, BLOCK_M=ROWS, BLOCK_D=block_d(d),
    )  # fmt: skip
    return lse_2, delta


def _scaled(sums: Tensor, like: Tensor, scale: float) -> Tensor:
    """``sums`` ([b, h, n, d], fp32) times ``scale`` in the dtype of ``like``, whose layout they have."""
    from triton import cdiv

    from trainfit.kernels import flash_attention_scale_triton

    kernels: Any = flash_attention_scale_triton  # a constexpr argument takes a plain value

    if not sums.is_contiguous():
        return sums.mul_(scale).to(like.dtype)
    made = torch.empty_like(sums, dtype=like.dtype)
    kernels.scale_kernel[(cdiv(sums.numel(), 4096),)](
        sums, made, scale, sums.numel(), BLOCK=4096, num_warps=8
    )
    return made


def _scaled_by_thread(sums: Tensor, like: Tensor, scale: float) -> Tensor:
    """As ``_scaled`` for [b, h, padded rows, columns] in the threads' order."""
    from trainfit.kernels import flash_attention_scale_triton

    kernels: Any = flash_attention_scale_triton  # a constexpr argument takes a plain value

    made, (b, h, n, d) = torch.empty_like(like), like.shape
    rows, columns = sums.shape[2:]
    kernels.scale_by_thread_kernel[(rows * columns // 4096, b * h)](
        sums,
        made,
        scale,
        *made.stride()[:3],
        h,
        n,
        rows,
        d,
        BLOCK_M=8192 // columns,
        BLOCK_D=columns,
        num_warps=4,
    )
    return made


def _gluon_gradients(
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    is_causal: bool,
    scale: float,
    how: GroupsBackward,
) -> None:
    """Fills dq (its unscaled sums), dk and dv."""
    from triton import cdiv

    from trainfit.kernels import flash_attention_backward_gluon, flash_attention_backward_late_gluon

    kernels: Any = flash_attention_backward_gluon  # a constexpr argument takes a plain value

    (q, k, v, gradient, lse_2, delta), (dq, dk, dv) = inputs, results
    (b, h, n, d), (kv_heads, m) = q.shape, k.shape[1:3]
    columns, keys, half = block_d(d), kernels.GROUP_KEYS.value, kernels.HALF.value
    rows = (
        128 * half // columns
    )  # a tile's part of dQ is two halves: of columns, or with a small head of rows
    sums = _gluon(dq.view(-1, 128), 32, 128) if how.flat else _gluon(dq, half, half)
    kernel, extra, options = kernels.backward_gluon_kernel, (), {}
    if how.late:
        late: Any = flash_attention_backward_late_gluon  # a constexpr argument takes a plain value
        kernel, extra = late.backward_late_kernel, (dq, dq.shape[2])
        options = {
            "LOW_P": how.low_p,
            "DIRECT": how.direct,
            "TURNS": how.turns,
            "FLAT": how.flat,
            "AHEAD": how.ahead,
        }
    kernel[(cdiv(m, kernels.GROUPS.value * keys) * b * kv_heads,)](
        _gluon(q, rows, columns), _gluon(k, keys, columns), _gluon(v, keys, columns), _gluon(gradient, rows, columns),
        _gluon(lse_2.flatten(0, 1), rows, 0), _gluon(delta.flatten(0, 1), rows, 0), sums,
        _gluon(dk, keys, columns), _gluon(dv, keys, columns), *extra, scale, scale * math.log2(math.e), n, m, h, kv_heads,
        b * kv_heads, BLOCK_M=rows, BLOCK_D=columns, STAGES=how.stages, CAUSAL=is_causal,
        HEADS_AT_ONCE=how.heads_at_once, **options, num_warps=4,
    )  # fmt: skip
