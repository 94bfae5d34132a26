"""``bench batch``: products of few tokens, steps by micro-batch, and trainings on one budget of tokens."""

import math
from types import SimpleNamespace

import pytest
import torch

from trainfit.bench.harness.bench import Bench
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
    size, cpu = token_budget.Size(32, 1, 2**14, (512, 2048), 2, 512, 2e-2, (1.0, 0.01)), torch.device("cpu")
    found = {batch: token_budget.train(size, batch, size.rate(batch, 1.0), cpu) for batch in (512, 2048)}
    for batch, one in found.items():
        assert one.steps == size.steps(batch) == size.budget // batch
        assert list(one.losses) == [size.budget // 2, size.budget]
        assert one.lr == pytest.approx(2e-2 * math.sqrt(batch / 512))
        assert token_budget.source_loss(token_budget.held_out()) < one.last < math.log(token_budget.VOCAB)
        assert 0 < one.steps * one.step_s < one.elapsed_s
    assert found[512].last < found[2048].last  # A quarter of the steps
    assert token_budget.Trained(0.1, 1, {512: math.nan, 1024: 3.0}).last == math.inf


@pytest.mark.parametrize(("steps", "warmup"), [(8, 2), (64, 16), (1000, 40)])
def test_the_learning_rate_rises_over_steps_however_many_tokens_each_has(
    steps: int, warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []

    class Recorded:
        optimizers = (SimpleNamespace(param_groups=[{"lr": 0.0}]),)

        def __call__(self, batches: object) -> torch.Tensor:
            rates.append(self.optimizers[0].param_groups[0]["lr"])
            return torch.zeros(())

        cross_entropy = __call__

    monkeypatch.setattr(token_budget, "assemble", lambda recipe, device: Recorded())
    size = token_budget.Size(32, 1, steps * 256, (256,), 1, 256, 1.0, (1.0,))
    token_budget.train(size, 256, 1.0, torch.device("cpu"))
    assert rates[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert set(rates[warmup:]) == {1.0}


def test_the_pace_of_larger_batches_foretells_smaller_ones() -> None:
    size = token_budget.Size(32, 1, 2**16, (256, 512, 1024), 2, 512, 2e-2, (1.0,))
    pace = token_budget.Pace(size)
    assert pace.needed_s([256]) == 0.0  # Nothing is known.
    pace.add(1024, token_budget.Trained(0.1, 64, {}, step_s=0.012, elapsed_s=1.768))
    assert pace.needed_s([512]) == pytest.approx(1.0 + 128 * 0.012)  # As if the host alone decided
    pace.add(512, token_budget.Trained(0.1, 128, {}, step_s=0.008, elapsed_s=2.024))
    assert pace.needed_s([256]) == pytest.approx(1.0 + 256 * 0.006)  # 4 ms and 2 ms for every 256 tokens
    assert pace.needed_s([512, 256]) == pytest.approx(2.0 + 128 * 0.008 + 256 * 0.006)


def test_a_limit_cuts_rates_of_small_batches_first_then_small_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def train(size: token_budget.Size, batch: int, lr: float, device: torch.device) -> token_budget.Trained:
        nonlocal now
        elapsed = size.steps(batch) * 1.0
        now += elapsed
        losses = {seen: 3.0 + lr for seen in range(batch, size.budget + 1, batch)}
        return token_budget.Trained(lr, size.steps(batch), losses, step_s=1.0, elapsed_s=elapsed)

    size = token_budget.Size(32, 1, 2**13, (1024, 2048, 4096), 2, 1024, 1e-2, (1.0, 0.5, 2.0))
    monkeypatch.setattr(token_budget, "train", train)
    monkeypatch.setattr(token_budget, "size_of", lambda form, device: size)
    monkeypatch.setattr(Bench, "left_s", lambda bench: limit - now if bench.ends_at > 0 else -math.inf)
    for limit, expected in ((42.5, 9), (34.5, 8), (25.5, 6), (17.5, 4), (13.5, 4)):
        now = 0.0
        rows = run("batch", device="cpu", only={"budget": [str(size.budget)]}).rows
        rates = [row for row in rows if "rate" in row.point]
        assert [row.point["batch"] for row in rates] == [4096] * 3 + [2048] * 3 + [1024] * 3
        assert sum(row.status == "done" for row in rates) == expected
        assert now <= limit
        cut = [row for row in rates if row.status == "not-run"]
        assert all("limit" in row.message for row in cut)
        curves = {row.point["batch"]: row.status for row in rows if "seen" in row.point}
        assert curves == {4096: "done", 2048: "done", 1024: "done" if limit > 14 else "not-run"}
        (summary,) = (row for row in rows if "batches" in row.point)
        assert summary.numbers["num_batches"] == (3 if limit > 14 else 2)
        assert next(row for row in rows if "seen" in row.point).numbers["lr"] == size.rate(4096, 0.5)


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
    rates = [row for row in rows if "rate" in row.point]
    assert {row.point["batch"] for row in rates} == {1024, 4096}
    losses = [row for row in rows if "seen" in row.point]
    assert {row.point["batch"] for row in losses} == {1024, 4096}
    (summary,) = (row for row in rows if "batches" in row.point)
    assert summary.numbers["useful_tokens"] in (1024, 4096)


def test_one_part_runs_alone() -> None:
    rows = run("batch", device="cpu", only={"batch": ["4096"]}).rows
    assert {row.point["batch"] for row in rows} == {4096}
