"""A policy's loop: predicted by its phases, and measured."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import RECORDED, Ledger
from trainfit.prediction.machine import machine_of
from trainfit.prediction.predict import predict as predict_step
from trainfit.report.compare import Comparison
from trainfit.report.comparisons import loop_tables
from trainfit.report.html import report_page
from trainfit.report.loop_text import comparison, show
from trainfit.report.sweep import columns
from trainfit.rl.estimate.estimate import estimate, predict
from trainfit.rl.estimate.lengths import Lengths, Recorded, of_micro_batches
from trainfit.rl.estimate.names import UPDATE_PHASES
from trainfit.rl.estimate.recorded import read
from trainfit.rl.estimate.trace import GRAPH_POOL, traced
from trainfit.rl.loop import rollouts_of
from trainfit.rl.measure import measure
from trainfit.rl.rollout import phases
from trainfit.rl.rollout.schedule import of_mean, schedule
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, LoopTime, Measurement
from trainfit.spec.sweep import Row
from trainfit.step import assemble
from trainfit.verification import this_machine
from trainfit.verification.this_machine import _peak_bytes

MODEL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip
GRPO = {
    "name": "grpo", "kl": 0.04, "reference": "copy", "max_prompt": 8, "max_new": 8, "group": 2, "prompts": 3,
    "rollout": {"batch": 4, "kv_cache": "fp32"},
}  # fmt: skip


def recipe(**fields: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": {"config": MODEL, "implementation": "native"}, "precision": "fp32", "objective": GRPO,
        "batch": {"micro": 2, "seq": 16, "accumulate": 3}, "hardware": {"gpu": "cpu"},
        "optimizer": {"implementation": "foreach"},
    }  # fmt: skip
    return recipe_from(merge(base, fields))


@cache
def on_h100() -> tuple[Recipe, Ledger, Estimate]:
    wanted = recipe(
        hardware={"gpu": "h100-sxm"}, precision="bf16", objective={"rollout": {"kv_cache": "bf16"}}
    )
    ledger = traced(wanted, gpu("h100-sxm"))
    return wanted, ledger, estimate(wanted, machine_of(wanted.hardware), ledger)


@cache
def on_cpu() -> tuple[Estimate, Measurement]:
    wanted = recipe()
    return predict(wanted, use_cache=False), measure(wanted, steps=1, device="cpu")


def test_the_phases_predicted_are_those_measured() -> None:
    predicted, measured = on_cpu()
    assert predicted.loop is not None
    assert measured.loop is not None, measured.message
    assert predicted.phases == measured.phases
    assert predicted.peak_allocated_bytes == measured.peak_allocated_bytes
    for one, other in zip(predicted.loop.memory, measured.loop.memory, strict=True):
        assert one.phase == other.phase
        assert one.peak_allocated_bytes == pytest.approx(other.peak_allocated_bytes, rel=2e-3), one.phase
    assert measured.loop.longest is not None
    names = [one.name for one in measured.loop.longest.parts]
    assert names == ["gather", "prefill", "decode", "scoring", "reference", "update"]
    assert measured.step_s is not None
    assert measured.loop.expected is not None
    assert predicted.loop.expected is None  # The times of a CPU are not known.
    assert measured.loop.expected.mean_new == 4
    assert all(taken > 0 for taken in measured.loop.expected.by_phase().values())


def test_measured_completions_end_at_their_lengths() -> None:
    step = assemble(recipe(), torch.device("cpu"))
    generator = phases.generator_of(step, phases.sampling_of(step.recipe, ()))
    with phases.generating(step):
        found = list(generator.completions([[1] * 8] * 6, lengths=[8, 1, 3, 8, 2, 8]))
        whole = list(generator.completions([[1] * 8] * 6))
    assert [len(one.tokens) for one in found] == [8, 1, 3, 8, 2, 8]
    for one, other in zip(found, whole, strict=True):
        assert one.tokens == other.tokens[: len(one.tokens)]


def test_a_report_shows_the_phases_of_a_loop() -> None:
    _, _, predicted = on_h100()
    _, measured = on_cpu()
    assert measured.loop is not None
    assert predicted.loop is not None
    both = Comparison(recipe(), predicted, measured)
    errors = both.loop_errors()
    assert {
        "loop.rollout.peak_allocated_bytes",
        "loop.longest.decode",
        "loop.longest",
        "loop.expected",
    } <= set(errors)
    longest = [one.loop.longest for one in (predicted, measured) if one.loop]
    seconds = [one.seconds for one in longest if one]
    assert errors["loop.longest"] == pytest.approx(seconds[0] / seconds[1] - 1)
    titles = [title for title, _ in comparison(predicted.loop, measured.loop)]
    assert len(titles) == 3
    assert any("| decode |" in one for one in loop_tables([both]))
    assert "loop.longest.decode" in report_page([both])
    row = Row(
        variant="one", recipe=recipe().content(), recipe_id="0", status="done", estimate=predicted,
        measurement=measured,
    )  # fmt: skip
    assert row.expected_error == pytest.approx(errors["loop.expected"])
    assert {"loop error", "expected loop error"} <= {one.title for one in columns([row])}


def test_the_cache_is_a_category_of_every_phase() -> None:
    predicted, measured = on_cpu()
    assert predicted.loop is not None
    assert measured.loop is not None
    # Keys and values of 5 layers, 4 slots, 2 heads, 64 positions, 16 dimensions, fp32.
    assert measured.loop.cache_bytes == 2 * 5 * 4 * 2 * 64 * 16 * 4
    for one in predicted.loop.memory:
        assert one.breakdown is not None
        assert one.breakdown.kv_cache >= measured.loop.cache_bytes
        assert one.breakdown.total == one.peak_allocated_bytes


def test_a_copy_of_the_reference_is_counted_for_every_layer() -> None:
    with_copy, without = (
        predict(recipe(objective={"reference": reference}), use_cache=False).phases.after_init
        for reference in ("copy", "none")
    )
    assert with_copy == 2 * without - 512  # RoPE's frequencies are not copied.


def test_the_graph_of_decoding_has_a_pool_and_workspaces_of_its_own() -> None:
    _, ledger, found = on_h100()
    phases = [one.phase for one in ledger.segments if one.step == "first"]
    assert phases.count(RECORDED) == 1
    assert any(one.stream == GRAPH_POOL for one in ledger.storages)
    assert found.loop is not None
    rollout = found.loop.memory[0]
    assert rollout.breakdown is not None
    # The main thread's, autograd's, the warm-up's and the recording's: 32 MiB each on Hopper.
    assert rollout.breakdown.workspace == 4 * (32 << 20)


def test_the_update_is_that_of_the_step_alone() -> None:
    wanted, _, found = on_h100()
    alone = predict_step(wanted, use_cache=False)
    assert found.model_flops == alone.model_flops
    assert found.step_s == pytest.approx(alone.step_s, rel=1e-6)
    assert found.phases.steady.forward > alone.phases.steady.forward  # The cache is there, too.


def test_parts_sum_to_the_loop() -> None:
    _, _, found = on_h100()
    assert found.loop is not None
    for time in (found.loop.longest, found.loop.expected):
        assert time is not None
        assert sum(one.seconds for one in time.parts) == pytest.approx(time.seconds)
        assert sum(time.share(one) for one in time.parts) == pytest.approx(1)
    calls = {one.name: one.calls for one in found.loop.longest.parts} if found.loop.longest else {}
    # Six completions, four at a time: two reads of prompts, and seven more tokens of each.
    assert calls["prefill"] == 2
    assert calls["decode"] == 14
    assert calls["scoring"] == calls["reference"] == 3
    assert calls["update"] == 1


def test_decoding_is_priced_by_what_is_filled() -> None:
    wanted, ledger, found = on_h100()
    short = estimate(wanted, machine_of(wanted.hardware), ledger, 2.0)
    assert found.loop is not None
    assert short.loop is not None
    assert short.loop.longest == found.loop.longest
    assert short.loop.expected is not None
    assert found.loop.longest is not None
    assert short.loop.expected.mean_new < found.loop.longest.mean_new
    assert short.loop.expected.seconds < found.loop.longest.seconds


def test_levers_are_the_difference_of_peaks() -> None:
    _, _, found = on_h100()
    assert found.loop is not None
    state, cache = found.loop.levers
    assert state.moved.startswith("optimizer state")
    assert state.during == "rollout and scoring"
    assert state.seconds > 0
    assert cache.num_bytes == found.loop.memory[0].breakdown.kv_cache  # pyright: ignore[reportOptionalMemberAccess]
    assert all(0 <= one.lower_bytes <= one.num_bytes for one in found.loop.levers)


def test_the_transformers_implementation_has_an_update_alone() -> None:
    found = predict(recipe(model={"implementation": "hf"}, objective={"kl": 0}), use_cache=False)
    assert found.loop is None
    assert any("the update alone is predicted" in one for one in found.warnings)
    assert set(UPDATE_PHASES) <= set(dict(found.phases.steady))


def test_slots_take_the_next_prompt_when_the_look_finds_them_free() -> None:
    # Looked at every 8 steps: the short ones end in step 1, and their slots wait until step 8.
    calls = schedule(2, [4] * 3, [2, 9, 2], 9)
    assert calls.prefills == (2, 1)
    assert calls.steps == 16
    assert calls.kept == 13
    every = schedule(4, [8] * 6, [8] * 6, 8)
    assert (every.prefills, every.steps) == ((4, 2), 14)
    # Steps read 9 to 15 positions of live slots; in the second round two slots stay at their 15.
    assert every.positions == pytest.approx((7 * 4 * 12 + 7 * 2 * 12 + 7 * 2 * 16) / 14)


@pytest.mark.parametrize("mean", [1.0, 20.0, 64.0, 120.0, 128.0])
def test_lengths_have_their_mean(mean: float) -> None:
    lengths = of_mean(mean, 128, 1000)
    assert sum(lengths) / 1000 == pytest.approx(mean, rel=0.03, abs=0.5)
    assert all(1 <= one <= 128 for one in lengths)


def test_micro_batches_are_as_long_as_their_longest_row() -> None:
    wanted = recipe(
        batch={"micro": 2, "seq": 256, "accumulate": 3}, objective={"max_prompt": 64, "max_new": 192},
        hardware={"gpu": "h100-sxm"},
    )  # fmt: skip
    # Rows of 70 and 100, 74 and 200, 65 and 66 tokens: 128, 256 and 128 positions.
    filled = of_micro_batches(wanted, [Lengths([64] * 6, [6, 36, 10, 136, 1, 2])])
    assert filled.computed == pytest.approx((128 + 256 + 128) / 3 / 256)
    assert filled.computed_squares == pytest.approx((128**2 + 256**2 + 128**2) / 3 / 256**2)
    assert filled.needed == pytest.approx((70 + 100 + 74 + 200 + 65 + 66) / 6 / 256)
    compiled = of_micro_batches(wanted.model_copy(update={"compile": "block"}), [Lengths([64] * 6, [2] * 6)])
    assert compiled.computed == 1
    assert compiled.needed == pytest.approx(66 / 256)


def test_two_updates_on_two_ranks_group_the_lengths_as_training_does() -> None:
    wanted = recipe(
        batch={"micro": 1, "seq": 256, "accumulate": 2}, hardware={"gpu": "h100-sxm", "count": 2},
        objective={"max_prompt": 64, "max_new": 192, "prompts": 4, "updates_per_rollout": 2},
        parallel={"shard": 2},
    )  # fmt: skip
    # Numbers 0 1 | 4 5 are rank 0's, 2 3 | 6 7 rank 1's; the longer row of each pair decides.
    filled = of_micro_batches(wanted, [Lengths([64] * 8, [1, 1, 192, 1, 1, 1, 1, 65])])
    assert filled.computed == pytest.approx((256 + 128 + 128 + 192) / 4 / 256)


@cache
def of_lengths(seq: int, new: int) -> tuple[LoopTime, LoopTime]:
    """Return the longest time, and that of completions with ``new`` tokens each."""
    wanted = recipe(
        batch={"micro": 2, "seq": seq, "accumulate": 3}, objective={"max_prompt": 64, "max_new": seq - 64},
        hardware={"gpu": "h100-sxm"},
    )  # fmt: skip
    ledger = traced(wanted, gpu("h100-sxm"))
    recorded = Recorded("given", (Lengths([64] * 6, [new] * 6),))
    found = estimate(wanted, machine_of(wanted.hardware), ledger, recorded=recorded).loop
    assert found is not None
    assert found.longest is not None
    assert found.expected is not None
    return found.longest, found.expected


def test_short_completions_take_the_flops_of_a_shorter_recipe() -> None:
    longest, short = of_lengths(512, 64)
    shorter, _ = of_lengths(128, 64)
    for name in ("scoring", "reference", "update"):
        full, one, other = (
            next(part for part in time.parts if part.name == name) for time in (longest, short, shorter)
        )
        assert one.hardware_flops == pytest.approx(other.hardware_flops, rel=0.01), name
        assert one.model_flops == pytest.approx(other.model_flops, rel=0.01), name
        assert one.tokens == other.tokens == full.tokens / 4


def test_padding_is_in_hfu_alone() -> None:
    _, padded = of_lengths(512, 129)  # 193 tokens in 256 positions
    update = next(part for part in padded.parts if part.name == "update")
    assert update.mfu is not None
    assert update.hfu is not None
    # Products are in proportion to the tokens, attention to their squares.
    assert (193 / 256) ** 2 < update.mfu / update.hfu < 193 / 256
    assert "longest row" in padded.lengths


def test_completions_at_their_longest_take_the_longest_time() -> None:
    longest, found = of_lengths(128, 64)
    assert found.parts == longest.parts


def test_counts_that_train_refuses_are_not_predicted() -> None:
    wanted = recipe(batch={"accumulate": 2})
    for refusing in (predict, rollouts_of):
        with pytest.raises(InputError, match=r"6 completions.*4 sequences") as refused:
            refusing(wanted)
        assert refused.value.remedy == "write batch.accumulate: 3"


def test_the_check_before_a_run_counts_the_cache_of_keys_and_values() -> None:
    found, _ = on_cpu()
    assert found.loop is not None
    assert found.breakdown.kv_cache >= found.loop.cache_bytes
    assert _peak_bytes(recipe(), deterministic=False) == found.peak_allocated_bytes + found.host_bytes


def test_a_loop_that_does_not_fit_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "available_bytes", lambda: 1 << 20)
    with pytest.raises(InputError, match="the loop takes") as refused:
        this_machine.check_memory(recipe(), "cpu", evaluates=64)
    assert "objective.rollout.batch" in refused.value.remedy


def run_folder(folder: Path, **changed: Any) -> Path:
    """Write the logs of a run with three rollouts of two updates, the first one slow."""
    lengths = {"prompt_lengths": [8, 4, 8, 8, 2, 8], "lengths": [8, 1, 3, 8, 8, 2]}
    rollouts = [
        {"kind": "rollout", "step": 2 * number + 1, "rollout_s": 2.0 if number else 9.0, "scoring_s": 0.5}
        | lengths | changed
        for number in range(3)
    ]  # fmt: skip
    steps = [{"kind": "step", "step": number, "step_s": 0.25} for number in range(1, 7)]
    for name, lines in (("rollouts.jsonl", rollouts), ("log.jsonl", steps)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_runs_lengths_are_predicted_and_compared_with_its_times(tmp_path: Path) -> None:
    wanted = recipe(objective={"updates_per_rollout": 2}, batch={"micro": 1}, hardware={"gpu": "h100-sxm"})
    recorded = read(run_folder(tmp_path), wanted)
    assert len(recorded.rollouts) == 2
    assert recorded.measured is not None
    assert recorded.measured.by_phase() == {"rollout": 2.0, "scoring": 0.5, "update": 0.5}
    assert recorded.measured.mean_new == 5
    found = estimate(wanted, machine_of(wanted.hardware), traced(wanted, gpu("h100-sxm")), recorded=recorded)
    assert found.loop is not None
    assert found.loop.expected is not None
    assert found.loop.expected.mean_new == 5
    out = io.StringIO()
    show(Console(file=out, width=100), found.loop, wanted)
    assert "The same rollouts as the run measured them" in out.getvalue()
    (tmp_path / "log.jsonl").unlink()
    assert read(tmp_path / "rollouts.jsonl", wanted).measured is None


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"lengths": []}, "recorded no lengths"),
        ({"lengths": [9] * 6}, "objective.max_new is 8"),
        ({"lengths": [1] * 4}, "4 completions a rollout"),
        ({"lengths": ["1"] * 6}, "not lengths"),
    ],
)
def test_lengths_of_another_recipe_are_refused(tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read(run_folder(tmp_path, **changed), recipe())
