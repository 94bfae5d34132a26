"""Compiled code's choices that a GPU makes by benchmark: which products are padded, and what tuning
allocates."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compiled_blocks import CPU, TOKENS, E, kept, step_of
from trainfit.ledger.ledger import ALLOCATE, FREE, Event, Ledger, Segment, Storage
from trainfit.virtual.compile.pad_matmul import MARGIN, is_padding_faster
from trainfit.virtual.compile.tuning import Kernel, Tuning, headroom, read

BENCHMARKED = Path(__file__).parents[1] / "data" / "padding_on_h200.jsonl"
"""What ``pad_mm``'s benchmark found on an H200 with torch 2.11: milliseconds of a product as it is, and
padded with the copies that it needs. "10": the first operand's padding costs nothing."""
A_TIE = 0.02
L2 = 1 << 20
POINTWISE = """
import triton

@triton_heuristics.pointwise(
    size_hints={'x': %d},
    filename=__file__,
    triton_meta={'signature': {}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132,
    cc=90,
                 major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32)},
    inductor_meta={'autotune_hints': set(), 'mutated_arg_names': ['in_out_ptr0'], 'optimize_mem': %s},
    min_elem_per_thread=0
)
@triton.jit
def kernel(in_ptr0, in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
"""


def test_products_are_padded_as_on_an_h200() -> None:
    rows = [json.loads(line) for line in BENCHMARKED.read_text().splitlines()]
    decisions = [(row, free) for row in rows for free in row["padded_ms"]]
    assert [(row, free) for row, free in decisions if not agrees(row, free)] == []


def agrees(row: dict[str, Any], free: str) -> bool:
    gain = row["ms"] / row["padded_ms"][free]
    if abs(gain / MARGIN - 1) < A_TIE:
        return True  # Another benchmark may decide otherwise.
    m, k, n, dtype = row["m"], row["k"], row["n"], getattr(torch, row["dtype"])
    mat1 = matrix(k, m, dtype).t() if row["kind"] == "dw" else matrix(m, k, dtype)
    mat2 = matrix(n, k, dtype).t() if row["kind"] == "fwd" else matrix(k, n, dtype)
    return is_padding_faster(mat1, mat2, free1=free[0] == "1", free2=free[1] == "1") == (gain > MARGIN)


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


def test_layer_norm_keeps_its_statistics_in_fp32() -> None:
    """Mean and 1/deviation, 4 bytes a token each; on a CPU they are of the input's dtype."""
    dtype = torch.bfloat16

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(E, device=CPU, dtype=dtype)
            self.linear = nn.Linear(E, E, False, CPU, dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x.to(dtype)))

    ledger = step_of(Normed, (TOKENS, E), compiled=True)
    sizes = sorted(kept(ledger).values())
    assert sizes[:2] == [TOKENS * 4, TOKENS * 4]


def test_one_product_in_a_batch_is_a_product() -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x, x.transpose(1, 2))

    ledger = step_of(Product, (1, 64, 32), compiled=True, trains=False)
    names = {op.name for op in ledger.ops if op.flops}
    assert names == {"aten.mm.default"} or names == {"aten.mm.out"}, names


def test_kernels_are_read_as_torch_describes_them() -> None:
    # ``pointwise``: one dimension, autotune_pointwise.
    assert read(POINTWISE % (1 << 20, True)) == Kernel(num_configs=2, changed=(1,), spares_memory=True)


def test_tuning_allocates_a_cache_and_clones_once() -> None:
    tuning, source = Tuning(L2), POINTWISE % (1 << 20, False)
    x = torch.empty(3000)
    y = torch.empty(4000)[1000:]
    expected = [(4 * 4000,), (L2, 4 * 4000)]
    assert tuning.scratch(source, (x, y, 3000), Ledger()) == expected
    assert tuning.scratch(source, (x, y, 3000), Ledger()) == []
    assert tuning.scratch(POINTWISE % (1 << 21, False), (x, y, 3000), Ledger()) == expected


@pytest.mark.parametrize(("room", "clones"), [(4096, ()), (16384, (16000,))])
def test_clones_that_would_raise_the_peak_go_to_the_host(room: int, clones: tuple[int, ...]) -> None:
    """``copy_args_to_cpu_if_needed``: 16000 bytes fit below the highest point if that is as far above."""
    ledger = ledger_with(room)
    assert headroom(ledger) == room
    found = Tuning(L2).scratch(POINTWISE % (1 << 20, True), (None, torch.empty(4000), 4000), ledger)
    assert found == [clones, (L2, *clones)]


def ledger_with(room: int) -> Ledger:
    """In the running phase ``room`` bytes, in sizes that no block has, were allocated and freed."""
    ledger = Ledger()
    ledger.segments += [Segment("first", "forward"), Segment("first", "backward")]
    ledger.storages += [
        Storage(1 << 30, "temporary", -1, -1, "before"),
        Storage(room - 1, "temporary", -1, -1, "here"),
    ]
    ledger.events += [Event(ALLOCATE, 0, -1, 0), Event(ALLOCATE, 1, -1, 1), Event(FREE, 1, -1, 1)]
    return ledger


def test_only_the_first_step_tunes() -> None:
    """One kernel in a layer, one buffer as large as an H200's L2 cache, and none when it runs again."""

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sin().exp()

    ledger = step_of(Twice, (TOKENS, E), compiled=True, trains=False)
    assert [s.num_bytes for s in ledger.storages if "/tuning/" in s.path] == [60 << 20]
