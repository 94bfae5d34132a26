"""Figures in the sentences of evidence/pages/peak-memory.md and recompute-budget.md against the records."""

from collections.abc import Mapping

import pytest

from evidence.scripts.tables import peak_memory as tables
from page_claims import check, figures
from trainfit.explanation.peak import difference
from trainfit.spec.sweep import Row
from trainfit.spec.units import GIB, MIB

PEAK, BUDGET = "evidence/pages/peak-memory.md", "evidence/pages/recompute-budget.md"
ROWS = {**tables.sweep("trained"), **tables.sweep("measured")}
CONTROL, BEST = ROWS["control"], ROWS["best_fast"]


def claim(pattern: str, *values: float | None) -> None:
    check(PEAK, pattern, values)


def known(value: float | None) -> float:
    assert value is not None
    return value


def measured(name: str) -> float:
    return known(ROWS[name].measured_bytes) / GIB


def less(row: Row, control: Row = CONTROL) -> float:
    return 100 * known(tables.reduction(row, control))


def perplexity(row: Row, control: Row = CONTROL) -> float:
    """The change of the perplexity in per cent."""
    return 100 * known(tables.perplexity_change(row, control))


def speed(name: str, other: str = "control", rows: Mapping[str, Row] = ROWS) -> float:
    return known(tables.late_samples_per_s(rows[name])) / known(tables.late_samples_per_s(rows[other]))


def test_headline() -> None:
    assert BEST.estimate is not None
    claim(
        "smallest row allocates # GiB, where the control allocates # GiB, and runs # times",
        min(map(measured, ROWS)), measured("control"), speed("best_fast"),
    )  # fmt: skip
    assert measured("best_fast") == min(map(measured, ROWS))
    claim("fast\\*\\*, with # GiB of pinned host memory", BEST.estimate.host_bytes / GIB)
    claim("It ends 100 steps at the control's perplexity, to # %", abs(perplexity(BEST)))


def test_errors_of_the_predicted_peaks() -> None:
    errors = {name: abs(row.error) for name, row in ROWS.items() if row.error is not None}
    pattern = "All # predicted peaks are within # % of the measured ones, # of them to the byte"
    count, bound, exact = map(float, figures(PEAK, pattern))
    assert (count, exact) == (len(errors), sum(error == 0 for error in errors.values()))
    assert max(errors.values()) * 100 <= bound <= max(errors.values()) * 100 + 0.01
    assert all(ROWS[name].recipe["compile"] for name, error in errors.items() if error)


def test_what_techniques_contribute() -> None:
    claim("steps over the control's #,", tables.late_samples_per_s(CONTROL))
    assert measured("fused") == measured("control")
    claim("host memory comes last, at # % of the speed", int(100 * (1 - speed("best_fast", "best_resident"))))
    theirs = tables.published()
    least = min(row["peak_gib"] for row in theirs.values())
    share = 100 * (1 - least / theirs["control"]["peak_gib"])
    claim("whose best row allocates # GiB, # % less than its control", least, share)


def test_quality() -> None:
    claim("bf16 weights end # % above the control's perplexity", perplexity(ROWS["bf16"]))
    nearest = ROWS["bf16_own_adafactor"]
    assert not nearest.recipe["optimizer"].get("stochastic_rounding")
    claim("rounds to nearest and ends # % above the control", perplexity(nearest))
    claim("`best_fast` with stochastic rounding # % below it", -perplexity(BEST))
    ladder = tables.sweep("llama-3.2-1b")
    claim("plain bf16 weights end # % above fp32", perplexity(ladder["bf16"], ladder["control"]))
    rounded = perplexity(ladder["bf16_rounded"], ladder["control"])
    claim("above fp32, with stochastic rounding # %\\.", rounded)


def test_optimizer_in_the_backward() -> None:
    one = tables.explained()
    control, full, both = one["control"], one["checkpoint"], one["fused_checkpoint"]
    layers = int(control.recipe["model"]["config"]["num_hidden_layers"])
    assert control.moment.phase == "backward"
    assert "softmax_backward" in control.moment.op
    assert control.breakdown.gradients == 0
    shown = (*tables.EXPLAINED, *tables.COMPILED, *tables.BLOCKS)
    claim("Weights hold # GiB throughout", *{one[name].breakdown.weights / GIB for name in shown})
    claim("in the loss: # GiB of activations are alive", control.breakdown.activations / GIB)
    kept, made = control.ends["forward"].activations / layers, control.most.gradients / layers
    claim("backward then frees # MiB of activations and makes # MiB of gradients", kept / MIB, made / MIB)
    assert one["fused"].peak_allocated_bytes == control.peak_allocated_bytes
    kept = full.ends["forward"].activations / layers
    claim("A layer keeps # MiB of activations, less than its gradients", kept / MIB)
    assert kept < made
    saved = full.peak_allocated_bytes - both.peak_allocated_bytes
    pattern = "Its end holds # GiB of gradients, and freeing them at once saves # GiB"
    claim(pattern, full.breakdown.gradients / GIB, saved / GIB)
    assert sum(change.num_bytes for change in difference(full, both)) < 0
    together = one["fused_compile"].most.gradients
    claim("returns all gradients together, # GiB, before the first hook runs", together / GIB)
    for pair in (("compile", "fused_compile"), ("memory_budget_05", "fused_memory_budget_05")):
        assert one[pair[0]].peak_allocated_bytes == one[pair[1]].peak_allocated_bytes
    claim("and at most # MiB of gradients are alive", one["fused_compile_block"].most.gradients / MIB)
    plain, fused = (one[f"{name}block_budget_05"].peak_allocated_bytes for name in ("", "fused_"))
    pattern = "where the peak holds gradients, freeing them at once saves # GiB of # GiB"
    claim(pattern, (plain - fused) / GIB, plain / GIB)


