"""dQ's sums, scaled and cast, in the order in which the Gluon backward leaves them; in Triton's
interpreter."""

import os

import pytest
import torch
from torch import Tensor

from trainfit.kernels.flash_attention.hopper import launch as hopper

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the whole backward is checked"
)


def as_threads_hold_it(half: Tensor) -> Tensor:
    """[64, 64] -> [4096]. Register r of a thread: row 16 warp + lane / 4 + 8 (r / 2 % 2), column 8 (r / 4) +
    2 (lane % 4) + r % 2 (PTX manual, wgmma's accumulator D); four registers of all 128 threads follow one
    another."""  # fmt: skip
    r, thread = torch.arange(32).view(8, 1, 4), torch.arange(128).view(1, 128, 1)
    lane = thread % 32
    rows = 16 * (thread // 32) + lane // 4 + 8 * (r // 2 % 2)
    return half[rows, 8 * (r // 4) + 2 * (lane % 4) + r % 2].flatten()


@pytest.mark.parametrize(("n", "d"), [(200, 128), (300, 64), (130, 96)])
def test_sums_are_scaled_and_put_in_order(n: int, d: int) -> None:
    columns, b, h = hopper.block_d(d), 2, 3
    rows = 8192 // columns  # of a tile of dQ, which two groups share
    sums = torch.randn(b, h, -(-n // hopper.ROWS) * hopper.ROWS, columns)
    halves = [half for head in sums.flatten(0, 1) for tile in head.split(rows) for half in tile.split(64, 1)]
    halves = [part for half in halves for part in half.split(64)]
    like = torch.empty(b, n, h, d, dtype=torch.float16).transpose(1, 2)
    mixed = torch.cat([as_threads_hold_it(half) for half in halves]).view_as(sums)
    found = hopper.scaled(mixed, like, 0.5)
    assert found.stride() == like.stride()
    assert torch.equal(found, (sums[:, :, :n, :d] * 0.5).half())
