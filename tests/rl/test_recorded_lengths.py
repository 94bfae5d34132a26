"""Lengths that training records: in a run's folder, and in the record of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_policies import options_for, policy, trained
from trainfit.rl.estimate.recorded import read
from trainfit.spec.sweep import Row, TrainPart
from trainfit.sweeps.parts import PartRequest
from trainfit.sweeps.trial import _train


def test_a_run_records_its_lengths_and_times(tmp_path: Path) -> None:
    recipe = policy()
    trained(recipe, options_for(tmp_path, steps=6))
    recorded = read(tmp_path, recipe)
    assert len(recorded.rollouts) == 2  # Without the first of three
    for one in recorded.rollouts:
        assert len(one.prompts) == len(one.completions) == 8
        assert all(1 <= length <= 6 for length in one.completions)
    assert recorded.measured is not None
    assert all(taken > 0 for taken in recorded.measured.by_phase().values())
    lengths = [length for one in recorded.rollouts for length in one.completions]
    assert recorded.measured.mean_new == pytest.approx(sum(lengths) / 16)


def test_a_sweep_trains_a_policy_and_records_its_rollouts(tmp_path: Path) -> None:
    recipe = policy()
    part = TrainPart(steps=4, data="stories", eval_fraction=0.05, eval_sequences=4)
    request = PartRequest(
        part="train", variant="one", recipe=recipe, device="cpu", timeout_s=60.0, train=part
    )
    result = _train(request, tmp_path)
    assert result.outcome.status == "done"
    assert result.train is not None
    assert [len(one["lengths"]) for one in result.train["rollouts"]] == [8, 8]
    # A rollout's time is that of the step that begins to train on it.
    rollout, speed = result.train["rollouts"][1], result.train["speed"]
    assert speed["step_s"][2] > rollout["rollout_s"] + rollout["scoring_s"]
    row = Row(variant="one", recipe=recipe.content(), recipe_id=recipe.id, status="done", train=result.train)
    assert row.reward == result.train["eval_reward"] is not None
    assert row.samples == 4
