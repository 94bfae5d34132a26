"""The figures in the sentences of docs/results/plan.md are those of the records."""

import pytest

from benchmarks.tables import plan, plan_choices
from page_claims import check

pytest.importorskip("peft")
pytest.importorskip("torchao")


PAGE = "docs/results/plan.md"


def test_the_choices_that_were_measured() -> None:
    every = plan_choices.choices()
    fitting = [one for one in every if one.fits]
    assert all(one.first is not None and one.first.status == "done" for one in fitting)
    assert all(one.first in one.within for one in fitting)
    shares = {(one.goal.model, one.cap_gib): one.share or 0.0 for one in fitting}
    good = sum(share >= 0.97 for share in shares.values())
    check(PAGE, r"# of # first choices reach 97 % of the fastest", (good, len(shares)))
    (worst,) = (key for key, share in shares.items() if share < 0.97)
    assert worst == ("mistral-7b-v0.1", 24)
    check(PAGE, r"Mistral in 24 GiB reaches # %", (100 * shares[worst],))
    whole = {key: len(one.within) for key, one in zip(shares, fitting, strict=True)}
    for names, sentence in (
        (("gemma-2b", "pythia-2.8b"), "nearly whole: # to # recipes within a limit"),
        (("qwen2.5-0.5b", "llama-3.2-1b", "mistral-7b-v0.1", "qwen3-14b"), "models, # to # recipes within"),
    ):
        counts = [count for (name, _), count in whole.items() if name in names]
        check(PAGE, sentence, (min(counts), max(counts)))
    for one in fitting:
        if one.goal.model in ("gemma-2b", "pythia-2.8b"):
            assert one.best == max(each.tokens_per_s or 0.0 for each in one.own if each in one.within)
    gemma = next(one.goal for one in every if one.goal.model == "gemma-2b")
    speeds = {round(one.tokens_per_s or 0.0) for one in plan_choices.measured(gemma).values()}
    assert {22602, 32352, 33382} <= speeds
    check(PAGE, "for Gemma reached #, # and # tokens/s", (22602, 32352, 33382))


def test_planned_recipes_are_faster_than_the_trainer() -> None:
    runs = plan_choices.trainer_rows()
    assert {row["status"] for row in runs} == {"done", "timeout"}
    for one in plan_choices.choices():
        if one.cap_gib == max(one.goal.caps_gib) and one.goal.tune != "qlora":
            speeds = [row.get("tokens_per_s", 0.0) for row in runs if row["model"] == one.goal.model]
            assert one.first is not None
            assert (one.first.tokens_per_s or 0.0) > max(speeds) > 0


def test_the_first_choice_is_nearly_as_fast_as_the_best() -> None:
    shares = [
        share for some in plan.groups().values() for cap in plan.CAPS_GIB if (share := plan.kept(some, cap))
    ]
    assert len(shares) == 10
    check(PAGE, "is at least # % as fast as the best measured", [100 * min(shares)])
    check(PAGE, "limits; # % is the goal", [97])
    assert min(shares) >= 0.97
    for some in plan.groups().values():
        pairs, right = plan.ordered(some)
        assert right >= 0.96 * pairs
