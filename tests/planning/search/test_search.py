"""The search: what it returns fits, is the fastest it traced, and takes a bounded number of traces."""

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import counted_calls
from tiny_recipe import TINY_LLAMA
from trainfit.api.plans import Plan as PrintedPlan
from trainfit.api.plans import plan_recipe
from trainfit.cli.main import main
from trainfit.planning.advice import changes_that_fit
from trainfit.planning.estimates import Estimates, Request, Result
from trainfit.planning.search.candidate import Goal
from trainfit.planning.search.plan import discounted, pareto
from trainfit.planning.search.ranking import Batches, Sizes, within
from trainfit.planning.search.search import plan as search
from trainfit.planning.search.space import Option, least_bytes
from trainfit.planning.workers import CAN_FORK, NICENESS, Workers
from trainfit.prediction.predict import predict
from trainfit.report.plan_text import frontier_panel
from trainfit.spec.parsing.recipe_file import load_recipe, recipe_from, written
from trainfit.spec.plan import Plan
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import GIB, MIB

CONFIG = {
    **TINY_LLAMA,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "vocab_size": 8192,
}
MODEL = {"config": CONFIG, "implementation": "native"}
VARIED = ("batch", "recompute", "loss", "optimizer.in_backward")


def recipe(**fields: Any) -> Recipe:
    return recipe_from({"model": MODEL, "batch": {"seq": 512}, **fields})


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
    bars = [float(width) for width in re.findall(r"width: ([\d.]+)%", shown)]
    sizes = [one.estimate.peak_device_bytes for one in free.frontier]
    assert bars == pytest.approx([100 * size / max(free.limit_bytes, *sizes) for size in sizes], abs=0.01)
    assert shown.count("<svg") == 1
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


def test_another_process_gives_the_same_estimates_and_refusals() -> None:
    pytest.importorskip("torchao")
    requests = [Request(recipe()), Request(recipe(precision="fp8"))]
    with Estimates(0, use_cache=False) as here, Estimates(1, use_cache=False) as there:
        (found, refused), (other, also) = here.of(requests), there.of(requests)
    assert found == other
    assert refused.refused is not None
    assert str(refused.refused) == str(also.refused)


@pytest.mark.skipif(not CAN_FORK, reason="all processes are alike elsewhere")
def test_recipes_that_compile_have_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, str, bool]] = []

    class Refusing:
        def __init__(self, count: int, answer: str, imports: Sequence[str], num_ahead: int):
            self.has_compiler = "torch._inductor.compile_fx" in imports
            self.num_ahead = num_ahead
            assert bool(num_ahead) != self.has_compiler  # Compiled ones take too long for a lower priority.

        def ask(self, data: dict[str, Any], *, ahead: bool) -> Future[dict[str, Any]]:
            asked.append((self.has_compiler, data["recipe"]["compile"], ahead))
            answer: Future[dict[str, Any]] = Future()
            answer.set_result({"refused": {"problem": "none", "remedy": "none"}})
            return answer

        def close(self) -> None:
            pass

    monkeypatch.setattr("trainfit.planning.estimates.Workers", Refusing)
    monkeypatch.setattr("trainfit.planning.estimates._save", lambda *_: None)
    with Estimates(2, use_cache=False) as estimates:
        estimates.later.append(recipe(compile="block"))
        estimates.of([Request(recipe()), Request(recipe(loss="fused"))])
        assert len(estimates._workers) == 2  # The compiler is imported while the first are traced.
        compiled = Request(recipe(compile="block"))
        estimates.of([Request(recipe(loss="chunked"))], ahead=[compiled])
        assert (estimates.count, len(asked)) == (3, 4)
        estimates.of([compiled])  # Asked once.
    assert sorted(asked, key=str) == [(False, False, False)] * 3 + [(True, "block", True)]


def test_a_request_ahead_that_still_waits_is_given_to_the_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    class Busy:
        def __init__(self, count: int, answer: str, imports: Sequence[str], num_ahead: int):
            self.num_ahead = num_ahead

        def ask(self, data: dict[str, Any], *, ahead: bool) -> Future[dict[str, Any]]:
            asked.append(ahead)
            answer: Future[dict[str, Any]] = Future()
            if not ahead:
                answer.set_result({"refused": {"problem": "none", "remedy": "none"}})
            return answer

        def close(self) -> None:
            pass

    monkeypatch.setattr("trainfit.planning.estimates.Workers", Busy)
    monkeypatch.setattr("trainfit.planning.estimates._save", lambda *_: None)
    with Estimates(2, use_cache=False) as estimates:
        # Two: where torch is imported, a single one needs no other process.
        first = [Request(recipe()), Request(recipe(loss="chunked"))]
        estimates.of(first, ahead=[Request(recipe(loss="fused"))])
        estimates.of([Request(recipe(loss="fused"))])
    assert asked == [False, False, True, False]


def priority(request: dict[str, Any]) -> dict[str, Any]:
    """Answer as a process of a plan does: with its own priority."""
    return {**request, "niceness": os.nice(0)}


@pytest.mark.skipif(not CAN_FORK, reason="processes cannot be forked here")
def test_requests_ahead_have_processes_of_a_lower_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    workers = Workers(1, f"{Path(__file__).stem}:priority", [], num_ahead=1)
    try:
        ahead, now = workers.ask({"number": 1}, ahead=True), workers.ask({"number": 2})
        assert ahead.result(120) == {"number": 1, "niceness": min(19, os.nice(0) + NICENESS)}
        assert now.result(120) == {"number": 2, "niceness": os.nice(0)}
    finally:
        workers.close()


