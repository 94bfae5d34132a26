"""Figures in sentences on a policy's loop are those of the records."""

import pytest

from evidence.scripts.tables import rl_phases, xiangqi
from evidence.scripts.tables.joined import RESULTS
from page_claims import check
from trainfit.records import read_jsonl
from trainfit.spec.units import GIB

PAGE = "evidence/pages/reinforcement-learning.md"


def _speed(name: str, objective: str, *, adapter: bool, recompute: str) -> float:
    """Return the measured tokens a second of one update."""
    (found,) = (
        one.measured.tokens_per_s
        for one in rl_phases.pairs(name)
        if one.recipe.objective.name == objective
        and (one.recipe.adapter is not None) == adapter
        and one.recipe.recompute == recompute
    )
    assert found
    return found


def test_a_policys_update_and_training_on_data() -> None:
    shares = []
    for adapter, recompute in ((False, "full"), (True, "none"), (True, "full")):
        ours, data = (
            _speed("updates-14b-h200", name, adapter=adapter, recompute=recompute)
            for name in ("grpo", "pretrain")
        )
        shares.append(100 * ours / data)
    check(PAGE, r"a policy's update has at least # % of the tokens a second", [min(shares)])
    assert min(shares) >= 97
    ours, data = (
        _speed("updates-14b-h100", name, adapter=True, recompute="full") for name in ("grpo", "pretrain")
    )
    check(PAGE, r"in the backward, # %\.", [100 * ours / data])


def test_shares_of_the_peak_on_h200s() -> None:
    shares = {}
    for one in rl_phases.pairs("updates-14b-h200"):
        if one.recipe.objective.name == "grpo":
            assert one.predicted.step_s
            assert one.predicted.mfu
            assert one.predicted.hfu
            assert one.measured.step_s
            longer = 100 * one.predicted.step_s / one.measured.step_s
            shares[one.recipe.adapter is not None, one.recipe.recompute] = (
                one.predicted.mfu * longer,
                one.predicted.hfu * longer,
            )
    whole, fast, small = shares[False, "full"], shares[True, "none"], shares[True, "full"]
    assert whole[0] >= 45
    assert whole[1] >= 60
    assert fast[0] >= 48
    check(
        PAGE, r"full recomputation reaches # % MFU and # % HFU, and LoRA over nf4 # % MFU", [*whole, fast[0]]
    )
    check(PAGE, r"without recomputation,\s# % with it", [small[0]])
    busy = "docs/tasks/busy.md"
    check(busy, r"with full recomputation # % MFU and # % HFU; LoRA over nf4 # % and # % with it, # % MFU by",
          [*whole, *small, fast[0]])  # fmt: skip
    (memory,) = (
        one.measured.peak_allocated_bytes
        for one in rl_phases.pairs("updates-14b-h200")
        if one.recipe.objective.name == "grpo" and one.recipe.recompute == "none"
    )
    assert memory
    check(PAGE, r"16 x 1,024 tokens take # GiB, which an H100 does not have", [memory / GIB])


def test_loops_with_lengths_of_their_own_within_ten_percent() -> None:
    found = rl_phases.own_lengths()
    assert len(found) == 2
    for _, _, ours, theirs in found:
        assert 100 < theirs.mean_new < 448
        assert ours.seconds == pytest.approx(theirs.seconds, rel=0.1)


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
