"""A recipe that does not fit: the changes and GPUs named do hold it, as predicted, and none smaller would."""

import json
import time

import pytest

import trainfit
from trainfit.catalog.load import gpus
from trainfit.cli.main import main
from trainfit.planning.advice import (
    Deadline,
    _Search,
    advise,
    as_offered,
    changes_that_fit,
    expected,
    first_fitting,
    is_as_good,
    more_gpus,
)
from trainfit.planning.estimates import Estimates
from trainfit.planning.recompute.solver import OutOfTimeError
from trainfit.planning.recompute.solver import plan as plan_recompute
from trainfit.planning.search.candidate import MARGIN, Combinations, Goal
from trainfit.planning.search.space import Option
from trainfit.report.prediction_text import show_advice
from trainfit.spec.plan import Advice, Found
from trainfit.spec.recipe import Hardware
from trainfit.spec.result import Estimate

LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
WIDE = LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 96000}
LARGE = {"model": {"config": WIDE}, "batch": {"micro": 4, "seq": 4096}, "hardware": {"gpu": "rtx-4090"}}


def test_what_is_named_holds_the_recipe() -> None:
    large = trainfit.predict(LARGE)
    assert not large.fits
    found = large.advice()
    assert 1 <= len(found.changes) <= 3
    for one in found.changes:
        again = trainfit.predict(one.as_recipe())
        assert again.fits
        assert again.peak_device_bytes == one.estimate.peak_device_bytes
        # Of several micro-batches two are traced, and the others taken to be like the second.
        rel = 0.02 if one.as_recipe().batch.accumulate > 2 else 1e-6
        assert again.tokens_per_s == pytest.approx(one.estimate.tokens_per_s, rel=rel)
        assert one.as_recipe().batch.tokens == large.recipe.batch.tokens
    order = [(bool(one.numerics), -(one.estimate.tokens_per_s or 0)) for one in found.changes]
    assert order == sorted(order)
    assert found.gpu is not None
    assert trainfit.predict(found.gpu.as_recipe()).fits
    bound = large.peak_device_bytes / (1 - MARGIN)
    named = next(row for row in gpus().values() if row.name == found.gpu.as_recipe().hardware.gpu)
    assert named.price_per_hour
    assert named.basis == "measured"
    smaller = [row for row in gpus().values() if bound <= row.usable_bytes < named.usable_bytes]
    assert not [row for row in smaller if row.price_per_hour and row.basis == "measured"]


def test_several_gpus_are_told_of_fit_too() -> None:
    """It is the fastest that recomputation alone can do, however many other changes fit."""
    config = LLAMA | {"num_hidden_layers": 3, "vocab_size": 1000}
    own = {"model": {"config": config}, "batch": {"micro": 32, "seq": 4096}}
    large = trainfit.predict({**own, "hardware": {"gpu": "rtx-4090", "count": 2}})
    assert not large.fits
    found = large.advice()
    rates = {one.changes: one.estimate.tokens_per_s or 0.0 for one in found.changes}
    assert rates["recompute: fit",] >= rates.get(("recompute: full",), 0.0)
    assert found.is_complete


def test_no_more_than_its_time_is_taken() -> None:
    said: list[str] = []
    large = trainfit.predict(LARGE)
    with Estimates(0) as estimates:
        before = time.monotonic()
        found = advise(large.recipe, large, estimates, said.append, limit_s=0.0)
        assert time.monotonic() - before < 30
    assert (found.changes, found.is_complete) == ((), False)
    assert said == ["a larger GPU", "more GPUs"]
    with pytest.raises(OutOfTimeError):
        plan_recompute(large.recipe.model_copy(update={"recompute": "fit"}), until_s=0.0)


def test_the_text_says_where_nothing_is_enough_and_what_the_next_command_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = trainfit.load_recipe(LARGE)
    other = recipe.model_copy(update={"hardware": Hardware(gpu="rtx-5090")}).content()
    estimate = Estimate.model_construct(
        tokens_per_s=1000.0, peak_allocated_bytes=2**33, peak_reserved_bytes=2**33, peak_device_bytes=2**34,
        host_bytes=2**33, num_gpus=1,
    )  # fmt: skip
    gpu = Found(recipe=other, changes=("hardware.gpu: rtx-5090",), numerics=(), estimate=estimate)
    show_advice(recipe, Advice(changes=(), gpu=gpu, gpus=None, is_complete=False))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[1] == "on rtx-4090 none of the changes tried makes it fit; trainfit plan tries more"
    assert lines[2].startswith("16.00 GiB  1,000 tokens/s  hardware.gpu: rtx-5090")
    assert "pins 8.00 GiB of the host's memory for each GPU" in " ".join(lines)
    assert "modelled, no step was measured on it" in " ".join(lines)
    assert lines[-2] == "the search stopped after a minute; trainfit plan searches longer"
    assert lines[-1] == "take one: --set hardware.gpu=rtx-5090"


