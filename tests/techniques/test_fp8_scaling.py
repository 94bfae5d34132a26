"""Delayed scaling: the first step measures, later ones round by the step before; resumed runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_recipe import TINY_LLAMA
from trainfit.measurement.run import measure
from trainfit.models.fp8_block import Fp8FeedForward, Histories
from trainfit.prediction.predict import ledger_of, predict
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware, Recipe
from trainfit.step import Step, assemble
from trainfit.techniques import registry
from trainfit.training import checkpoint
from trainfit.training.checkpoint import Progress
from trial_start import forked
from virtual_runs import recipe_of

CPU = torch.device("cpu")
LLAMA = TINY_LLAMA | {"hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 3}


def recipe(scaling: str = "delayed", **fields: Any) -> Recipe:
    batch = Batch(micro=2, seq=16, accumulate=2)
    wanted = {"precision": "fp8", "block_kernels": "fp8", "batch": batch, "fp8_scaling": scaling, **fields}
    return recipe_of(LLAMA, "native", **wanted)


def step_of(wanted: Recipe) -> Step:
    return assemble(wanted, CPU, compiler=lambda module: module.compile(backend="aot_eager"))


def losses(step: Step, steps: int = 4) -> list[float]:
    return [step(step.random_batches(0)).item() for _ in range(steps)]


def test_the_first_step_measures_and_later_ones_are_near() -> None:
    found, dynamic = (losses(step_of(recipe(one)), 6) for one in ("delayed", "dynamic"))
    assert found[0] == pytest.approx(dynamic[0], rel=1e-4)  # The second micro-batch by the larger magnitude.
    assert found[1:] != dynamic[1:]
    assert found == pytest.approx(dynamic, rel=5e-3)
    assert found[-1] < found[0]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("fields", [{"compile": "block"}, {"recompute": "full"}, {"fp8_weights": "codes"}])
def test_compiled_recomputed_and_with_kept_weights_are_the_same(fields: dict[str, Any]) -> None:
    found, plain = step_of(recipe(**fields)), step_of(recipe())
    assert losses(found) == losses(plain)
    for name, tensor in plain.carried.items():
        assert torch.equal(found.carried[name], tensor)


def test_magnitudes_are_those_of_the_step_before() -> None:
    step = step_of(recipe())
    assert len(step.carried) == 6
    assert not any(one.any() for one in step.carried.values())
    losses(step, 1)
    assert all(one[0] > 0 and one[1] == 0 for one in step.carried.values())
    before = {name: one.clone() for name, one in step.carried.items()}
    step.model.eval()
    with torch.no_grad():
        step.cross_entropy(step.random_batches(1)[0])
    step.model.train()
    assert all(torch.equal(step.carried[name], one) for name, one in before.items())


def test_twice_the_magnitude_of_the_step_before_is_not_cut_off() -> None:
    histories = Histories(step_of(recipe()).model)
    for number, one in enumerate(histories.tensors.values()):
        one[1] = number + 1.0
    histories.end_step()
    assert [one.tolist() for one in histories.tensors.values()] == [[2.0 * n, 0.0] for n in range(1, 7)]


def test_a_resumed_run_equals_one_that_went_on(tmp_path: Path) -> None:
    whole = step_of(recipe())
    expected = losses(whole, 4)
    begun, resumed = step_of(recipe()), step_of(recipe())
    losses(begun, 2)
    path = checkpoint.save(tmp_path, begun, Progress(2, None), {}, keep=1)
    checkpoint.load(path, resumed)
    assert losses(resumed, 2) == expected[2:]
    again = step_of(recipe())
    again.load_state_dict(begun.state_dict())
    assert losses(again, 2) == expected[2:]
    with pytest.raises(InputError, match="in only one of checkpoint and model"):
        checkpoint.load(path, step_of(recipe("dynamic")))
    next(iter(begun.carried.values()))[0] = float("inf")
    broken = checkpoint.save(tmp_path / "broken", begun, Progress(2, None), {}, keep=1)
    with pytest.raises(InputError, match="negative, or no finite number"):
        checkpoint.load(broken, step_of(recipe()))


def test_predicted_and_measured_bytes_are_equal() -> None:
    on_cpu = recipe(hardware=Hardware(gpu="cpu"))
    predicted, measured = predict(on_cpu), measure(on_cpu, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    assert predicted.phases == measured.phases


@pytest.mark.parametrize("compiled", [False, "block"])
def test_a_ledger_has_no_kernels_that_measure(compiled: Any) -> None:
    fields = {"compile": compiled, "hardware": Hardware(gpu="h100-sxm"), "batch": Batch(micro=2, seq=64)}
    ledger = ledger_of(recipe(**fields))
    names = [op.name for op in ledger.steady_ops if "swiglu" in op.name for _ in range(ledger.times(op))]
    kinds = ("trainfit.swiglu_fp8_delayed.default", "trainfit.swiglu_backward_fp8_delayed.default")
    assert {name: names.count(name) for name in names} == dict.fromkeys(kinds, 3)
    numel = 128 * 144
    moved = {op.name: op.num_bytes for op in ledger.steady_ops if "swiglu" in op.name}
    for kind, passes in zip(kinds, (5, 11), strict=True):
        assert moved[kind] == pytest.approx(passes * numel, abs=32)


def test_one_history_is_not_anothers() -> None:
    step = step_of(recipe())
    losses(step, 1)
    parts = [one for one in step.model.modules() if isinstance(one, Fp8FeedForward)]
    assert len({one.history[0].item() for one in parts}) == 3  # pyright: ignore


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other kernels": ({"block_kernels": "standard"}, "note the largest magnitudes"),
    "several GPUs": ({"hardware": Hardware(count=2)}, "several GPUs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case: str) -> None:
    fields, words = REFUSED[case]
    with pytest.raises(InputError, match=words):
        registry.check(recipe(**fields))
