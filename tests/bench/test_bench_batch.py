"""``bench batch``: products of few tokens, steps by micro-batch, and trainings on one budget of tokens."""

import math

import pytest
import torch

from trainfit.bench.harness.runner import run
from trainfit.bench.workloads import few_tokens, token_budget
from trainfit.catalog.load import gpu, model_config
from trainfit.flops.shape import shape_of

LLAMA_8B = few_tokens.block_of(shape_of(model_config("llama-3.1-8b")), 2)


def test_a_block_has_the_weights_of_its_linears() -> None:
    assert LLAMA_8B.params == 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert LLAMA_8B.flops(10) == 20 * LLAMA_8B.params
    plain = few_tokens.block_of(shape_of(model_config("gpt2")), 2)
    assert plain.params == 4 * 768**2 + 2 * 768 * 3072


def test_products_are_memory_bound_below_the_crossover_and_compute_bound_above() -> None:
    sheet = few_tokens.sheet_rates(gpu("h100-sxm"))
    assert sheet is not None
    crossover = LLAMA_8B.crossover(*sheet)
    assert crossover is not None
    # C / W, 295 tokens, for weights alone; what a token reads and writes raises it.
    assert sheet[0] / sheet[1] == pytest.approx(295, abs=1)
    assert crossover == pytest.approx(340, abs=15)
    for tokens, arithmetic_decides in ((crossover * 0.99, False), (crossover * 1.01, True)):
        arithmetic, memory = LLAMA_8B.least_s(int(1000 * tokens), *sheet)
        per_thousand = LLAMA_8B.element_bytes * LLAMA_8B.params / sheet[1] * 999
        assert (arithmetic > memory + per_thousand) is arithmetic_decides
    assert LLAMA_8B.crossover(*(1e18, 1e9)) is None  # Activations alone take longer than the arithmetic.
    assert few_tokens.sheet_rates(None) is None


def test_the_measured_crossover_is_where_the_flat_line_meets_the_slope() -> None:
    seconds = {tokens: max(1.0, tokens / 300) for tokens in (1, 16, 256, 4096)}
    assert few_tokens.measured_crossover(seconds) == pytest.approx(300)


def test_sequences_repeat_and_their_source_is_the_least_loss() -> None:
    some, again = token_budget.sequences(64, seed=3), token_budget.sequences(64, seed=3)
    assert torch.equal(some, again)
    assert not torch.equal(some, token_budget.sequences(64, seed=4))
    assert some.shape == (64, token_budget.SEQ)
    assert some.min() >= 0
    assert some.max() < token_budget.VOCAB
    # Two lists of 8 by Zipf's law, each half of the time: at most ln 2 above the entropy of one.
    shares = [1 / rank / sum(1 / k for k in range(1, 9)) for rank in range(1, 9)]
    one = -sum(share * math.log(share) for share in shares)
    assert one < token_budget.source_loss(some) < one + math.log(2) + 0.1


def test_a_small_model_learns_the_source_and_keeps_to_the_budget() -> None:
    size = token_budget.Size(32, 1, 2**14, (512, 2048), 2, 512, 2e-2, (0.01, 1.0))
    found = {
        batch: token_budget.train(size, batch, torch.device("cpu"), lambda: False) for batch in (512, 2048)
    }
    for batch, one in found.items():
        assert one.steps == size.budget // batch
        assert list(one.losses) == [size.budget // 2, size.budget]
        assert one.lr == pytest.approx(2e-2 * math.sqrt(batch / 512))  # The better of both factors
        assert token_budget.source_loss(token_budget.held_out()) < one.last < math.log(token_budget.VOCAB)
    assert found[512].last < found[2048].last  # A quarter of the steps
    first = token_budget.train(size, 2048, torch.device("cpu"), lambda: True)  # No time for a second rate
    assert first.lr == pytest.approx(2e-4 * 2)
    assert token_budget.Trained(0.1, 1, {512: math.nan}).last == math.inf


def test_the_largest_useful_batch_is_the_last_one_near_the_best_loss() -> None:
    losses = {1024: 3.02, 2048: 3.0, 4096: 3.01, 8192: 3.1}
    assert token_budget.largest_useful(losses, 0.01) == 4096
    assert token_budget.largest_useful(losses, 0.0) == 2048


def test_the_tiny_form_has_every_part() -> None:
    rows = run("batch", device="cpu").rows
    assert {row.status for row in rows} <= {"done", "unsteady"}
    products = [row for row in rows if "tokens" in row.point]
    assert [row.point["tokens"] for row in products] == [1, 16, 256]
    assert all(float(row.numbers["tflops_per_s"]) > 0 for row in products)
    (crossover,) = (row for row in rows if "crossover by" in row.point)
    assert crossover.point["crossover by"] == "times"
    steps = [row for row in rows if "micro" in row.point]
    for row in steps:
        assert row.times is not None
        tokens = int(row.point["micro"]) * int(row.point["seq"])
        assert row.numbers["tokens_per_s"] == pytest.approx(tokens / row.times.median)
    losses = [row for row in rows if "seen" in row.point]
    assert {row.point["batch"] for row in losses} == {1024, 4096}
    (summary,) = (row for row in rows if "batches" in row.point)
    assert summary.numbers["useful_tokens"] in (1024, 4096)


def test_one_part_runs_alone() -> None:
    rows = run("batch", device="cpu", only={"batch": ["4096"]}).rows
    assert {row.point["batch"] for row in rows} == {4096}