def test_where_no_single_change_is_enough_two_together_are_named() -> None:
    config = LLAMA | {"num_hidden_layers": 6, "vocab_size": 16000}  # As all layers are traced.
    deep = {"model": {"config": config}, "batch": {"seq": 98304}}
    large = trainfit.predict({**deep, "hardware": {"gpu": "rtx-4090", "count": 4}})
    assert not large.fits
    with Estimates(0) as estimates:
        found = changes_that_fit(large.recipe, large, Goal(vary=("recompute", "parallel")), estimates)
        assert estimates.num_traced <= 5
    assert ("recompute: full", "parallel.tensor: 2") in [one.changes for one in found]
    assert all(one.estimate.fits for one in found)


def test_where_the_loss_keeps_no_logits_the_blocks_hold_the_activations() -> None:
    own = trainfit.predict({**LARGE, "loss": "fused"}, gpu="rtx-4090")
    held = own.breakdown.activations + own.breakdown.temporary
    full, chunked = (
        expected(own.recipe, own, as_offered(own.recipe, Option("", (change,)))).device_bytes
        for change in (("recompute", "full"), ("loss", "chunked"))
    )
    assert own.peak_device_bytes - full > 0.6 * held
    assert chunked == pytest.approx(own.peak_device_bytes, rel=0.01)


def test_ranks_that_share_a_batch_take_as_many_more_of_them() -> None:
    own = trainfit.load_recipe(LARGE, count=4)
    combinations = Combinations(own, Goal(), Estimates(0))
    search = _Search(combinations, trainfit.predict(LARGE, gpu="rtx-4090"), most=3)
    two = [one for one in combinations.space.options if one.values == (("parallel.tensor", 2),)]
    changed = combinations.recipe_of(*search.key(tuple(two)))
    assert changed.mesh.tensor == 2
    assert changed.batch.tokens * changed.mesh.data_ranks == own.batch.tokens * own.mesh.data_ranks


def test_a_change_more_that_gains_no_speed_is_not_named() -> None:
    def found(rate: float, *changes: str) -> Found:
        estimate = Estimate.model_construct(tokens_per_s=rate)
        return Found.model_construct(changes=changes, estimate=estimate)

    full = found(1095, "recompute: full")
    assert is_as_good(full, found(1087, "recompute: full", "offload.activations: true"))
    assert not is_as_good(full, found(1200, "recompute: full", "loss: fused"))
    assert not is_as_good(full, found(1000, "batch.micro: 1"))


def test_the_state_of_a_model_is_shared_by_more_gpus() -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16}
    wide = {"model": {"config": LLAMA | shape}, "hardware": {"gpu": "rtx-4090"}, "batch": {"seq": 256}}
    large = trainfit.predict(wide)
    assert not large.fits
    with Estimates(0) as estimates:
        found = first_fitting(large.recipe, more_gpus(large.recipe, large), estimates)
        in_no_time = Deadline(0.0)
        tried = estimates.num_traced
        assert first_fitting(large.recipe, more_gpus(large.recipe, large), estimates, in_no_time) is None
        assert (in_no_time.is_complete, estimates.num_traced) == (False, tried)
        assert first_fitting(large.recipe, [], estimates, unused := Deadline(0.0)) is None
    assert unused.is_complete  # Nothing was left out
    assert found is not None
    assert found.changes == (f"hardware.count: {found.estimate.num_gpus}",)
    assert found.estimate.num_gpus in (2, 4)
    assert found.estimate.fits


def test_the_command_prints_it_after_the_prediction(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Advice(changes=(), gpu=None, gpus=None)
    monkeypatch.setattr("trainfit.planning.advice.advise", lambda *_: nothing)
    words = ["predict", "gpt2", "--gpu", "t4", "--set", "batch.micro=64"]
    assert main([*words, "--check"]) == 1
    text = capsys.readouterr().out
    parts = [
        text.index(one)
        for one in ("DOES NOT FIT", "What would fit", "none of the changes tried makes it fit")
    ]
    assert parts == sorted(parts)
    for more, is_there in (([], False), (["--advice"], True)):
        assert main([*words, "--json", *more]) == 0
        assert ("advice" in json.loads(capsys.readouterr().out)) is is_there
