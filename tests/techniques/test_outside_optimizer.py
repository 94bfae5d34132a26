"""An optimizer of another package, one file: the second example of docs/reference/techniques.md."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outside_package import blocks, installed
from rank_processes import Ranks
from tiny_recipe import TINY_LLAMA, tiny_recipe
from tiny_training import options_for, tiny
from trainfit.api.plans import plan_recipe
from trainfit.planning.advice import changes_that_fit, expected
from trainfit.planning.estimates import Estimates
from trainfit.planning.search.candidate import Goal
from trainfit.planning.search.space import Option, offered
from trainfit.prediction.predict import predict
from trainfit.report.precision import meaning, storage
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.techniques import registry
from trainfit.training.loop import train
from trainfit.training.saved_state import check_parameter_state

LION = "optimizer.name=lion"


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("site"), "lion", blocks("python")[1]):
        yield


def test_it_is_predicted_with_its_bytes() -> None:
    content = tiny_recipe().content()
    lion, adamw = recipe_from(content, [LION]), recipe_from(content)
    found, other = predict(lion), predict(adamw)
    assert found.breakdown.optimizer == pytest.approx(other.breakdown.optimizer / 2, rel=0.05)
    assert found.breakdown.optimizer / found.trainable_params == pytest.approx(storage(lion).moment, rel=0.05)
    assert "lion state 4 B a parameter" in meaning(lion)


def test_it_is_planned() -> None:
    given = recipe_from({"model": {"config": TINY_LLAMA}, "batch": {"micro": 2, "seq": 16}})
    found = plan_recipe(given, (), vary=("optimizer.name",), processes=0, use_cache=False)
    assert "optimizer.name: lion" in {one.choice for one in found.rejected}
    kept = plan_recipe(given, (), vary=("optimizer.name",), processes=0, keep_quality=True)
    reasons = {one.choice: one.reason for one in kept.rejected}
    assert reasons["optimizer.name: lion"] == "changes the numerics (sign updates)"


def test_its_expected_state_makes_it_a_remedy() -> None:
    config = TINY_LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000}
    given = recipe_from({"model": {"config": config}, "batch": {"micro": 2, "seq": 16}})
    own = predict(given)
    limit = own.peak_device_bytes - own.breakdown.optimizer // 4
    goal = Goal(memory_bytes=limit, margin=0.0, vary=("optimizer.name",))
    with Estimates(0) as estimates:
        found = {one.changes: one.estimate for one in changes_that_fit(given, own, goal, estimates, most=9)}
    lion = found["optimizer.name: lion",]
    assert lion.breakdown.optimizer == pytest.approx(own.breakdown.optimizer / 2, rel=0.05)
    silent = Option("lion", (("optimizer.name", "lion"),))
    stated = next(one for one in offered(given) if one.values == silent.values)
    assert expected(given, own, stated.expected).device_bytes < limit
    assert expected(given, own, silent.expected).device_bytes > limit  # Such an offer is not traced.


def test_a_resumed_run_has_the_losses_of_an_unbroken_one(tmp_path: Path) -> None:
    straight = train(tiny(LION), options_for(tmp_path / "straight", 4))
    first = train(tiny(LION), options_for(tmp_path / "broken", 2))
    options = options_for(tmp_path / "broken", 4)
    second = train(tiny(LION), options.model_copy(update={"resume": True}))
    assert first.losses + second.losses == straight.losses


def test_a_checkpoint_holds_what_it_states_and_nothing_else() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    check_parameter_state("lion", "w", weight, {"momentum": torch.zeros(4, 2)})
    for state in ({"momentum": torch.zeros(2, 4)}, {"exp_avg": torch.zeros(4, 2)}, {"momentum": 1.0}):
        with pytest.raises(InputError, match="checkpoint and recipe do not fit"):
            check_parameter_state("lion", "w", weight, state)


def test_it_is_sharded_where_it_states_so() -> None:
    one = tiny_recipe().content()
    two = recipe_from(one, [LION, "hardware.count=2"])
    alone, sharded = predict(recipe_from(one, [LION])), predict(two)
    assert sharded.breakdown.optimizer == pytest.approx(alone.breakdown.optimizer / 2, rel=0.05)
    assert "lion" in registry.optimizers_sharded_by("fsdp")
    with pytest.raises(InputError, match="with tensor parallel use adamw"):
        registry.check(recipe_from(one, [LION, "hardware.count=2", "parallel.tensor=2"]))


def losses(out: Path, steps: int, *settings: str, resume: bool = False) -> tuple[float, ...]:
    recipe = tiny(LION, "hardware.gpu=h200", "batch.micro=2", *settings)
    return train(recipe, options_for(out, steps).model_copy(update={"resume": resume})).losses


def test_two_ranks_train_its_shards_and_one_process_goes_on(tmp_path: Path) -> None:
    alone = losses(tmp_path / "alone", 4, "batch.accumulate=2")
    with Ranks(2) as ranks:
        first, second = ranks.run(losses, tmp_path / "two", 2, "hardware.count=2", "parallel.strategy=fsdp")
    assert first == second == pytest.approx(alone[:2], abs=1e-5)
    after = losses(tmp_path / "two", 4, "batch.accumulate=2", resume=True)
    assert after == pytest.approx(alone[2:], abs=1e-5)
