"""Figures in the sentences of docs/results/peak-memory.md and recompute-budget.md against the records."""

import re
from pathlib import Path

import pytest

from benchmarks.tables import peak_memory as tables
from benchmarks.tables.joined import records
from trainfit.explanation.difference import difference
from trainfit.spec.sweep import Row
from trainfit.spec.units import GIB, MIB

PAGES = Path(__file__).parents[2] / "docs" / "results"


def prose(name: str) -> str:
    """The page without its filled tables, on one line."""
    text = re.sub(
        r"<!-- (?:table|figure).*?<!-- end -->", "", (PAGES / name).read_text("utf-8"), flags=re.DOTALL
    )
    return " ".join(text.split())


PEAK, BUDGET = prose("peak-memory.md"), prose("recompute-budget.md")
ROWS = {**tables.sweep("trained"), **tables.sweep("measured")}


def figures(pattern: str, text: str = PEAK) -> list[float]:
    """The numbers of the one sentence that matches; ``#`` stands for a number."""
    parts = [re.escape(part) for part in pattern.split("#")]
    found = re.findall(r"(-?\d+(?:\.\d+)?)".join(parts), text)
    assert len(found) == 1, f"{pattern!r} is {len(found)} times in the page"
    return [float(one) for one in (found[0] if isinstance(found[0], tuple) else found)]


def measured(name: str) -> float:
    size = ROWS[name].measured_bytes
    assert size is not None
    return size / GIB


def less(row: Row, control: Row) -> float:
    share = tables.reduction(row, control)
    assert share is not None
    return 100 * share


def speed(name: str, other: str = "control") -> float:
    ours, base = tables.late_samples_per_s(ROWS[name]), tables.late_samples_per_s(ROWS[other])
    assert ours is not None
    assert base is not None
    return ours / base


def test_headline() -> None:
    best = ROWS["best_fast"]
    assert best.estimate is not None
    allocated, control, faster = figures(
        "the smallest row allocates # GiB, where the control allocates # GiB, and runs # times"
    )
    assert allocated == pytest.approx(min(map(measured, ROWS)), abs=5e-4)
    assert (allocated, control) == (round(measured("best_fast"), 3), round(measured("control"), 3))
    assert faster == round(speed("best_fast"), 1)
    device, predicted, host = figures("it takes # GiB, predicted # GiB, and # GiB of pinned host memory")
    assert device == round(tables.device_bytes()[best.recipe_id] / GIB, 2)
    assert (predicted, host) == (
        round(best.estimate.peak_device_bytes / GIB, 2),
        round(best.estimate.host_bytes / GIB, 2),
    )
    change = tables.perplexity_change(best, ROWS["control"])
    assert change is not None
    assert figures("It ends 100 steps at the control's perplexity, to # %") == [round(100 * abs(change), 2)]


def test_errors_of_the_predicted_peaks() -> None:
    errors = {name: abs(row.error) for name, row in ROWS.items() if row.error is not None}
    count, bound, exact = figures(
        "All # predicted peaks are within # % of the measured ones, # of them to the byte"
    )
    assert (count, exact) == (len(errors), sum(error == 0 for error in errors.values()))
    assert max(errors.values()) * 100 <= bound <= max(errors.values()) * 100 + 0.01
    assert all(ROWS[name].recipe["compile"] for name, error in errors.items() if error)


def test_what_techniques_contribute() -> None:
    control = ROWS["control"]
    share, cost = figures("Activation checkpointing alone removes # % and costs # % of the speed")
    assert share == round(less(ROWS["checkpoint"], control), 1)
    assert cost == round(100 * (1 - speed("checkpoint")))
    assert measured("fused") == measured("control")
    saved = [round(measured("checkpoint") - measured("fused_checkpoint"), 2)]
    assert figures("with checkpointing it removes # GiB") == saved
    share, faster = figures("bf16 weights remove # % and are # times as fast")
    assert (share, faster) == (round(less(ROWS["bf16"], control), 1), round(speed("bf16"), 1))
    start, end, cost = figures("From # to # GiB allocated it costs # % of the speed")
    assert (start, end) == (round(measured("best_resident"), 3), round(measured("best_fast"), 3))
    assert cost == int(100 * (1 - speed("best_fast", "best_resident")))
    theirs = tables.published()
    least, share = figures("Its best row allocates # GiB, # % less than its control")
    assert least == min(row["peak_gib"] for row in theirs.values())
    assert share == round(100 * (1 - least / theirs["control"]["peak_gib"]), 1)


