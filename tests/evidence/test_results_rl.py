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


def test_the_edge_of_memory_is_judged_right() -> None:
    found = rl_phases.pairs("frontier")
    for one in found:
        assert one.predicted.fits == (one.measured.status == "done")
    fitting = max(one.measured.peak_allocated_bytes or 0 for one in found if one.predicted.fits)
    check(PAGE, r"The last that fits takes # of 79.2 GiB", [fitting / GIB])
    assert sum(not one.predicted.fits for one in found) == 1
    open_ones = [
        one.estimate.peak_allocated_bytes / GIB
        for one in read_jsonl(RESULTS / "rl-phases" / "frontier-predicted.jsonl")
        if one.estimate is not None and one.recipe_id not in {other.record.recipe_id for other in found}
    ]
    check(PAGE, r"Two settings of # and # GiB", sorted(open_ones))


def test_updates_that_wait_for_the_host() -> None:
    """The first and the third setting, and all weights on two GPUs, ran on idle hosts."""
    one, two = rl_phases.pairs("one-gpu"), rl_phases.pairs("two-gpus")
    ratios = []
    for pair in (one[0], one[2], *two[:2]):
        ours, theirs = (loop.longest for loop in pair.loops())
        assert ours is not None
        assert theirs is not None
        update = [
            next(part.seconds for part in time.parts if part.name == "update") for time in (ours, theirs)
        ]
        ratios.append(update[1] / update[0])
    check(PAGE, r"needed # to # times the predicted time", [min(ratios), max(ratios)])


def test_preferences_within_two_percent() -> None:
    found = (*rl_phases.pairs("preferences-one-gpu"), *rl_phases.pairs("preferences-two-gpus"))
    assert len(found) == 6
    for one in found:
        measured = one.measured.peak_allocated_bytes
        assert measured
        assert one.predicted.peak_allocated_bytes == pytest.approx(measured, rel=0.0001)


def test_a_policy_that_compares_all_moves_of_a_rollout() -> None:
    rows = xiangqi.rollouts("third")
    legal = [one["parts"]["legal"] for one in rows]
    (before,) = (one["shares"]["legal"] for one in xiangqi.evaluations() if one["run"] == "third")
    check(PAGE, r"From # % its rollouts rose as fast, to # % in 50 steps",
          [100 * before, 100 * sum(legal[45:55]) / 10])  # fmt: skip
    check(PAGE, r"and stood at # % in steps # to #",
          [100 * sum(legal[-20:]) / 20, rows[-20]["step"], rows[-1]["step"]])  # fmt: skip
    check(PAGE, r"too few positions \(# here\)", [1792 * len(rows)])
    rewards = sorted(one["reward_s"] for one in rows)
    check(PAGE, r"the rules in 14 worker processes took # s", [rewards[len(rewards) // 2]])
