"""FlexAttention in user code under ``trainfit.trace``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import trainfit
from user_training import MIB

BATCH, HEADS, SEQ, HEAD = 2, 8, 1024, 64
WIDTH = HEADS * HEAD
PAIRS = BATCH * HEADS * SEQ * SEQ
BLOCKS = SEQ // 128
QUERY = 2 * BATCH * SEQ * WIDTH  # Bytes in bf16: 2 MiB
ROWS = 4 * BATCH * HEADS * SEQ  # Bytes of one fp32 value a query


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


class Attention(nn.Module):
    def __init__(self, function: Callable[..., Any], mask: Any):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.function, self.mask = function, mask

    def forward(self, x: Any) -> Any:
        q, k, v = (t.view(BATCH, SEQ, HEADS, HEAD).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.function(q, k, v, block_mask=self.mask)


def traced(function: Callable[..., Any], mask: Callable[[], Any], whole: bool = False) -> Any:
    def train() -> None:
        model: Any = Attention(function, mask()).cuda().bfloat16()
        model = torch.compile(model) if whole else model
        for _ in range(3):
            x = torch.randn(BATCH, SEQ, WIDTH, device="cuda", dtype=torch.bfloat16)
            model(x).square().mean().backward()
            model.zero_grad()

    return trainfit.trace(train)


def attention_flops(found: Any) -> float:
    """Return the FLOPs beside the projection's."""
    return found.hardware_flops - 2 * 2 * BATCH * SEQ * WIDTH * 3 * WIDTH


@pytest.mark.parametrize("compiled", [False, True])
def test_hidden_blocks_are_not_computed(compiled: bool) -> None:
    """Of a causal mask the diagonal blocks are computed whole; 14 d FLOPs a pair, as PyTorch's counter says
    of a fused backward."""
    function = torch.compile(flex_attention) if compiled else flex_attention
    found = traced(function, lambda: create_block_mask(causal, None, None, SEQ, SEQ, device="cuda"))
    visible = PAIRS * (BLOCKS + 1) / (2 * BLOCKS)
    assert attention_flops(found) == 14 * HEAD * visible
    assert not any("data" in note and "FlexAttention" in note for note in found.assumptions)


def test_a_mask_of_data_hides_nothing() -> None:
    def documents() -> Any:
        ids = torch.randint(0, 3, (BATCH, SEQ), device="cuda")
        same: Any = lambda b, h, q, k: ids[b, q] == ids[b, k]  # noqa: E731
        return create_block_mask(same, BATCH, None, SEQ, SEQ, device="cuda")

    found = traced(flex_attention, documents)
    assert attention_flops(found) == 14 * HEAD * PAIRS
    assert any("mask depends on the data" in note for note in found.assumptions)


def test_memory_is_that_of_the_compiled_kernels() -> None:
    """The forward leaves the input, q, k and v in one, the output and the log-sum-exp; no scores."""
    held: list[int] = []

    def train() -> None:
        model = Attention(flex_attention, None).cuda().bfloat16()
        x = torch.randn(BATCH, SEQ, WIDTH, device="cuda", dtype=torch.bfloat16)
        before = torch.cuda.memory_allocated()
        out = model(x)
        held.append(torch.cuda.memory_allocated() - before - 32 * MIB)  # cuBLAS's workspace
        out.sum().backward()

    trainfit.trace(train)
    assert held[0] == 3 * QUERY + QUERY + ROWS


@pytest.mark.slow
def test_a_compiled_module_calls_the_kernels() -> None:
    """The graph ends before them, and begins again behind them."""
    mask: Callable[[], Any] = lambda: create_block_mask(causal, None, None, SEQ, SEQ, device="cuda")  # noqa: E731
    whole, alone = traced(flex_attention, mask, whole=True), traced(flex_attention, mask)
    assert attention_flops(whole) == attention_flops(alone)
