"""Budgets in GiB: a plan is never over its budget, and less budget is never faster."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft  # noqa: F401
import pytest
import transformers.optimization  # noqa: F401 - a few tensors are made while these two are imported, the first time

import trainfit
from planned_recipe import layers
from trainfit.catalog.load import gpu as find_gpu
from trainfit.planning.recompute import solver as planning
from trainfit.planning.recompute.assignment import (
    Policy,
    assignments,
    evaluate,
    gone_bytes,
    policies_of,
    table,
)
from trainfit.planning.recompute.probe import Probe, probe
from trainfit.planning.recompute.solver import LEVELS, candidates, plan, resolve
from trainfit.prediction import machine as machines
from trainfit.prediction.machine import Machine, machine_of
from trainfit.prediction.predict import predict
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Optimizer, Recipe
from trainfit.spec.recompute import BudgetGib, Layers
from trainfit.spec.units import GIB
from virtual_runs import plain, recipe_of

SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
COPIES_PER_S = 50e9
LORA = Adapter(kind="lora", rank=4)
DEEP = recipe_of(SMALL | {"num_hidden_layers": 6}, "native", batch=Batch(micro=4, seq=64))


@pytest.fixture(scope="module", autouse=True)
def _candidates_of_a_recipe_once() -> Iterator[None]:
    """Candidates do not depend on the budget, so each recipe's are made once."""
    found: dict[str, planning.Candidates] = {}

    def once(recipe: Recipe, machine: Machine | None = None) -> planning.Candidates:
        machine = machine or machine_of(recipe.hardware)
        key = budget(recipe, GIB).id
        if key not in found:
            found[key] = candidates(recipe, machine)
        return found[key]._replace(machine=machine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "candidates", once)
        yield


def budget(recipe: Recipe, num_bytes: float) -> Recipe:
    return recipe.model_copy(update={"recompute": BudgetGib(budget_gib=num_bytes / GIB)})


@pytest.mark.parametrize(
    ("recipe", "shares"),
    [
        (DEEP, (0.6, 0.3)),
        (DEEP.model_copy(update={"adapter": LORA}), (0.5,)),
    ],
    ids=["all weights", "lora"],
)
def test_a_plan_is_within_its_budget_and_less_budget_is_never_faster(
    recipe: Recipe, shares: tuple[float, ...]
) -> None:
    whole, least = (predict(recipe.model_copy(update={"recompute": how})) for how in ("none", "full"))
    top, bottom = whole.peak_allocated_bytes, least.peak_allocated_bytes
    times = [whole.time.matmul_s + whole.time.memory_s]
    for share in shares:
        allowed = bottom + share * (top - bottom)
        found = plan(budget(recipe, allowed))
        assert found.estimate.peak_allocated_bytes <= allowed
        times.append(found.estimate.time.matmul_s + found.estimate.time.memory_s)
    assert all(shorter <= longer * (1 + 1e-12) for shorter, longer in pairwise(times))  # Sums round.


