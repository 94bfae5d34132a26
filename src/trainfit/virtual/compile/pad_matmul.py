"""Choice of matrix products that Inductor pads for tensor cores (``torch/_inductor/fx_passes/pad_mm.py``).

On a GPU a benchmark decides: pad if the product takes over 1.1 times as long as the padded one with its
copies. Here times follow from shares of a GPU's peaks (``[padding]`` of catalog/constants.toml), measured
with that benchmark on an H200 (torch 2.11). Of 152 recorded decisions 151 agree
(tests/data/padding_on_h200.jsonl).
"""

from typing import Any

import torch
from torch import fx

from trainfit.catalog.constants import constants

MARGIN = 1.1
"""Least speedup of the padded product (``is_padded_faster``)."""
VIEWS = (torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.view.default)


Size = tuple[int, ...]


def should_pad(
    copies: set[Size], match: Any, mat1: torch.Tensor, mat2: torch.Tensor, op: Any, input: Any = None
) -> bool:
    """Replace ``pad_mm._should_pad``, which is called for unaligned products only.

    Args:
        copies: receives the padded sizes of operands with other users whose padding is a close decision: a
            run that does not pad them does without the copy.
    """
    from torch._inductor.fx_passes.pad_mm import should_exclude_padding_time

    free1, free2 = (should_exclude_padding_time(match, name) for name in ("mat1", "mat2"))
    found = gain(mat1, mat2, free1=free1, free2=free2)
    if MARGIN < found <= constants().padding.near * MARGIN:
        for name, operand, is_free in (("mat1", mat1, free1), ("mat2", mat2, free2)):
            padded = tuple(-(-size // 8) * 8 for size in operand.shape)
            if not is_free and padded != tuple(operand.shape) and _has_other_users(match.kwargs[name]):
                copies.add(padded)
    return found > MARGIN


def _has_other_users(operand: fx.Node) -> bool:
    """Return whether operations other than a product read the operand or a tensor that it is a view of."""
    while len(operand.users) == 1 and operand.target in VIEWS:
        (operand,) = operand.all_input_nodes
    return len(operand.users) > 1


def is_padding_faster(mat1: torch.Tensor, mat2: torch.Tensor, *, free1: bool, free2: bool) -> bool:
    """Return whether padding ``mat1 @ mat2`` is faster by ``MARGIN``."""
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
    known = constants().padding
    if m * k * n <= known.machine_balance / 2 * (m * k + k * n + m * n):
        return 0.0
    unaligned = _share(_row(mat1), _row(mat2), n)
    if unaligned == known.aligned:
        return 0.0
    flops = 2 * m * k * n
    copies = 0.0
    if not free1 and (m % 8 or k % 8):
        copies += _copy(mat1, m * k)
    if not free2 and (k % 8 or n % 8):
        copies += _copy(mat2, k * n)
    return flops / unaligned / (flops / known.aligned + copies * known.machine_balance)


def _share(row1: int, row2: int, output_row: int) -> float:
    rows, known = (row1, row2, output_row), constants().padding
    if all(row % 8 == 0 for row in rows):
        return known.aligned
    if all(row % 2 == 0 for row in rows):
        return known.even
    return known.odd if row1 % 2 or row2 % 2 else known.odd_output


def _row(t: torch.Tensor) -> int:
    """Return the stride between rows (or contiguous columns), else that of a contiguous copy."""
    return max(t.stride()[-2:]) if 1 in t.stride()[-2:] else t.shape[-1]


def _copy(t: torch.Tensor, numel: int) -> float:
    """Return the bytes read and written to pad an operand, over the share of the bandwidth."""
    known = constants().padding
    return 2 * numel * t.element_size() / (known.copy_share if t.stride(-1) == 1 else known.transposing_copy)
