"""Answers say what was assumed, mark what cannot be had, and name the option that lifts a limit."""

import io
import re
from typing import Any

import pytest

import trainfit
from trainfit.api.results import drawn
from trainfit.planning.answer import Result
from trainfit.planning.estimates import Estimates
from trainfit.planning.search.candidate import Candidate, Combinations, Goal, Traced
from trainfit.report import gpus
from trainfit.report.console import progress
from trainfit.report.plan_text import show as show_plan
from trainfit.report.precision import meaning
from trainfit.report.words import assumed
from trainfit.spec.plan import Found, Plan
from trainfit.spec.result import Estimate, OnGpu
from trainfit.spec.units import GIB


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {},
            "GPU h200, batch 1 x 1,024 tokens, bf16, adamw on all weights: not given; "
            "--gpu, --batch, --seq, --precision, --lora",
        ),
        (
            {"gpu": "b200", "seq": 64, "precision": "bf16"},
            "1 sequence in a micro-batch, adamw on all weights",
        ),
        (
            {"gpu": "b200", "set": ["batch.micro=2"], "adapter": "lora", "precision": "bf16"},
            "sequences of 1,024",
        ),
        ({"gpu": "b200", "batch": {"micro": 2, "seq": 64}, "precision": "bf16", "adapter": "lora"}, ""),
    ],
)
def test_what_was_not_given_is_said(fields: dict[str, Any], text: str) -> None:
    found = assumed(trainfit.load_recipe("gpt2", **fields))
    assert found.startswith(text)
    assert bool(found) == bool(text)


def test_bf16_says_what_pretraining_usually_has() -> None:
    usual = "pretraining usually has some: --precision bf16-master"
    assert usual in meaning(trainfit.load_recipe("gpt2"))
    assert usual not in meaning(trainfit.load_recipe("gpt2", precision="amp-bf16"))
    assert usual not in meaning(trainfit.load_recipe("gpt2", adapter="lora"))


def test_speed_and_cost_of_what_does_not_fit_are_marked() -> None:
    large, small = (trainfit.predict("gpt2", gpu="t4", set=[f"batch.micro={n}"]) for n in (64, 1))
    assert not large.fits
    assert str(large).count("if it fitted: ") == 2
    assert "fitted" not in str(small)
    compared = [
        OnGpu(gpu=one.recipe.hardware.gpu, estimate=Estimate.model_construct(**dict(one)))
        for one in (large, small)
    ]
    table = drawn(lambda out: gpus.show(large.recipe, compared, None, out=out), 80)
    dollars = [f"{one.cost.per_million_tokens:.4g}" for one in (large, small) if one.cost]
    assert f"({dollars[0]})" in table
    assert "(cost) if it fitted" in table
    for one in (large, small):  # The capacity stays on a narrow terminal.
        assert f"{one.peak_device_bytes / GIB:.1f} of {one.device_bytes / GIB:.1f}" in table


def test_a_plan_that_only_the_hosts_limit_forbids_says_so_first() -> None:
    recipe = trainfit.load_recipe("gpt2", gpu="rtx-4090")
    candidate = Candidate(0.0, 0.0, (), '"full"', 1, 1)
    own = trainfit.predict(recipe)
    estimate = Estimate.model_construct(**{**dict(own), "host_bytes": 34 * GIB + 1})
    one = Traced(candidate, Result(recipe, estimate))
    combinations = Combinations(recipe, Goal(), Estimates(0))
    assert not combinations.fits(one)
    assert combinations.fits_but_for_host(one)
    assert Combinations(recipe, Goal(host_bytes=35 * GIB), Estimates(0)).fits(one)
    found = Found(recipe=recipe.content(), changes=("offload.weights: true",), numerics=(), estimate=estimate)
    plan = Plan.model_construct(
        given=recipe.content(), limit_bytes=24 * GIB, host_limit_bytes=24 * GIB, margin=0.02, found=(),
        frontier=(found,), over_host=found, least=found, rejected=(), num_traced=1, num_ranked=0,
        keep_quality=False, assumed="", largest=None, run_tokens=None, tokens_per_step=None,
    )  # fmt: skip
    lines = drawn(lambda out: show_plan(plan, out=out), 110).splitlines()
    assert lines[0].startswith("FITS ON rtx-4090, BUT NOT IN 24.00 GiB OF HOST MEMORY: gpt2")
    assert lines[1].startswith("  try      --host-memory-gib 35, if the host has it")
    with pytest.raises(ValueError, match="over_host would, with 34.00 GiB"):
        _ = plan.best


@pytest.mark.parametrize(("attention", "flag"), [("cudnn", " --no-deterministic"), ("sdpa", "")])
def test_a_plan_says_how_its_recipe_trains(attention: str, flag: str, tmp_path: Any) -> None:
    """Training repeats bit by bit by default, which cuDNN's attention does not."""
    recipe = trainfit.load_recipe("gpt2", gpu="h100-sxm", attention=attention)
    found = Found(recipe=recipe.content(), changes=(), numerics=(), estimate=trainfit.predict(recipe))
    plan = Plan.model_construct(
        given=recipe.content(), limit_bytes=79 * GIB, host_limit_bytes=79 * GIB, margin=0.02, found=(found,),
        frontier=(found,), over_host=None, least=None, rejected=(), num_traced=1, num_ranked=0,
        keep_quality=False, assumed="", largest=None, run_tokens=None, tokens_per_step=None,
    )  # fmt: skip
    path = tmp_path / "plan.yaml"
    shown = drawn(lambda out: show_plan(plan, file=path, out=out), 300)
    assert f"written to {path}: trainfit train {path}{flag}\n" in shown


def test_progress_without_a_terminal_is_a_line_within_a_second(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    with (tmp_path / "errors").open("w") as file:
        monkeypatch.setattr("sys.stderr", file)
        with progress("tracing"):
            time.sleep(1.0)
    assert re.match(r"tracing \([01] s\)\n", (tmp_path / "errors").read_text())
    monkeypatch.setattr("sys.stderr", io.StringIO())  # No descriptor: nobody watches.
    with progress("tracing") as say:
        say("more")
