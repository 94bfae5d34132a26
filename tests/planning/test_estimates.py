"""Estimates of many recipes: from other processes as from this one, continued from a few micro-batches."""

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from planned_recipe import CONFIG, MODEL, recipe
from trainfit.planning.answer import Request, continued
from trainfit.planning.estimates import Estimates
from trainfit.planning.workers import CAN_FORK
from trainfit.prediction.predict import predict
from trainfit.spec.micro_batches import Added, Derived
from trainfit.spec.result import Estimate, StepTime


def test_another_process_gives_the_same_estimates_and_refusals() -> None:
    pytest.importorskip("torchao")
    requests = [Request(recipe()), Request(recipe(precision="fp8"))]
    with Estimates(0, use_cache=False) as here, Estimates(1, use_cache=False) as there:
        (found, refused), (other, also) = here.of(requests), there.of(requests)
    assert found == other
    assert refused.refused is not None
    assert str(refused.refused) == str(also.refused)


def test_the_oldest_estimates_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    monkeypatch.setattr("trainfit.planning.estimates.MAX_KEPT", 3)
    (tmp_path / "estimates").mkdir()
    for age in range(4):
        old = tmp_path / f"estimates/{age}.json"
        old.write_text("{}")
        os.utime(old, (age + 1e9, age + 1e9))
    with Estimates(0) as estimates:
        estimates.of([Request(recipe())])
    kept = {path.stem for path in (tmp_path / "estimates").iterdir()}
    assert len(kept) == 3
    assert {"2", "3"} < kept
    with Estimates(0) as estimates:
        estimates.of([Request(recipe())])
    assert estimates.num_traced == 0


@pytest.mark.skipif(not CAN_FORK, reason="all processes are alike elsewhere")
def test_recipes_that_compile_have_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, str, bool]] = []

    class Refusing:
        def __init__(self, count: int, answer: str, imports: Sequence[str], num_ahead: int, **_: Any):
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
    monkeypatch.setattr("trainfit.planning.estimates.save", lambda *_: None)
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
        def __init__(self, count: int, answer: str, imports: Sequence[str], num_ahead: int, **_: Any):
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
    monkeypatch.setattr("trainfit.planning.estimates.save", lambda *_: None)
    with Estimates(2, use_cache=False) as estimates:
        # Two: where torch is imported, a single one needs no other process.
        first = [Request(recipe()), Request(recipe(loss="chunked"))]
        estimates.of(first, ahead=[Request(recipe(loss="fused"))])
        estimates.of([Request(recipe(loss="fused"))])
    assert asked == [False, False, True, False]


@pytest.mark.parametrize("exact", [True, False])
def test_many_micro_batches_are_continued_from_a_few(exact: bool) -> None:
    many = recipe(batch={"micro": 2, "seq": 512, "accumulate": 6})
    with Estimates(0) as estimates:
        (result,) = estimates.of([Request(many, exact=exact)])
    whole, found = predict(many), result.estimate
    assert found is not None
    assert found.peak_device_bytes == whole.peak_device_bytes
    near = 1e-6 if exact else 0.01
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


def test_the_bounds_of_continued_steps_hold_them() -> None:
    many = recipe(batch={"micro": 2, "seq": 512, "accumulate": 6})
    with Estimates(0) as estimates:
        results = estimates.of([Request(many, exact=False), Request(many)])
    whole = predict(many)
    for estimate in (one.estimate for one in results):
        assert estimate is not None
        for end in ("low", "high"):
            found, expected = (getattr(one.bounds["step_s"], end) / one.step_s for one in (estimate, whole))
            assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("accumulate", [2, 6])
def test_a_pipeline_is_predicted_whole(accumulate: int) -> None:
    """Micro-batches fill it, so memory and waiting are not those of two or three."""
    mesh = {"parallel": {"pipeline": 3}, "hardware": {"gpu": "h200", "count": 3}}
    piped = recipe(batch={"micro": 2, "seq": 512, "accumulate": accumulate}, **mesh)
    with Estimates(0) as estimates:
        results = estimates.of([Request(piped, exact=False), Request(piped)])
    assert [one.estimate for one in results] == [predict(piped)] * 2
    assert results[0].update_s > 0


class Unstated(Estimate):
    """With a figure that states no rule."""

    energy_j: float = 0.0


class Additive(Estimate):
    """With a figure to which each micro-batch adds the same."""

    energy_j: Added[float] = 0.0


class Following(Estimate):
    """With a figure that follows from others, which nothing computes."""

    energy_j: Derived[float] = 0.0


class UnstatedPart(StepTime):
    """With a part that states no rule."""

    disk_s: float = 0.0


def test_a_new_figure_of_an_estimate_follows_its_rule_or_is_an_error() -> None:
    many = recipe(batch={"micro": 2, "seq": 512, "accumulate": 6})
    three = predict(many)  # Any estimate: only the new figure is looked at.

    def figure(kind: type[Estimate], energy_j: float) -> Any:
        return kind.model_validate({**dict(three), "energy_j": energy_j})

    assert continued(many, figure(Additive, 20.0), figure(Additive, 25.0)).energy_j == 25.0 + 3 * 5.0
    for kind, problem in ((Unstated, "Unstated.energy_j states 0 rules"), (Following, "energy_j")):
        with pytest.raises(TypeError, match=problem):
            continued(many, figure(kind, 20.0), figure(kind, 25.0))
    assert three.time is not None
    parts = three.model_copy(update={"time": UnstatedPart(**dict(three.time), disk_s=1.0)})
    with pytest.raises(TypeError, match="UnstatedPart.disk_s states 0 rules"):
        continued(many, parts, parts)


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


def test_state_copied_once_a_step_counts_once() -> None:
    wide = {**MODEL, "config": {**CONFIG, "hidden_size": 4096, "num_hidden_layers": 2}}
    batch = {"micro": 2, "seq": 512, "accumulate": 32}
    many = recipe(model=wide, batch=batch, precision="bf16", offload={"optimizer": True})
    with Estimates(0) as estimates:
        ranked, exact = estimates.of([Request(many, exact=False), Request(many)])
    assert ranked.estimate is not None
    assert exact.estimate is not None
    assert exact.estimate.time is not None
    assert exact.estimate.step_s is not None
    assert ranked.estimate.step_s == pytest.approx(exact.estimate.step_s, rel=0.05)
    # Half of them counted for each of 32 micro-batches would take longer than the whole step.
    assert exact.estimate.time.communication_s * 16 > exact.estimate.step_s
