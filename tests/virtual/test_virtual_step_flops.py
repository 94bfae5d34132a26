"""FLOPs of a whole traced step: closed forms to the last FLOP, and PyTorch's own counter."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.trace import trace
from trainfit.spec.recipe import Adapter, Batch, Hardware
from trainfit.step import assemble
from virtual_runs import recipe_of, steady_sum, with_layers

CPU = torch.device("cpu")
L, HIDDEN, FEED, HEADS, KV_HEADS, HEAD, VOCABULARY = 32, 4096, 14336, 32, 8, 128, 128256  # Llama-3.1-8B
QKV = HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD
LAYER = {"qkv": QKV, "o": HIDDEN * HIDDEN, "gate-up": 2 * HIDDEN * FEED, "down": HIDDEN * FEED}
BLOCKS = L * sum(LAYER.values())
HEAD_MATRIX = HIDDEN * VOCABULARY


def attention_forward(seq: int, *, causal: bool = True) -> int:
    """FLOPs of scores and weighted values of one sequence: 4 H d a pair, s(s+1)/2 pairs if causal."""
    pairs = seq * (seq + 1) // 2 if causal else seq * seq
    return L * HEADS * 4 * HEAD * pairs


def llama(seq: int = 4096, **fields: Any) -> Ledger:
    return trace(recipe_of("llama-3.1-8b", **{"batch": Batch(micro=1, seq=seq), **fields}))


def test_llama_8b_is_6_n_and_attention() -> None:
    """6 a parameter that is multiplied and token, and attention's 12 L H d T a token, causal
    (arXiv:2204.02311, B)."""
    seq = 4096
    ledger = llama(seq, attention="flash")
    assert ledger.params == BLOCKS + 2 * HEAD_MATRIX + (2 * L + 1) * HIDDEN == 8_030_261_248
    products = 6 * (BLOCKS + HEAD_MATRIX) * seq
    assert steady_sum(ledger, "model_flops") == products + 3 * attention_forward(seq)
    assert steady_sum(ledger, "model_flops_full") == products + 3 * attention_forward(seq, causal=False)
    # Flash's backward computes the scores again: one product more of the forward's two.
    more = steady_sum(ledger, "causal_flops") - products - 3.5 * attention_forward(seq)
    assert more in (0, seq * HEAD)  # Rotary angles, which transformers below 5.20 multiplies as matrices.
    assert ledger.ops_without_flops == ()


def test_batch_and_accumulation_multiply() -> None:
    one, several = (
        trace(tiny_recipe("native", batch=batch)) for batch in (Batch(micro=1), Batch(micro=3, accumulate=2))
    )
    assert steady_sum(several, "model_flops") == 6 * steady_sum(one, "model_flops")
    # The first step costs what a steady one does.
    first = (op for op in several.ops if several.segments[op.segment].step == "first")
    assert sum(several.times(op) * op.model_flops for op in first) == steady_sum(several, "model_flops")


def test_recomputation_adds_a_forward_without_its_last_product() -> None:
    """Checkpointing stops once everything saved is there again: the last product of a block saves nothing
    new."""
    seq = 256
    fields: dict[str, Any] = {"batch": Batch(micro=1, seq=seq), "attention": "flash"}
    plain, again = (
        trace(recipe_of("llama-3.1-8b", "native", **fields, recompute=recompute))
        for recompute in ("none", "full")
    )
    assert steady_sum(again, "model_flops") == steady_sum(plain, "model_flops")
    more = steady_sum(again, "causal_flops") - steady_sum(plain, "causal_flops")
    assert more == 2 * (BLOCKS - L * LAYER["down"]) * seq + attention_forward(seq)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_lora_skips_the_frozen_weights_gradients(recompute: Any) -> None:
    """4 a frozen parameter and token instead of 6: forward, and the gradient of its input.

    The first block's q, k and v need not even that where their input needs no gradient; with checkpointing it
    does (transformers lets the embedding's output require one). The adapters, rank 16, cost their 6.
    """
    seq, rank = 256, 16
    ledger = llama(seq, attention="flash", recompute=recompute, adapter=Adapter(kind="lora", rank=rank))
    shapes = [(HIDDEN, HEADS * HEAD), (HIDDEN, HIDDEN), (FEED, HIDDEN)]
    shapes += 2 * [(HIDDEN, KV_HEADS * HEAD), (HIDDEN, FEED)]
    adapters = L * sum(rank * (wide + high) for wide, high in shapes)
    assert ledger.trainable_params == adapters
    assert ledger.params == 8_030_261_248 + adapters
    not_needed = QKV + 3 * rank * HIDDEN if recompute == "none" else 0
    expected = (4 * (BLOCKS + HEAD_MATRIX) + 6 * adapters - 2 * not_needed) * seq + 3 * attention_forward(seq)
    assert steady_sum(ledger, "model_flops") == expected
    assert expected / (4 * ledger.params * seq) == pytest.approx(1, abs=0.08)


@pytest.mark.parametrize(
    ("implementation", "fields"),
    [
        ("hf", {"adapter": Adapter(kind="lora", rank=4)}),
        ("native", {"batch": Batch(micro=2, seq=16, accumulate=2)}),
    ],
)
def test_equal_to_pytorchs_counter(implementation: str, fields: dict[str, Any]) -> None:
    """A real step of a tiny Llama on this CPU, attention written out in matrix products that PyTorch
    counts."""
    recipe = tiny_recipe(implementation, attention="math", **fields)
    step = assemble(recipe, CPU)
    batches = step.random_batches()
    step(batches)
    with FlopCounterMode(display=False) as counter:
        step(batches)
    for gpu in ("cpu", "h200"):
        ledger = trace(recipe.model_copy(update={"hardware": Hardware(gpu=gpu)}))
        assert steady_sum(ledger, "flops") == counter.get_total_flops() > 0
    assert recipe.batch.tokens * 6 * TINY_LLAMA["hidden_size"] ** 2 < counter.get_total_flops()


def test_experts_count_for_the_tokens_they_get() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts a token; 3.3e9 active parameters (https://arxiv.org/abs/2505.09388)."""
    seq = 64
    ledger = trace(recipe_of(with_layers("qwen3-30b-a3b", None), batch=Batch(micro=1, seq=seq)))
    active = steady_sum(ledger, "model_flops") / 6 / seq
    embedding = 151_936 * 2048
    assert active + embedding == pytest.approx(3.35e9, rel=0.02)
    assert ledger.ops_without_flops == ()