def test_measure_and_train_run_the_plan_of_a_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole, least = (predict(DEEP.model_copy(update={"recompute": how})) for how in ("none", "full"))
    recipe = budget(DEEP, (whole.peak_allocated_bytes + least.peak_allocated_bytes) / 2)
    built: list[Recipe] = []

    def runs(recipe: Recipe, *_: Any, **__: Any) -> None:
        built.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr("trainfit.measurement.run.measure", runs)
    monkeypatch.setattr("trainfit.training.loop.train", runs)
    with pytest.raises(KeyboardInterrupt):
        trainfit.measure(recipe, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        trainfit.train(recipe, device="cpu", out=tmp_path)
    planned = plan(recipe).recipe
    assert isinstance(planned.recompute, Layers)
    assert built == [planned, planned]


def test_compiled_blocks_keep_everything_or_only_their_input() -> None:
    recipe = plain(4, batch=Batch(micro=4, seq=64), compile="block")
    found = candidates(budget(recipe, GIB))
    assert found.policies == [Policy("none"), Policy("full")]
    assert found.recipe(recipe, 0).recompute == "none"
    assert found.recipe(recipe, int(found.peak_bytes.argmin())).recompute == layers(("full", 0.0, 4))


def test_the_excess_of_a_traced_peak_corrects_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short trace of compiled blocks lacks their tuning, which the whole trace of a plan has."""
    excess, tried = 50 * 2**20, []

    def traced(recipe: Recipe, found: planning.Candidates, index: int) -> planning.Plan:
        tried.append(index)
        allocated = found.peak_bytes[index] + excess
        peak: Any = SimpleNamespace(highest=SimpleNamespace(allocated=allocated))
        return planning.Plan(found.recipe(recipe, index), peak)

    monkeypatch.setattr(planning, "_traced", traced)
    peaks = planning.candidates(budget(DEEP, GIB)).peak_bytes
    allowed = (peaks.min() + peaks.max()) / 2
    found = plan(budget(DEEP, allowed + excess))
    assert tried == [0, int((peaks <= allowed).argmax())]
    assert found.estimate.highest.allocated <= allowed + excess
    with pytest.raises(InputError, match="the least that any plan reaches is"):
        plan(budget(DEEP, allowed))
    assert tried[-1] == int(peaks.argmin())


def test_all_the_memory_there_is_needs_no_plan() -> None:
    assert resolve(budget(DEEP, 100 * GIB)).recompute == "none"
    assert resolve(DEEP) is DEEP


def test_a_budget_that_no_plan_reaches_names_the_least() -> None:
    with pytest.raises(InputError, match="the least that any plan reaches is") as caught:
        plan(budget(DEEP, 1024))
    least_gib = float(str(caught.value).partition("reaches is ")[2].split(" GiB")[0])
    found = plan(budget(DEEP, least_gib * GIB))
    assert found.estimate.peak_allocated_bytes <= least_gib * GIB


def test_a_candidates_peak_is_that_of_its_whole_trace() -> None:
    """The search composes every plan's peak from one short trace."""
    recipe = budget(DEEP, GIB)
    found = planning.candidates(recipe)
    for index in range(0, len(found.rows), len(found.rows) // 3):
        traced = predict(found.recipe(recipe, index))
        assert found.peak_bytes[index] == pytest.approx(traced.peak_allocated_bytes, rel=0.01)


@pytest.mark.parametrize("fields", [{}, {"optimizer": Optimizer(name="adamw8bit")}], ids=["plain", "8 bits"])
def test_a_probe_of_a_few_micro_batches_is_that_of_all(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(micro=2, seq=64, accumulate=7)
    recipe = budget(DEEP.model_copy(update={"batch": batch, **fields}), GIB)
    few = probe(recipe, LEVELS, machine_of(recipe.hardware))
    monkeypatch.setattr("trainfit.planning.recompute.probe.micro_batches_left_out", lambda _: range(0))
    assert few == probe(recipe, LEVELS, machine_of(recipe.hardware))


def test_the_search_follows_memory_and_copies_as_one_plan_at_a_time_would() -> None:
    """All plans are evaluated at once in arrays; here one by one, in plain numbers."""
    found = probe(budget(DEEP, GIB), LEVELS, machine_of(DEEP.hardware))
    policies = policies_of(found, LEVELS, offload_levels=LEVELS)
    rows = assignments(found, policies, COPIES_PER_S, 1)
    rows = rows[:: max(1, len(rows) // 200)]
    evaluated = evaluate(found, table(found, policies), rows, COPIES_PER_S, 1)
    assert len({int(bytes_) for bytes_ in evaluated.peak_bytes}) > 20
    assert any(gone_bytes(found.costs[0, o.level], o.share) for o in policies)
    for row, peak, gone in zip(rows, evaluated.peak_bytes, evaluated.gone_bytes, strict=True):
        saved = [policies[index] for index in row]
        assert int(peak) == _peak_by_hand(found, saved)
        assert gone == sum(
            gone_bytes(found.costs[k, o.level], o.share) for k, o in zip(found.kinds, saved, strict=True)
        )


def _peak_by_hand(found: Probe, saved: list[Policy]) -> int:
    costs = [found.costs[kind, option.level] for kind, option in zip(found.kinds, saved, strict=True)]
    gone = [gone_bytes(cost, option.share) for cost, option in zip(costs, saved, strict=True)]
    level = found.start_bytes + found.before.net_bytes
    heights = [found.start_bytes + found.before.peak_bytes]
    leaving = 0
    for i, cost in enumerate(costs):
        heights.append(level + cost.forward.peak_bytes)
        level += cost.forward.net_bytes
        if gone[i] or i == len(costs) - 1:
            level, leaving = level - leaving, gone[i]
    heights.append(level + found.head.peak_bytes)
    level += found.head.net_bytes - sum(cost.late_bytes for cost in costs)
    heights.append(level + found.loss.peak_bytes)
    level += found.loss.net_bytes
    for i in reversed(range(len(costs))):
        level += gone[i - 1] if i else 0
        heights.append(level + costs[i].backward.peak_bytes)
        level += costs[i].backward.net_bytes
    return max(*heights, level + found.after.peak_bytes)


def test_the_chosen_plan_of_80_blocks_is_pinned() -> None:
    fields = {"precision": "bf16", "loss": "chunked", "optimizer": Optimizer(in_backward=True)}
    recipe = recipe_of("llama-3.1-70b", "native", batch=Batch(seq=4096), **fields)
    found = plan(budget(recipe, 402 * GIB))
    assert found.recipe.recompute == layers(("full", 1.0, 53), ("elementwise", 0.9, 26), ("none", 0.0, 1))
    assert found.estimate.peak_allocated_bytes / GIB == pytest.approx(401.938, abs=0.001)
    # What was chosen with earlier rates is 0.9 % faster by today's.
    earlier = layers(("full", 1.0, 49), ("elementwise", 0.9, 30), ("elementwise", 0.0, 1))
    assert found.estimate.step_s < 1.015 * predict(recipe.model_copy(update={"recompute": earlier})).step_s


@pytest.mark.parametrize("level", [0.2, 0.7])
def test_fit_fills_the_device_and_no_more(level: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of device bytes: context and unused cache, a tenth of this card here, count too."""
    large = DEEP.model_copy(update={"batch": Batch(micro=4096, seq=64)})
    none, full = (
        predict(large.model_copy(update={"recompute": one})).peak_device_bytes for one in ("none", "full")
    )
    usable = int(full + level * (none - full))
    row = find_gpu("h200").model_copy(update={"usable_bytes": usable})
    monkeypatch.setattr(machines, "find_gpu", lambda name: row)
    fitted = plan(large.model_copy(update={"recompute": "fit"}))
    assert fitted.estimate.fits
    assert 0.97 < fitted.estimate.peak_device_bytes / usable <= 0.99
    assert predict(fitted.recipe) == fitted.estimate
    assert fitted.recipe.recompute != "full"
    row = row.model_copy(update={"usable_bytes": 2 * none})
    assert resolve(large.model_copy(update={"recompute": "fit"})).recompute == "none"
    row = row.model_copy(update={"usable_bytes": full // 4})
    with pytest.raises(InputError, match="the least that any plan reaches on h200 is"):
        resolve(large.model_copy(update={"recompute": "fit"}))
