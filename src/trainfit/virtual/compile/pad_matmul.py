"""Which matrix products Inductor pads to sizes that tensor cores take (``torch/_inductor/fx_passes/pad_mm.py``).

On a GPU a benchmark decides, in the first step: pad if the product as it is takes over 1.1 times as long as the padded
one with the copies it needs. Here the four times of that comparison are calculated, from shares of a GPU's peaks that
were measured with that benchmark on an H200: 63 products, bf16, fp16 and fp32, torch 2.11. The rule decides all of them
as the benchmark did (tests/test_virtual_padding.py).
"""

from typing import Any

import torch

MACHINE_BALANCE = 200
"""FLOP that a GPU does in 16 bits while it reads one byte: 156 on A100, 206 on H200, 295 on H100 by their data sheets."""
MARGIN = 1.1
"""``is_padded_faster``: the padded product has to be faster by this."""
ALIGNED, EVEN, ODD, ODD_OUTPUT = 0.72, 0.25, 0.14, 0.10
"""Share of the peak FLOP/s that a product reaches: all rows begin at multiples of 16 bytes; some only of 4 or 8; some of
2; only the output's, at 2. Measured: 640 to 820 TFLOP/s of 989; 200 to 272; 123 to 150; 85 to 106."""
COPY, TRANSPOSING_COPY = 0.29, 0.115
"""Share of the peak bytes/s that padding an operand reaches. Measured: 1.4 and 0.55 TB/s of 4.8."""


def should_pad(match: Any, mat1: torch.Tensor, mat2: torch.Tensor, op: Any, input: Any = None) -> bool:
    """Takes the place of ``pad_mm._should_pad``, which asks only about products with sizes that do not fit."""
    from torch._inductor.fx_passes.pad_mm import should_exclude_padding_time

    return is_padding_faster(
        mat1, mat2,
        free1=should_exclude_padding_time(match, "mat1"), free2=should_exclude_padding_time(match, "mat2"),
    )  # fmt: skip


def is_padding_faster(mat1: torch.Tensor, mat2: torch.Tensor, *, free1: bool, free2: bool) -> bool:
    """Whether ``mat1 @ mat2`` is padded: [m, k] x [k, n], or with a batch before. Only shapes, strides, dtype are read.

    Args:
        free1, free2: what computes that operand can write it padded.
    """
    if mat1.dtype not in (torch.float16, torch.bfloat16):
        return False  # In fp32 a size that does not fit costs next to nothing.
    (m, k), n = mat1.shape[-2:], mat2.shape[-1]
    # pad_mm's own bound, is_mm_compute_bound.
    if m * k * n <= MACHINE_BALANCE / 2 * (m * k + k * n + m * n):
        return False
    unaligned = _share(_row(mat1), _row(mat2), n)
    if unaligned == ALIGNED:
        return False
    flops = 2 * m * k * n
    copies = 0.0
    if not free1 and (m % 8 or k % 8):
        copies += _copy(mat1, m * k)
    if not free2 and (k % 8 or n % 8):
        copies += _copy(mat2, k * n)
    return flops / unaligned > MARGIN * (flops / ALIGNED + copies * MACHINE_BALANCE)


def _share(row1: int, row2: int, output_row: int) -> float:
    rows = (row1, row2, output_row)
    if all(row % 8 == 0 for row in rows):
        return ALIGNED
    if all(row % 2 == 0 for row in rows):
        return EVEN
    return ODD if row1 % 2 or row2 % 2 else ODD_OUTPUT


def _row(t: torch.Tensor) -> int:
    """Elements from one row to the next, or from one column to the next where columns are contiguous.

    Where neither are, the library is given a contiguous copy.
    """
    return max(t.stride()[-2:]) if 1 in t.stride()[-2:] else t.shape[-1]


def _copy(t: torch.Tensor, numel: int) -> float:
    """Bytes read and written to pad an operand, over the share of the bandwidth."""
    return 2 * numel * t.element_size() / (COPY if t.stride(-1) == 1 else TRANSPOSING_COPY)
