"""Figures in sentences on a policy's loop are those of the records."""

import pytest

from evidence.scripts.tables import rl_phases, xiangqi
from evidence.scripts.tables.joined import RESULTS
from page_claims import check
from trainfit.records import read_jsonl
from trainfit.spec.units import GIB

PAGE = "evidence/pages/reinforcement-learning.md"


def test_a_policys_update_and_training_on_data() -> None:
    speeds = {
        one.recipe.objective.name: one.measured.tokens_per_s or 0.0
        for one in rl_phases.pairs("updates-14b-h100")
        if one.recipe.adapter is not None
    }
    check(PAGE, r"the policy's update reaches # % of its tokens", [100 * speeds["grpo"] / speeds["pretrain"]])


def test_what_an_h200_is_predicted_to_take() -> None:
    found = {
        (one.recipe["adapter"] is not None, one.recipe["recompute"]): one.estimate
        for one in read_jsonl(RESULTS / "rl-phases" / "updates-14b-h200-predicted.jsonl")
        if one.recipe["objective"]["name"] == "grpo"
    }
    lora, whole = found[True, "none"], found[False, "full"]
    assert lora is not None
    assert lora.mfu is not None
    assert whole is not None
    assert whole.mfu is not None
    memory_gib, mfu = lora.peak_allocated_bytes / GIB, [100 * lora.mfu, 100 * whole.mfu]
    check(PAGE, r"16 x 1,024 tokens take # GiB, which an H100 does not have; an H200 does, where # % MFU",
          [memory_gib, mfu[0]])  # fmt: skip
    check(PAGE, r"fits on an H200 alone, at # % predicted", mfu[1:])


def test_peaks_within_two_percent() -> None:
    found = rl_phases.settings()
    assert len(found) >= 12
    assert {one.recipe.hardware.count for one in found} == {1, 2}
    assert max(abs(one.peak_error()) for one in found) < 0.02


def test_groups_that_teach_nothing() -> None:
    last = [one["equal_groups"] for one in xiangqi.rollouts("first")[-20:]]
    check(PAGE, r"# % of the groups\shave equal rewards in its last 20 rollouts", [100 * sum(last) / 20])
    mixed = [1 - one["equal_groups"] for one in xiangqi.rollouts("second")[-20:]]
    assert sum(mixed) / 20 == pytest.approx(0.5, abs=0.05)
