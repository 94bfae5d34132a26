"""The search: what it returns fits, is the fastest it traced, and takes a bounded number of traces."""

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import counted_calls
from planned_recipe import CONFIG, MODEL, VARIED, recipe
from trainfit.api.plans import Plan as PrintedPlan
from trainfit.api.plans import plan_recipe
from trainfit.cli.main import main
from trainfit.planning.advice import changes_that_fit
from trainfit.planning.answer import Request, Result
from trainfit.planning.estimates import Estimates
from trainfit.planning.search.candidate import Combinations, Goal
from trainfit.planning.search.search import plan as search
from trainfit.prediction.predict import predict
from trainfit.report.plan_text import frontier_panel
from trainfit.spec.parsing.recipe_file import load_recipe, recipe_from, written
from trainfit.spec.plan import Plan
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import GIB, MIB


def planned(tokens_per_step: int = 2**14, **options: Any) -> PrintedPlan:
    return plan_recipe(recipe(), (), vary=VARIED, processes=0, tokens_per_step=tokens_per_step, **options)


@pytest.fixture(scope="module")
def free() -> PrintedPlan:
    return planned()


def test_the_best_is_as_predicted_and_is_written_unchanged(free: Plan, tmp_path: Path) -> None:
    estimate = free.found[0].estimate
    assert predict(free.best).peak_device_bytes == estimate.peak_device_bytes
    path = tmp_path / "plan.yaml"
    path.write_text(written(free.best))
    assert load_recipe(path).id == free.best.id == estimate.recipe_id
    assert free.best.batch.tokens == 2**14


def test_a_notebook_shows_bars_and_the_frontier(free: PrintedPlan) -> None:
    shown = free._repr_html_()
    (picture,) = re.findall(r'base64,([^"]+)"', shown)
    drawing = base64.b64decode(picture).decode()
    sizes = [one.estimate.peak_device_bytes for one in free.frontier]
    inside = [size for size in sizes if size <= 1.15 * free.limit_bytes]
    places = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', drawing)]
    limit = float(re.findall(r'<line x1="([\d.]+)" x2="\1"', drawing)[0])
    left = float(re.findall(r'<line x1="([\d.]+)" x2="752', drawing)[0])
    per_byte = (limit - left) / free.usable_bytes
    assert places == pytest.approx([left + size * per_byte for size in inside], abs=0.2)
    for number, one in enumerate(free.frontier, 1):
        assert f">{number}</th>" in shown
        assert f"{one.estimate.tokens_per_s:,.0f} tokens/s" in shown
    labels = [text for one in frontier_panel(free).series for text in one.text]
    assert len(labels) == len(set(labels)) == sum(s <= 1.15 * free.limit_bytes for s in sizes)
    (limit,) = frontier_panel(free).limits
    assert limit == free.usable_bytes / 2**30


def test_a_repeated_plan_traces_nothing_and_is_the_same(free: Plan) -> None:
    with Estimates(0) as estimates:
        again, calls = counted_calls.of(search, recipe(), Goal(tokens_per_step=2**14, vary=VARIED), estimates)
    assert estimates.num_traced == 0
    assert again.found == free.found
    assert calls < 3_000_000, calls


class LargerExactly(Estimates):
    """Estimates whose exact ones of given recipes take twice the memory."""

    larger: tuple[str, ...] = ()

    def of(self, requests: Sequence[Request], ahead: Sequence[Request] = ()) -> list[Result]:
        """Return the results, some larger."""
        return [
            self._doubled(result) if each.exact and each.recipe.id in self.larger else result
            for each, result in zip(requests, super().of(requests, ahead), strict=True)
        ]

    @staticmethod
    def _doubled(result: Result) -> Result:
        assert result.estimate is not None
        doubled = {"peak_device_bytes": 2 * result.estimate.peak_device_bytes}
        return result._replace(estimate=result.estimate.model_copy(update=doubled))


def test_a_best_recipe_that_exactly_does_not_fit_is_replaced() -> None:
    limit_bytes = GIB
    goal = Goal(tokens_per_step=2**14, vary=VARIED, memory_bytes=limit_bytes)
    with LargerExactly(0) as estimates:
        first = search(recipe(), goal, estimates)
        estimates.larger = tuple(recipe_from(one.recipe).id for one in first.found)
        second = search(recipe(), goal, estimates)
    assert second.found
    assert not {*estimates.larger} & {recipe_from(one.recipe).id for one in second.found}
    assert all(one.estimate.peak_device_bytes <= limit_bytes for one in second.found)