@pytest.mark.parametrize("exact", [True, False])
def test_many_micro_batches_are_continued_from_a_few(exact: bool) -> None:
    many = recipe(batch={"micro": 2, "seq": 512, "accumulate": 6})
    with Estimates(0) as estimates:
        (result,) = estimates.of([Request(many, exact=exact)])
    whole, found = predict(many), result.estimate
    assert found is not None
    assert found.peak_device_bytes == whole.peak_device_bytes
    near = 1e-6 if exact else 0.03
    for name in ("step_s", "model_flops", "tokens_per_s", "mfu"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=near), name


def test_two_processes_trace_what_many_micro_batches_are_continued_from() -> None:
    many = recipe(batch={"micro": 2, "seq": 512, "accumulate": 6})
    refused = recipe(batch={"micro": 2, "seq": 512, "accumulate": 6}, hardware={"gpu": "tpu-v5p"})
    with Estimates(0, use_cache=False) as here, Estimates(2, use_cache=False) as there:
        asked = [Request(many), Request(refused), Request(many, exact=False)]
        found, expected = there.of(asked), here.of(asked)
    assert [one.estimate for one in found] == [one.estimate for one in expected]
    assert found[0].estimate is not None
    assert found[0].estimate.recipe_id == many.id
    assert found[1].estimate is None
    assert "listed for mfu" in str(found[1].refused)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_gradients_reduced_once_a_step_count_once(strategy: str) -> None:
    mesh = {"parallel": {"strategy": strategy}, "hardware": {"gpu": "h200", "count": 2}}
    wide = {**MODEL, "config": {**CONFIG, "hidden_size": 4096, "num_hidden_layers": 2}}
    many = recipe(model=wide, batch={"micro": 2, "seq": 512, "accumulate": 8}, **mesh)
    with Estimates(0) as estimates:
        ranked, exact = estimates.of([Request(many, exact=False), Request(many)])
    assert ranked.estimate is not None
    assert exact.estimate is not None
    assert ranked.estimate.step_s == pytest.approx(exact.estimate.step_s, rel=0.02)


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


def test_a_mix_of_two_levels_meets_the_limit() -> None:
    none = Sizes(10, 90, 0, 0, 0, micro_s=1.0)
    full = Sizes(10, 10, 0, 0, 0, micro_s=1.4)
    assert within((none, full), 100) == none
    mix = within((none, full), 60)
    assert mix is not None
    assert (mix.device_bytes, mix.micro_s) == pytest.approx((60, 1.2))
    assert within((none, full), 19) is None


def test_batches_whose_peak_is_the_updates_say_nothing_of_larger_ones() -> None:
    small = Sizes(10, 30, 40, 0, 0, micro_s=1.0)  # Whole gradients are the peak.
    large, larger = (Sizes(10, 5 * micro, 40, 0, 0, micro_s=micro) for micro in (8, 16))
    grown = Batches.of({1: small, 8: large, 16: larger})
    assert grown.moved(larger, 16, 32).device_bytes == pytest.approx(170)
    assert grown.moved(large, 8, 1).device_bytes == pytest.approx(40)
    assert grown.moved(small, 1, 8).device_bytes == pytest.approx(50)
    assert Batches.of({1: small}).batch_bytes == {1: 30}


def test_more_work_of_the_gpu_takes_no_longer_while_the_host_decides() -> None:
    eager = Sizes(0, 0, 0, 0, update_s=0.1, micro_s=0.2, host_s=1.0)
    grown = Batches({1: 1.0, 2: 2.0}, {1: 0.2, 2: 0.4})
    assert [grown.moved(eager, 1, micro).step_s(1) for micro in (1, 4, 8)] == pytest.approx([1.0, 1.0, 1.7])


def test_short_sequences_get_batches_that_fill_the_gpu() -> None:
    best = plan_recipe(recipe(batch={"seq": 64}), (), vary=VARIED, processes=0, memory_gib=4).found[0]
    assert 2 * GIB < best.estimate.peak_device_bytes < 4 * GIB
    assert best.as_recipe().batch.tokens >= 2**14


def test_each_change_of_the_numerics_must_gain_its_share() -> None:
    """With 0, 1 and 2 changes: the second gains less than 2 % over the first, and is not chosen."""
    change = Option("optimizer", (("optimizer.name", "adafactor"),), numerics="factored")
    other = Option("precision", (("precision", "fp8"),), numerics="fp8")
    names = {(): 0.95, (change,): 0.985, (change, other): 1.0}
    assert max(names, key=lambda options: discounted(names[options], options)) == (change,)
    assert discounted(1.0, (change, other)) == pytest.approx(0.98**2)


def test_the_frontier_holds_what_nothing_beats() -> None:
    points = [(3, 5), (1, 1), (2, 4), (2, 3), (4, 5)]
    assert pareto(points, lambda point: point) == [(1, 1), (2, 4), (3, 5)]


def test_the_least_bytes_of_what_a_mesh_keeps_on_every_gpu() -> None:
    """Of 8B parameters with bf16 weights: what is gathered or reduced whole, and shards of both."""

    def least(fields: dict[str, Any], **of_recipe: Any) -> float:
        own = {"hardware": {"gpu": "h200", "count": 16}, **of_recipe}
        option = Option("fsdp", tuple(fields.items()))
        return least_bytes(option, recipe(**own), 8 * 10**9, 2 * 10**9) / 1e9

    kept = {"parallel.reshard_after_forward": False}
    assert least({"loss": "fused"}) == 0
    assert least(kept) == 16
    assert least({**kept, "parallel.sync_each_batch": False}) == 20
    assert least({"parallel.replicate": 2, "parallel.shard": 8}) == 20 / 8
    assert least({"parallel.strategy": "ddp"}) == 20
    assert least({"parallel.strategy": "ddp"}, precision="mixed-bf16") == 40
    assert least(kept, parallel={"tensor": 2}) == 0