def test_quality() -> None:
    def change(row: Row, control: Row) -> float:
        share = tables.perplexity_change(row, control)
        assert share is not None
        return 100 * share

    control = ROWS["control"]
    assert figures("end at a perplexity # % above the control's") == [round(change(ROWS["bf16"], control), 1)]
    nearest = ROWS["bf16_own_adafactor"]
    assert not nearest.recipe["optimizer"].get("stochastic_rounding")
    assert figures("rounds to nearest and ends # % above the control") == [round(change(nearest, control), 2)]
    assert figures("`best_fast` ends # % below it") == [-round(change(ROWS["best_fast"], control), 2)]
    ladder = tables.sweep("llama-3.2-1b")
    base = ladder["control"]
    assert figures("plain bf16 weights end # % above fp32") == [round(change(ladder["bf16"], base), 1)]
    rounded = [round(change(ladder["bf16_rounded"], base), 2)]
    assert figures("With stochastic rounding they end # % above it") == rounded


def test_optimizer_in_the_backward() -> None:
    one = tables.explained()
    control, full, both = one["control"], one["checkpoint"], one["fused_checkpoint"]
    layers = int(control.recipe["model"]["config"]["num_hidden_layers"])
    assert control.moment.phase == "backward"
    assert "softmax_backward" in control.moment.op
    assert control.breakdown.gradients == 0
    assert figures("in the loss: # GiB of activations are alive") == [
        round(control.breakdown.activations / GIB, 2)
    ]
    kept, made = control.ends["forward"].activations / layers, control.most.gradients / layers
    sentence = "backward then frees # MiB of activations and makes # MiB of gradients"
    assert figures(sentence) == [round(kept / MIB), round(made / MIB)]
    assert one["fused"].peak_allocated_bytes == control.peak_allocated_bytes
    kept = full.ends["forward"].activations / layers
    assert figures("A layer keeps # MiB of activations, less than its gradients") == [round(kept / MIB)]
    assert kept < made
    held, saved = figures("Its end holds # GiB of gradients, and freeing them at once saves # GiB")
    assert held == round(full.breakdown.gradients / GIB, 2)
    assert saved == round((full.peak_allocated_bytes - both.peak_allocated_bytes) / GIB, 2)
    assert sum(change.num_bytes for change in difference(full, both)) < 0
    together = figures("returns all gradients together, # GiB, before the first hook runs")
    assert together == [round(one["fused_compile"].most.gradients / GIB, 2)]
    for pair in (("compile", "fused_compile"), ("memory_budget_05", "fused_memory_budget_05")):
        assert one[pair[0]].peak_allocated_bytes == one[pair[1]].peak_allocated_bytes
    assert figures("and at most # MiB of gradients are alive") == [
        round(one["fused_compile_block"].most.gradients / MIB)
    ]
    plain, fused = (
        one["block_budget_05"].peak_allocated_bytes,
        one["fused_block_budget_05"].peak_allocated_bytes,
    )
    saved = figures("where the peak holds gradients, freeing them at once saves # GiB of # GiB")
    assert saved == [round((plain - fused) / GIB, 2), round(plain / GIB, 2)]


def test_budgets() -> None:
    rows = tables.sweep("budgets")
    sizes = {name: (row.measured_bytes or 0) / GIB for name, row in rows.items()}
    none, fifth = figures("a share of 0 takes # GiB, one of 0.2 takes # GiB")
    assert (none, fifth) == (round(sizes["compiler 0"], 3), round(sizes["compiler 0.2"], 3))
    within = [inside for row in rows.values() if (inside := tables.within_budget(row)) is not None]
    assert figures("All # budgets in GiB hold when measured. They") == [len(within)]
    assert all(within)
    base = rows["ours without a budget"]
    assert all((tables.slower(row, base) or 0) <= 0 for name, row in rows.items() if name.startswith("ours"))
    estimate = rows["ours 13 GiB"].estimate
    assert estimate is not None
    assert figures("# GiB for the budget of 13 GiB") == [round(estimate.host_bytes / GIB, 2)]