def test_a_largest_batch_that_exactly_does_not_fit_is_replaced() -> None:
    goal = Goal(vary=("batch.micro",), memory_bytes=2 * GIB)
    with LargerExactly(0) as estimates:
        first = search(recipe(), goal, estimates)
        assert first.largest is not None
        largest = recipe_from(first.largest.recipe)
        estimates.larger = (largest.id,)
        second = search(recipe(), goal, estimates)
    assert second.found
    assert second.largest is not None
    assert recipe_from(second.largest.recipe).batch.micro == largest.batch.micro - 1


def test_a_recipe_with_a_pipeline_is_planned_as_it_is_predicted() -> None:
    mesh = {"parallel": {"pipeline": 3}, "hardware": {"gpu": "h200", "count": 3}}
    piped = recipe(batch={"micro": 2, "seq": 512, "accumulate": 6}, **mesh)
    found = plan_recipe(piped, (), vary=("loss",), processes=0)
    assert found.best.mesh.pipeline == 3
    for one in found.found:
        assert one.estimate == predict(one.as_recipe())
        assert one.estimate.bubble is not None


def test_a_limit_is_kept_and_costs_speed(free: Plan) -> None:
    least = free.frontier[0].estimate.peak_device_bytes
    most = free.found[0].estimate.peak_device_bytes
    limit_bytes = (least + most) // 2
    small = planned(memory_gib=limit_bytes / 2**30)
    assert small.found
    assert all(one.estimate.peak_device_bytes <= small.usable_bytes < limit_bytes for one in small.found)
    assert small.found[0].estimate.tokens_per_s <= free.found[0].estimate.tokens_per_s * 1.01  # pyright: ignore
    assert small.num_traced <= 30


