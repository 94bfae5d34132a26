"""Figures in the sentences of batch-size.md are those of data sheets, predictions and settings."""

from evidence.scripts.tables import batch_size
from page_claims import check
from trainfit.bench.workloads import few_tokens, token_budget
from trainfit.catalog.load import gpu
from trainfit.report.bench_plot import number

PAGE = "evidence/pages/batch-size.md"


def test_the_crossover_is_the_data_sheets() -> None:
    sheet = few_tokens.sheet_rates(gpu(batch_size.CARD))
    assert sheet is not None
    check(PAGE, r"memory-bound below # tokens on an H100", (batch_size.WEIGHTS.crossover(*sheet),))


def test_the_predicted_speeds_are_the_pages_shares_of_the_best() -> None:
    rates = {one.tokens: one.predicted("tokens_per_s") or 0.0 for one in batch_size._steps()}
    best = max(rates.values())
    check(PAGE, r"reach # % of its best speed from # tokens on and # % from # on",
          (100 * rates[4096] / best, 4096, 100 * rates[8192] / best, 8192))  # fmt: skip


def test_the_trainings_are_as_the_page_says() -> None:
    full, cpu = (token_budget.SIZES[name] for name in ("full", "cpu"))
    check(PAGE, r"it has # million parameters and a budget of # tokens, on a CPU # million and #",
          (0.459136, full.budget, 0.131136, cpu.budget))  # fmt: skip
    check(PAGE, r"over # optimizer steps, or a quarter of the steps where those are fewer than #",
          (token_budget.WARMUP_STEPS, token_budget.WARMUP_STEPS / token_budget.WARMUP_SHARE))  # fmt: skip
    check(PAGE, r"It is # for # tokens \(# on a CPU\)", (full.lr, full.base, cpu.lr))
    assert full.factors == cpu.factors == (1.0, 0.5, 2.0)


def test_rows_of_the_techniques_table_are_against_the_reference() -> None:
    rows = batch_size.technique_rows()
    assert [row[0].split("`")[1] for row in rows] == [f"batch.micro: {micro}" for micro in (1, 2, 8)]
    assert [row[1][0] for row in rows] == ["-", "-", "+"]  # Memory
    assert [row[3][0] for row in rows] == ["+", "+", "-"]  # A token's time


def test_what_a_fixed_budget_costs() -> None:
    rows = {(int(one.point["batch"]), int(one.point["seen"])): one for one in batch_size._losses()}
    seen = max(at for _, at in rows)
    loss = {batch: number(row, "loss") or 0.0 for (batch, at), row in rows.items() if at == seen}
    best = min(loss.values())
    small = [value for batch, value in loss.items() if batch <= 1024]
    check(
        PAGE,
        "From 256 to 1,024 tokens the loss is the same within # %",
        (100 * (max(small) / min(small) - 1),),
    )
    doubled = [loss[2**power] for power in range(10, 16)]
    assert doubled == sorted(doubled)
    check(PAGE, "the batch of 16,384 ends # % worse than that of 1,024", (100 * (loss[16384] / best - 1),))
    by_rate = {(int(one.point["batch"]), float(one.point["rate"])): number(one, "loss") or 0.0
               for one in batch_size._losses(batch_size.RATE)}  # fmt: skip
    assert by_rate[32768, 0.5] < 4 < 5.4 < by_rate[32768, 1.0]
    assert min(by_rate[65536, factor] for factor in (0.5, 1.0, 2.0)) > 5.4
    steps_ms = [1e3 * (number(one, "step_s") or 0.0) for one in batch_size._losses(batch_size.RATE)
                if int(one.point["batch"]) <= 16384]  # fmt: skip
    assert 4 < min(steps_ms) < max(steps_ms) < 7
