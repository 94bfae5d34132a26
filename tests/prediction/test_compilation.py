"""How long torch.compile takes before the first step, and from which step on it pays."""

import json
from pathlib import Path
from typing import Any

import pytest

from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.api.calls import predict_recipe
from trainfit.api.plans import _with_eager
from trainfit.catalog.constants import constants
from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Ledger
from trainfit.planning.answer import Result
from trainfit.prediction.compilation import compared, compilation, without
from trainfit.prediction.predict import ledger_of, predict
from trainfit.report.prediction_text import compiling
from trainfit.spec.plan import Found, Plan
from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import Budget
from trainfit.spec.result import Estimate
from virtual_runs import recipe_of

LAYERS = 8


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.getbasetemp() / "ledgers"
    monkeypatch.setenv("TRAINFIT_CACHE", str(path))
    return path


def of_layers(number: int, compiled: str) -> Recipe:
    config = {**TINY_LLAMA, "num_hidden_layers": number}
    return recipe_of(config, "native", compile=compiled)


def test_a_whole_models_kernels_grow_with_its_layers_and_a_blocks_do_not() -> None:
    """Equal layers are traced once, and each counts; a block's program is compiled once for all."""
    graphs, kernels = zip(*(ledger_of(of_layers(n, "model")).compiled for n in (6, 7, LAYERS)), strict=True)
    assert graphs == (1, 1, 1)
    assert kernels[1] - kernels[0] == kernels[2] - kernels[1] > 10
    blocks = {ledger_of(of_layers(n, "block")).compiled for n in (6, LAYERS)}
    assert len(blocks) == 1
    assert blocks.pop()[1] < kernels[0]
    assert ledger_of(tiny_recipe("native")).compiled == (0, 0)


def test_the_estimate_has_the_fitted_time_with_its_bounds() -> None:
    found = predict(of_layers(LAYERS, "block")).compilation
    assert found is not None
    known = constants().compile
    expected = known.process_s + known.start_s + known.kernel_s * found.num_kernels
    assert found.seconds == pytest.approx(expected)
    assert (found.bounds.low, found.bounds.high) == pytest.approx(
        (known.low * expected, known.high * expected)
    )
    assert predict(tiny_recipe("native")).compilation is None
    on_cpu = gpu("cpu")
    assert compilation(Ledger(compiled=(1, 30)), on_cpu) is None  # C++ takes other times.


def test_it_pays_where_the_steps_saved_outweigh_the_compilation() -> None:
    one = predict(of_layers(LAYERS, "block"))
    assert one.step_s is not None
    assert one.compilation is not None
    eager = one.model_copy(update={"step_s": 2 * one.step_s})
    found = compared(one, eager).compilation
    assert found is not None
    assert found.pays_from_steps is not None
    before, after = found.pays_from_steps - 1, found.pays_from_steps
    assert found.seconds + before * one.step_s >= before * 2 * one.step_s
    assert found.seconds + after * one.step_s < after * 2 * one.step_s
    assert one.step_s is not None
    least, most = found.pays_between(one.step_s) or (0, 0)
    assert least < found.pays_from_steps < most
    for seconds, steps in ((found.bounds.low, least), (found.bounds.high, most)):
        assert (steps - 1) * one.step_s <= seconds < steps * one.step_s
    text = compiling(one.model_copy(update={"compilation": found}))
    assert f"pays from {found.pays_from_steps:,} steps ({least:,} to {most:,})" in text
    never = compared(one, one.model_copy(update={"step_s": one.step_s / 2}))
    assert never.compilation is not None
    assert never.compilation.pays_from_steps is None
    assert "never pays" in compiling(never)


def test_predict_says_it_for_compiled_recipes() -> None:
    recipe = of_layers(LAYERS, "block")
    found = predict_recipe(recipe)
    eager = predict_recipe(recipe.model_copy(update={"compile": False}))
    assert found.compilation is not None
    assert found.compilation.eager_step_s == eager.step_s
    text = found.text(width=200)
    assert "before the first step, with an empty cache: 1 graph of" in text
    assert "compiling" not in eager.text()


def test_a_plan_says_it_of_its_best_recipe() -> None:
    recipe = of_layers(LAYERS, "block")
    estimate = predict(recipe)
    best = Found(recipe=recipe.model_dump(mode="json"), changes=(), numerics=(), estimate=estimate)
    asked: list[Recipe] = []

    class Eager:
        def of(self, requests: Any) -> list[Result]:
            asked.extend(one.recipe for one in requests)
            slower = estimate.model_copy(update={"step_s": 3 * (estimate.step_s or 0.0)})
            return [Result(one.recipe, slower) for one in requests]

    eager: Any = Eager()
    plan = _with_eager(Plan.model_construct(found=(best, best)), eager)
    first, second = plan.found
    assert [one.compile for one in asked] == [False]
    assert first.estimate.compilation is not None
    assert first.estimate.compilation.pays_from_steps is not None
    assert second == best  # Its predictions are those that the search compared.


def test_a_budget_of_the_compiler_has_nothing_to_compare_with() -> None:
    recipe = of_layers(LAYERS, "model").model_copy(update={"recompute": Budget(budget=0.5)})
    assert without(recipe) is None
    assert without(of_layers(LAYERS, "model")) is not None


def test_an_older_estimate_is_read_without_it() -> None:
    data = predict(tiny_recipe("native")).model_dump(mode="json")
    del data["compilation"]
    assert Estimate.model_validate_json(json.dumps(data)).compilation is None
