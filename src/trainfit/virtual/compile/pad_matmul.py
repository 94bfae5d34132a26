"""Choice of matrix products that Inductor pads for tensor cores (``torch/_inductor/fx_passes/pad_mm.py``).

On a GPU a benchmark decides: pad if the product takes over 1.1 times as long as the padded one with its
copies. Here times follow from shares of a GPU's peaks, measured with that benchmark on an H200 (torch 2.11).
Of 152 recorded decisions 151 agree (tests/data/padding_on_h200.jsonl).
"""

from typing import Any

import torch
from torch import fx

MACHINE_BALANCE = 200
"""16-bit FLOPs per byte read: 156 on A100, 206 on H200, 295 on H100 by their data sheets."""
MARGIN = 1.1
"""Least speedup of the padded product (``is_padded_faster``)."""
NEAR = 1.15
"""Gains up to so many times the margin are near it: GPT-2's gradient of the head's weights, whose recorded
gains are 1.02 (32 x 1,024 tokens) and 1.13 times the margin (8 x 1,024), was padded in one of two measured
runs of each."""
ALIGNED, EVEN, ODD, ODD_OUTPUT = 0.72, 0.25, 0.14, 0.10
"""Share of the peak FLOP/s by alignment of rows: all to 16 bytes; some only to 4 or 8; some to 2; the output
alone to 2. Measured on an H200: 640 to 820 TFLOP/s of 989; 200 to 272; 123 to 150; 85 to 106."""
VIEWS = (torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.view.default)
COPY, TRANSPOSING_COPY = 0.29, 0.115
"""Share of the peak bytes/s of padding an operand. Measured on an H200: 1.4 and 0.55 TB/s of 4.8."""


Size = tuple[int, ...]


def should_pad(
    copies: set[Size], match: Any, mat1: torch.Tensor, mat2: torch.Tensor, op: Any, input: Any = None
) -> bool:
    """Replace ``pad_mm._should_pad``, which is called for unaligned products only.

    Args:
        copies: receives the padded sizes of operands that another run may not pad, so that their other users'
            buffer is the only one.
    """
    from torch._inductor.fx_passes.pad_mm import should_exclude_padding_time

    free1, free2 = (should_exclude_padding_time(match, name) for name in ("mat1", "mat2"))
    found = gain(mat1, mat2, free1=free1, free2=free2)
    if MARGIN < found <= NEAR * MARGIN:
        for name, operand, is_free in (("mat1", mat1, free1), ("mat2", mat2, free2)):
            padded = tuple(-(-size // 8) * 8 for size in operand.shape)
            if not is_free and padded != tuple(operand.shape) and _has_other_users(match.kwargs[name]):
                copies.add(padded)
    return found > MARGIN


def _has_other_users(operand: fx.Node) -> bool:
    """Return whether other operations than a product read what the operand is a view of."""
    while len(operand.users) == 1 and operand.target in VIEWS:
        (operand,) = operand.all_input_nodes
    return len(operand.users) > 1


def is_padding_faster(mat1: torch.Tensor, mat2: torch.Tensor, *, free1: bool, free2: bool) -> bool:
    """Return whether padding ``mat1 @ mat2`` is faster, as ``gain`` has it."""
    return gain(mat1, mat2, free1=free1, free2=free2) > MARGIN


def gain(mat1: torch.Tensor, mat2: torch.Tensor, *, free1: bool, free2: bool) -> float:
    """Return the time of ``mat1 @ mat2`` ([m, k] x [k, n], optionally batched) over that of the padded one.

    It is 0 where nothing is compared. ``free1``, ``free2``: the kernel that computes the operand can write it
    padded.
    """
    if mat1.dtype not in (torch.float16, torch.bfloat16):
        return 0.0  # In fp32 unaligned sizes cost almost nothing.
    (m, k), n = mat1.shape[-2:], mat2.shape[-1]
    # pad_mm.is_mm_compute_bound.
    if m * k * n <= MACHINE_BALANCE / 2 * (m * k + k * n + m * n):
        return 0.0
    unaligned = _share(_row(mat1), _row(mat2), n)
    if unaligned == ALIGNED:
        return 0.0
    flops = 2 * m * k * n
    copies = 0.0
    if not free1 and (m % 8 or k % 8):
        copies += _copy(mat1, m * k)
    if not free2 and (k % 8 or n % 8):
        copies += _copy(mat2, k * n)
    return flops / unaligned / (flops / ALIGNED + copies * MACHINE_BALANCE)


def _share(row1: int, row2: int, output_row: int) -> float:
    rows = (row1, row2, output_row)
    if all(row % 8 == 0 for row in rows):
        return ALIGNED
    if all(row % 2 == 0 for row in rows):
        return EVEN
    return ODD if row1 % 2 or row2 % 2 else ODD_OUTPUT


def _row(t: torch.Tensor) -> int:
    """Return the stride between rows (or contiguous columns), else that of a contiguous copy."""
    return max(t.stride()[-2:]) if 1 in t.stride()[-2:] else t.shape[-1]


def _copy(t: torch.Tensor, numel: int) -> float:
    """Return the bytes read and written to pad an operand, over the share of the bandwidth."""
    return 2 * numel * t.element_size() / (COPY if t.stride(-1) == 1 else TRANSPOSING_COPY)
