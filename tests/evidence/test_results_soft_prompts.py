"""Figures in the sentences of evidence/pages/soft-prompts.md against the records."""

from evidence.scripts.tables import soft_prompts as tables
from page_claims import check
from trainfit.bench.experiments import soft_prompts as experiment

PAGE = "evidence/pages/soft-prompts.md"
ENDS = tables.ends("cpu")


def test_layers_learn_at_small_rates() -> None:
    alone = [ENDS[name, 0.001] for name in ("prompt", "prefix")]
    check(PAGE, "prompt tuning ends at a loss of # and prefix tuning at #", alone)
    check(PAGE, "with layers they end at # and #", [ENDS["p-tuning, mlp", 0.001], ENDS["prefix, mlp", 0.001]])


def test_at_larger_rates_the_tokens_alone_end_where_the_layers_do() -> None:
    for rate in (0.03, 0.1, 0.3):
        assert abs(ENDS["prompt", rate] - ENDS["p-tuning, mlp", rate]) < 0.02
        assert ENDS["prefix", rate] < ENDS["prefix, mlp", 0.001] + 0.02
    assert ENDS["prefix, mlp", 0.3] > 2


def test_the_bound() -> None:
    check(PAGE, "a model that knows the rule reaches #", (experiment.bound(experiment.FULL["cpu"]),))


def test_on_a_gpu_layers_matter_at_the_low_rate_alone() -> None:
    check(PAGE, "of which the least possible loss is #", (experiment.bound(experiment.FULL["cuda"]),))
    ends = tables.ends("cuda")
    for layers in ("p-tuning, mlp", "p-tuning, lstm", "prefix, mlp"):
        assert ends[layers, 0.001] < 0.8
    assert ends["prompt", 0.001] > 2.4
    assert ends["prefix", 0.001] > 3.6
    assert ends["prompt", 0.01] < 0.8 < 0.9 < ends["prefix", 0.01]
    assert ends["prefix", 0.03] < 0.8
    assert ends["prefix, mlp", 0.3] > 3


def test_what_is_kept_is_the_closed_form() -> None:
    found = tables.sweep("soft-prompts")
    for name in ("prompt", "prefix"):
        estimate = found[name].estimate
        assert estimate is not None
        assert estimate.trainable_params == tables.KEPT[name]  # Without layers nothing else trains.
