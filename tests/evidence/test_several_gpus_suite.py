"""The drawn recipes for two GPUs, and how their predictions are compared."""

import random

import pytest

from evidence.scripts import several_gpus
from evidence.scripts.tables import several_gpus_suite as suite
from tiny_recipe import tiny_recipe
from trainfit.measurement.environment import host_environment
from trainfit.report.compare import Comparison
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Hardware, Parallel
from trainfit.spec.result import Estimate, Measurement, Peak, TwoPeaks


def test_a_seed_draws_the_same_recipes_of_every_strategy_and_family() -> None:
    def of(number: int, strategy: str) -> list[object]:
        chance = random.Random(f"0 {number}")
        return [several_gpus.drawn(chance, number, strategy) for _ in range(30)]

    numbers = range(several_gpus.NUM_RECIPES)
    strategies = [several_gpus.STRATEGIES[number % len(several_gpus.STRATEGIES)] for number in numbers]
    drawn = [of(*pair) for pair in zip(numbers, strategies, strict=True)]
    assert drawn == [of(*pair) for pair in zip(numbers, strategies, strict=True)]
    assert all(any(data is not None for data in some) for some in drawn)
    recipes = [recipe_from(data) for some in drawn for data in some if isinstance(data, dict)]
    assert {one.mesh.world_size for one in recipes} == {2}
    assert len({one.model.config for one in recipes}) > 20
    found = {suite.strategy_of(Comparison(one, None, None)) for one in recipes}
    assert found == set(several_gpus.STRATEGIES)


@pytest.mark.parametrize(("measured", "error"), [(100, 0.0), (80, 0.0), (95, 5 / 95), (200, -0.5)])
def test_of_two_named_peaks_the_nearer_one_counts(measured: int, error: float) -> None:
    line = "DDP rebuilds its buckets in the second step, while NCCL may hold the first ones: the peak is "
    recipe = tiny_recipe(hardware=Hardware(count=2), parallel=Parallel(strategy="ddp"))
    predicted = Estimate.model_construct(
        peak_allocated_bytes=100, assumptions=(f"{line}1 B allocated (100 bytes), or 1 B (80 bytes)",)
    )
    peaks = [Peak(allocated=size, reserved=size, device=size) for size in (80, 100)]
    now = Estimate.model_construct(
        peak_allocated_bytes=80,
        assumptions=(),
        two_peaks=TwoPeaks.model_construct(expected=peaks[0], possible=peaks[1], possible_phases=None),
    )
    host = host_environment("cuda")
    result = Measurement(
        recipe_id=recipe.id,
        status="done",
        peak_allocated_bytes=measured,
        environment=host,
    )
    for each in (predicted, now):
        assert suite.allocated_error(Comparison(recipe, each, result)) == pytest.approx(error)