def num_within_budgets(rows: Mapping[str, Row]) -> int:
    """The number of rows with a budget in GiB, all of which are within it."""
    plans = {name: row.recipe["recompute"] for name, row in rows.items()}
    budgets = {name: plan["budget_gib"] for name, plan in plans.items() if "budget_gib" in plan}
    assert all(known(rows[name].measured_bytes) <= budget * GIB for name, budget in budgets.items())
    return len(budgets)


def test_budgets() -> None:
    rows = tables.sweep("budgets")
    assert known(rows["compiler 0"].measured_bytes) > known(rows["compiler 0.2"].measured_bytes)
    claim("All # budgets in GiB hold when measured. They", num_within_budgets(rows))
    base = rows["ours without a budget"]
    assert all((tables.slower(row, base) or 0) <= 0 for name, row in rows.items() if name.startswith("ours"))


def test_ladders() -> None:
    for name, title in (("llama-3.2-1b", "Llama 3.2 1B"), ("qwen3-4b", "Qwen3 4B")):
        best = tables.sweep(name)["best_native"].estimate
        assert best is not None
        pattern = f"{title}, [^-]*`best_native` takes # GiB on the device .predicted. and # GiB of pinned"
        claim(pattern, best.peak_device_bytes / GIB, best.host_bytes / GIB)
    llama, qwen = tables.sweep("llama-3.2-1b"), tables.sweep("qwen3-4b")
    claim("Llama 3.2 1B, 100 steps: all # peaks", sum(row.error == 0 for row in llama.values()))
    change = perplexity(llama["best_native"], llama["control"])
    claim("Its perplexity is # % above the control's; it starts", change)
    failed = [row for row in qwen.values() if row.status == "out-of-memory"]
    assert [row.verdict for row in failed] == ["does not fit"] * 3
    (bound,) = figures(PEAK, "every measured peak is within # % of the predicted one")
    assert max(abs(row.error) for row in qwen.values() if row.error is not None) * 100 <= float(bound)


def test_page_of_the_budget_in_gib() -> None:
    rows = tables.sweep("llama-3.1-8b")
    none, full, ours = rows["none"], rows["full"], rows["ours 60.7 GiB"]
    assert ours.estimate is not None
    slower = [100 * known(tables.slower(row, none)) for row in (full, ours)]
    check(BUDGET, "Full checkpointing saves # % and makes the step # % slower", (less(full, none), slower[0]))
    assert less(ours, none) >= less(full, none)
    pattern = "A budget of 60.7 GiB saves as much and makes it # % slower, with # GiB"
    check(BUDGET, pattern, (slower[1], ours.estimate.host_bytes / GIB))
    pattern = "All # budgets hold when measured, and all # predicted peaks are within # %"
    count, num_rows, bound = map(float, figures(BUDGET, pattern))
    assert (count, num_rows) == (num_within_budgets(rows), len(rows))
    assert max(abs(row.error or 0) for row in rows.values()) * 100 <= bound


def test_a_row_without_a_measurement_shows_its_prediction_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    row = tables.sweep("qwen3-4b")["amp"]
    waiting = row.model_copy(update={"status": "waiting", "train": None, "measurement": None})
    control = tables.sweep("qwen3-4b")["control"]
    monkeypatch.setattr(tables, "sweep", lambda name: {"control": control, "amp": waiting})
    (line,) = [line for line in tables.memory("qwen3-4b").splitlines() if line.startswith("| `amp` |")]
    assert "| 120.620, predicted only |" in line


def test_the_published_rows_are_all_there_and_bf16_costs_what_the_page_says() -> None:
    theirs = tables.published()
    assert len(theirs) == 11
    assert all(perplexity(ROWS[name]) is not None for name in theirs)
    base = theirs["control"]["perplexity"]
    in_bf16 = [name for name in theirs if name.startswith("bf16")]
    published = sorted(100 * (theirs[name]["perplexity"] / base - 1) for name in in_bf16)
    ours = sorted(perplexity(ROWS[name]) for name in in_bf16)
    ends = (published[0], published[-1], ours[0], ours[-1])
    claim("bf16 weights do: by # to # % there, and by # to # % here", *ends)
    assert all(abs(perplexity(ROWS[name])) < 0.2 for name in theirs if name not in in_bf16)


def test_what_epsilon_rounding_steps_and_data_cost_in_bf16() -> None:
    found, docs = tables.sweep("bf16-quality-cpu"), tables.sweep("bf16-quality-cpu-docs")

    def over(name: str, rows: Mapping[str, Row] = found) -> float:
        return perplexity(rows[name], rows[tables.QUALITY[name][1]])

    claim(r"torch's costs # %, as the gradients", over("torch_bf16"))
    claim("to nearest costs # % with steps in proportion to the weights and # % with absolute ones",
          over("scaled_bf16"), over("absolute_bf16"))  # fmt: skip
    claim(
        "Stochastic rounding leaves # % and # %", over("scaled_bf16_rounded"), over("absolute_bf16_rounded")
    )
    grown = [100 * (one - 1) for one in tables.over_control(found["absolute_bf16"], found["absolute_fp32"])]
    claim("grows from # % after 25 steps to # % after 100", grown[0], grown[-1])
    claim("on other text rounding costs # % and # %", over("scaled_bf16", docs), over("absolute_bf16", docs))