def test_ladders() -> None:
    for name, title in (("llama-3.2-1b", "Llama 3.2 1B"), ("qwen3-4b", "Qwen3 4B")):
        rows = tables.sweep(name)
        best, control = rows["best_native"], rows["control"]
        assert best.measured_bytes is not None
        assert best.predicted_device_bytes is not None
        allocated, device, share = figures(f"| {title} | `best_native` | # | # | # %")
        assert (allocated, device) == (
            round(best.measured_bytes / GIB, 3),
            round(best.predicted_device_bytes / GIB, 2),
        )
        assert share == round(less(best, control), 1)
    llama, qwen = tables.sweep("llama-3.2-1b"), tables.sweep("qwen3-4b")
    assert figures("Llama 3.2 1B, 100 steps: all # peaks") == [sum(row.error == 0 for row in llama.values())]
    late = [tables.late_samples_per_s(llama[name]) or 0 for name in ("best_native", "control")]
    assert figures("`best_native` runs at # times the control's speed") == [round(late[0] / late[1], 1)]
    change = tables.perplexity_change(llama["best_native"], llama["control"])
    assert figures("Its perplexity is # % above the control's; its native") == [round(100 * (change or 0), 1)]
    failed = [row for row in qwen.values() if row.status == "out-of-memory"]
    assert len(failed) == 3
    assert all(row.verdict == "does not fit" for row in failed)
    (bound,) = figures("Every measured peak is within # % of the predicted one")
    assert max(abs(row.error) for row in qwen.values() if row.error is not None) * 100 <= bound


def test_page_of_the_budget_in_gib() -> None:
    rows = tables.sweep("llama-3.1-8b")
    none, full, ours = rows["none"], rows["full"], rows["ours 60.7 GiB"]
    assert ours.estimate is not None
    assert figures("Full checkpointing saves # % and makes the step # % slower", BUDGET) == [
        round(less(full, none), 1),
        round(100 * (tables.slower(full, none) or 0), 1),
    ]
    assert less(ours, none) >= less(full, none)
    found = figures("A budget of 60.7 GiB saves as much and makes it # % slower, with # GiB", BUDGET)
    assert found == [
        round(100 * (tables.slower(ours, none) or 0), 2),
        round(ours.estimate.host_bytes / GIB, 2),
    ]
    within = [inside for row in rows.values() if (inside := tables.within_budget(row)) is not None]
    assert all(within)
    count, num_rows, bound = figures(
        "All # budgets hold when measured, and all # predicted peaks are within # %", BUDGET
    )
    assert (count, num_rows) == (len(within), len(rows))
    assert max(abs(row.error or 0) for row in rows.values()) * 100 <= bound


def test_a_row_without_a_measurement_shows_its_prediction_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    row = tables.sweep("qwen3-4b")["amp"]
    waiting = row.model_copy(update={"status": "waiting", "train": None, "measurement": None})
    control = tables.sweep("qwen3-4b")["control"]
    monkeypatch.setattr(tables, "sweep", lambda name: {"control": control, "amp": waiting})
    (line,) = [line for line in tables.memory("qwen3-4b").splitlines() if line.startswith("| `amp` |")]
    assert "| 120.620 | predicted only |" in line


def test_the_earlier_run_of_the_ladder_held_512_bytes_more() -> None:
    found = records("ladder-llama-3.2-1b/records.jsonl")
    predicted = {
        one.recipe_id: one.estimate.peak_allocated_bytes for one in found if one.estimate is not None
    }
    earlier = [one for one in found if one.train is not None and one.created_at < "2026-11-22"]
    more = {
        one.train["peak_memory_bytes"] - predicted[one.recipe_id] for one in earlier if one.train is not None
    }
    (num_bytes,) = more
    pattern = "Of a shorter run on 2026-11-21, # rows are left; each holds # bytes more than predicted"
    assert figures(pattern) == [len(earlier), num_bytes]