class Watched(Estimates):
    """Notes the recipes that are asked for, in their order."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asked: list[Recipe] = []

    def of(self, requests: Sequence[Request], ahead: Sequence[Request] = ()) -> list[Result]:
        self.asked += [one.recipe for one in requests if not one.exact]
        return super().of(requests, ahead)


def test_few_recipes_are_compiled_and_budgets_are_solved_last(free: Plan) -> None:
    least, most = (one.estimate.peak_device_bytes for one in (free.frontier[0], free.found[0]))
    goal = Goal(memory_bytes=(least + most) // 2, tokens_per_step=2**14, vary=(*VARIED, "compile"))
    with Watched() as estimates:
        search(recipe(), goal, estimates)
    compiled = [at for at, one in enumerate(estimates.asked) if one.compile]
    budgets = [at for at, one in enumerate(estimates.asked) if one.plans_recompute]
    assert 1 <= len(compiled) <= 3
    assert not {*compiled} & {*budgets}
    assert all(at > max(compiled) for at in budgets)


def test_blocks_that_offload_leave_room_for_what_it_takes_outside_the_allocator() -> None:
    """Else the solved budget is over the limit, and every block recomputes, 15 % slower."""
    batch = {"micro": 4, "seq": 4096}
    full, kept = (predict(recipe(batch=batch, recompute=level)) for level in ("full", "none"))
    limit_bytes = full.peak_device_bytes + 0.7 * (kept.peak_device_bytes - full.peak_device_bytes)
    some = {"vary": ("recompute",), "processes": 0, "margin": 0.0}
    found = plan_recipe(recipe(batch=batch), (), memory_gib=limit_bytes / GIB, **some).found[0].estimate
    assert found.host_bytes > 0
    assert found.peak_device_bytes <= limit_bytes
    assert full.tokens_per_s is not None
    assert found.tokens_per_s is not None
    assert found.tokens_per_s > 1.1 * full.tokens_per_s


def test_what_pins_too_much_of_the_host_is_refused() -> None:
    small = recipe(batch={"seq": 64})
    found = plan_recipe(small, (), vary=("recompute", "offload"), processes=0, host_memory_gib=0.0001)
    assert all(one.estimate.host_bytes <= found.host_limit_bytes for one in found.found)
    refused = [one.choice for one in found.rejected if "of the host's memory" in one.reason]
    assert any("offload.activations" in choice for choice in refused)
    assert found.num_traced <= 12


def test_what_excludes_accumulation_is_tried_with_whole_batches() -> None:
    """An update in the backward frees gradients, which fits where no accumulated recipe does."""
    with Estimates(0) as estimates:
        goal = Goal(tokens_per_step=2**7, vary=("batch", "optimizer.in_backward"))
        small = recipe(batch={"seq": 64})
        free = search(small, goal, estimates)
        kept = [one for one in free.frontier if "in_backward" not in str(one.changes)]
        limit_bytes = int(min(one.estimate.peak_device_bytes for one in kept) / 0.98) - MIB
        found = search(small, replace(goal, memory_bytes=limit_bytes), estimates)
    assert found.found
    assert found.best.optimizer.in_backward
    assert found.best.batch.accumulate == 1


def test_fused_accumulation_is_planned_where_gradients_accumulate() -> None:
    vary = ("batch", "accumulation")
    small = recipe(batch={"seq": 64}, precision="bf16")
    with Estimates(0) as estimates:
        combinations = Combinations(small, Goal(tokens_per_step=2**10, vary=vary), estimates)
        (fused,) = combinations.space.options
        assert combinations.batches(()) == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
        assert combinations.batches((fused,)) == [(1, 16), (2, 8), (4, 4), (8, 2)]
        # One micro-batch a step: nothing is added, and no reason has to be read.
        assert Combinations(small, Goal(vary=vary), estimates).space.options == ()

        # Adding to the gradients of large weights takes long beside products of 1,024 tokens.
        config = CONFIG | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 2}
        large = {"model": {**MODEL, "config": config}, "batch": {"seq": 256, "micro": 4, "accumulate": 8}}
        found = search(recipe_from({**large, "precision": "bf16"}), Goal(vary=("accumulation",)), estimates)
    assert found.best.accumulation == "fused"


def test_where_nothing_fits_the_least_is_named() -> None:
    none = plan_recipe(recipe(batch={"seq": 64}), (), vary=("loss",), processes=0, memory_gib=0.01)
    assert not none.found
    assert none.least is not None
    with pytest.raises(ValueError, match="no recipe fits"):
        none.best  # noqa: B018


def test_the_changes_that_fit_keep_the_tokens_of_a_step() -> None:
    large = recipe(batch={"micro": 4, "seq": 4096})
    whole = predict(large).peak_device_bytes
    with Estimates(0) as estimates:
        goal = Goal(memory_bytes=whole - 4 * MIB, margin=0.0, vary=VARIED)
        found = changes_that_fit(large, predict(large), goal, estimates)
    assert found
    for one in found:
        changed = one.as_recipe()
        assert changed.batch.tokens == large.batch.tokens
        assert predict(changed).peak_device_bytes <= whole - 4 * MIB
    rates = [one.estimate.tokens_per_s for one in found]
    assert rates == sorted(rates, reverse=True)  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--vary", "colour"], "vary = 'colour'"),
        (["--margin", "1"], "margin"),
        (["--tokens-per-step", "100"], "tokens_per_step = 100"),
        (["--out", "mine.yaml"], "--out = 'mine.yaml'"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.json").write_text(json.dumps({"model": MODEL, "batch": {"seq": 512}}))
    (tmp_path / "mine.yaml").write_text("model: {config: gpt2}\n")
    assert main(["plan", "recipe.json", *options]) == 65
    assert line in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text().startswith("model")


def test_short_sequences_get_batches_that_fill_the_gpu() -> None:
    best = plan_recipe(recipe(batch={"seq": 64}), (), vary=VARIED, processes=0, memory_gib=4).found[0]
    assert 2 * GIB < best.estimate.peak_device_bytes < 4 * GIB
    assert best.as_recipe().batch.tokens >= 2**14


def test_a_number_of_micro_batches_alone_leaves_their_size_free() -> None:
    given = ("batch.accumulate", "optimizer", "compile", "attention", "precision", "offload", "recompute")
    found = plan_recipe(
        recipe(batch={"seq": 64, "accumulate": 3}, precision="bf16"), given, processes=0, memory_gib=2
    )
    assert found.best.batch.accumulate == 3
    assert found.best.batch.tokens * 3 >= 2**14
    fixed = recipe(batch={"micro": 2, "seq": 64, "accumulate": 3}, precision="bf16")
    assert plan_recipe(fixed, (*given, "batch.micro"), processes=0).best.batch == fixed.batch


def test_a_best_whose_update_takes_long_is_also_shown_with_more_micro_batches() -> None:
    """Nearly all of the time of so few tokens is the update of wide weights."""
    wide = {**MODEL, "config": {**CONFIG, "hidden_size": 2048, "intermediate_size": 8192}}
    small = recipe(model=wide, batch={"seq": 64}, precision="bf16")
    given = ("batch.micro", "optimizer", "compile", "attention", "precision", "offload", "recompute", "loss")
    found = plan_recipe(small, given, processes=0)
    best, more = found.found[0].estimate, found.accumulated
    assert more is not None
    assert more.as_recipe().batch.accumulate == 8
    whole = predict(more.as_recipe())
    assert more.estimate.peak_device_bytes == whole.peak_device_bytes
    assert more.estimate.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=1e-6)
    assert (more.estimate.tokens_per_s or 0) > 1.05 * (best.tokens_per_s or 0)
    assert "512 tokens a step: " in str(found)
    asked = plan_recipe(small, given, processes=0, tokens_per_step=64)
    assert asked.accumulated is None
