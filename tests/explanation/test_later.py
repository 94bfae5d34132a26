"""What comes later than the steady step: each spike counted by hand, and runs of varied lengths."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tiny_recipe import tiny_recipe
from trainfit.cli.main import main
from trainfit.explanation.later.lengths import BUCKETS, draw_lengths
from trainfit.explanation.later.spikes import (
    CHECKPOINT,
    EVALUATION,
    FULL_STATE,
    check_longest,
    spikes,
    step_peaks,
)
from trainfit.explanation.peak import explained
from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import ALLOCATE, FREE, NO_LAYER, Event, Ledger, Segment, Storage
from trainfit.ledger.replay import replay
from trainfit.ledger.varied import VariedRun, replay_lengths
from trainfit.planning.estimates import Estimates
from trainfit.planning.savings import savings
from trainfit.prediction.predict import ledger_of, predict
from trainfit.spec.errors import InputError
from trainfit.spec.explanation import LaterSpike
from trainfit.spec.recipe import Batch, Recipe
from trainfit.spec.units import MIB

VOCABULARY, HIDDEN = 128, 32


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path_factory.getbasetemp() / "later"))


def recipe(**fields: Any) -> Recipe:
    return tiny_recipe("hf", 4, **{"batch": Batch(micro=8, seq=32), **fields})


def named(found: list[LaterSpike]) -> dict[str, LaterSpike]:
    return {one.name: one for one in found}


def test_each_spike_is_run_after_the_step() -> None:
    found = explained(recipe())
    each = named(spikes(found, None, 64, lambda text: None)[0])
    own = found.explanation
    assert list(each) == [
        "first update", "evaluation", "logits kept", "checkpoint", "longest sample", "accumulation",
    ]  # fmt: skip
    assert each["first update"].peak_allocated_bytes == own.phases.first.optimizer
    longer = predict(recipe(batch=Batch(micro=8, seq=64)))
    assert each["longest sample"].peak_allocated_bytes == longer.peak_allocated_bytes
    twice = predict(recipe(batch=Batch(micro=8, seq=32, accumulate=2)))
    assert each["accumulation"].peak_allocated_bytes == twice.peak_allocated_bytes
    assert all(one.more_bytes == one.peak_allocated_bytes - own.peak_allocated_bytes for one in each.values())
    # Between steps weights, optimizer states and workspaces are alive; of a forward without gradients the
    # logits of the batch are the most.
    between = own.ends["optimizer"].total
    logits = 8 * 32 * VOCABULARY * 4
    assert between + logits < each["evaluation"].peak_allocated_bytes < between + 6 * logits
    assert each["evaluation"].peak_allocated_bytes < own.peak_allocated_bytes
    # A bool for each element of the largest parameter, and what isfinite needs besides.
    largest = VOCABULARY * HIDDEN
    assert largest <= each["checkpoint"].peak_allocated_bytes - between <= 10 * largest


def test_a_larger_batch_of_evaluation_takes_its_logits_more() -> None:
    found = explained(recipe())
    few, many = (named(spikes(found, batch, 32, lambda text: None)[0])["evaluation"] for batch in (64, 128))
    logits = 64 * 32 * VOCABULARY * 4
    assert many.peak_allocated_bytes - few.peak_allocated_bytes >= logits
    assert many.more_bytes > 0, "an evaluation of 128 sequences exceeds a step of 8"


def test_kept_logits_add_up() -> None:
    each = named(spikes(explained(recipe()), 64, 32, lambda text: None)[0])
    one = 64 * 32 * VOCABULARY * 4
    assert (
        each["logits kept"].peak_allocated_bytes
        >= explained(recipe()).explanation.ends["optimizer"].total + 2 * one
    )


def test_sharded_recipes_gather_for_a_full_state_dict() -> None:
    several = recipe(hardware={"gpu": "h100-sxm", "count": 4}, parallel={"strategy": "fsdp"})
    found = explained(several)
    each = named(spikes(found, None, 32, lambda text: None)[0])
    whole = 4 * explained(recipe()).explanation.breakdown.weights // 4
    shard = found.explanation.breakdown.weights
    between = found.explanation.ends["optimizer"].total
    assert each["full state dict"].peak_allocated_bytes - between >= 0.9 * whole
    assert whole > 3 * shard
    assert "sharded gradients are alive" in each["accumulation"].what


def test_what_is_not_run_is_said() -> None:
    twice = Batch(micro=8, seq=32, accumulate=2)
    compiled = explained(recipe())._replace(recipe=recipe(compile="block", batch=twice))
    each, notes = spikes(compiled, None, 32, lambda text: None)
    assert list(named(each)) == ["first update"]
    assert notes == ["after the step: not run for pipelines and compiled models"]


def test_the_longest_sample_is_within_the_positions() -> None:
    assert check_longest(recipe(), None) == 64, "the config's positions"
    assert check_longest(recipe(batch=Batch(micro=1, seq=16)), None) == 32
    assert check_longest(recipe(), 48) == 48
    with pytest.raises(InputError, match="--longest = 16: the recipe's sequences have 32 tokens"):
        check_longest(recipe(), 16)


# -- steps of varied lengths


def test_lengths_are_drawn_alike_each_time() -> None:
    lengths = draw_lengths(1024, 1000, seed=0)
    assert lengths == draw_lengths(1024, 1000, seed=0) != draw_lengths(1024, 1000, seed=1)
    assert max(lengths) == 1024
    assert all(length % (1024 // BUCKETS) == 0 for length in lengths)
    assert 10 < len(set(lengths)) <= BUCKETS


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_equal_lengths_reserve_what_is_predicted(optimizer: str) -> None:
    """Also where an update replaces its state by new tensors."""
    one = recipe(optimizer={"name": optimizer})
    ledger = ledger_of(one).with_lower_peak()
    run = replay_lengths({32: ledger}, [32] * 4, CachingAllocator())
    assert run.reserved[-1] == predict(one).peak_reserved_bytes
    assert max(run.allocated) == predict(one).peak_allocated_bytes
    assert run.failed is None


def test_a_length_alone_is_its_own_prediction() -> None:
    ledgers = {
        seq: ledger_of(recipe(batch=Batch(micro=8, seq=seq))).with_lower_peak() for seq in (8, 16, 32, 64)
    }
    run = replay_lengths(ledgers, [16, 64, 8, 32, 64], CachingAllocator())
    longest = replay(ledgers[64], CachingAllocator())
    # The first step is another's: its optimizer states are the same.
    assert run.allocated[1] == run.allocated[4] == longest.phases.steady.peak
    assert run.allocated[2] < run.allocated[3] < run.allocated[4]


def two_tensors(first: int, second: int) -> Ledger:
    """A step that needs two tensors at once, and frees both; nothing outlives it."""
    segments = [Segment("init", "init"), Segment("first", "forward"), Segment("steady", "forward")]
    storages, events = list[Storage](), list[Event]()
    for segment in (1, 2):
        for name, size in (("a", first), ("b", second)):
            events.append(Event(ALLOCATE, len(storages), NO_LAYER, segment))
            storages.append(Storage(size, "activations", NO_LAYER, -1, f"{segment}/{name}"))
        events += [Event(FREE, len(storages) - number, NO_LAYER, segment) for number in (2, 1)]
    return Ledger(segments=segments, storages=storages, events=events)


@pytest.mark.parametrize(
    ("limit", "fitting"),
    [
        (100, {"init", "first", "steady", EVALUATION, CHECKPOINT}),
        (50, {"init", "first", "steady"}),
        (20, {"init"}),
        (400, {"init", "first", "steady", EVALUATION, FULL_STATE, CHECKPOINT}),
    ],
)
def test_a_spike_that_does_not_fit_says_nothing_of_the_others(limit: int, fitting: set[str]) -> None:
    sizes = {"init": 0, "first": 40, "steady": 40, EVALUATION: 60, FULL_STATE: 200, CHECKPOINT: 80}
    segments = [Segment(step, "forward") for step in sizes]
    storages, events = list[Storage](), list[Event]()
    for number, (step, size) in enumerate(sizes.items()):
        if size:
            place = len(storages), NO_LAYER, number
            events += [Event(ALLOCATE, *place), Event(FREE, *place)]
            storages.append(Storage(size * MIB, "activations", NO_LAYER, -1, step))
    ledger = Ledger(segments=segments, storages=storages, events=events)
    found = step_peaks(ledger, limit * MIB, expandable=False)
    assert {name: peak for name, (peak, _) in found.items()} == {
        name: size * MIB for name, size in sizes.items()
    }
    assert {name for name, (_, fits) in found.items() if fits} == fitting


def late(limit: int, *, expandable: bool = False) -> tuple[VariedRun, VariedRun]:
    """Return runs of the longest sample at once, and after 120 steps of another length."""
    ledgers = {1: two_tensors(64 * MIB, 12 * MIB), 2: two_tensors(40 * MIB, 56 * MIB)}
    at_once = replay_lengths(ledgers, [2, 2], CachingAllocator(limit, expandable))
    after = replay_lengths(ledgers, [*[1] * 120, 2], CachingAllocator(limit, expandable))
    return at_once, after


def test_the_longest_sample_may_fail_late_although_it_fits_at_once() -> None:
    """The cached segment of 64 MiB holds the first tensor, so 24 MiB of it are lost to the second."""
    at_once, after = late(100 * MIB)
    assert (at_once.failed, at_once.reserved[-1]) == (None, 96 * MIB)
    assert after.failed == 120
    assert late(100 * MIB, expandable=True)[1].failed is None
    assert late(128 * MIB)[1].failed is None


def test_varied_lengths_fragment_a_models_memory() -> None:
    config = dict(recipe().model.config) | {  # pyright: ignore
        "hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096, "max_position_embeddings": 512,
    }  # fmt: skip
    model = recipe().model.model_copy(update={"config": config})
    seqs = (128, 192, 256, 320, 384, 448, 512)
    ledgers = {
        seq: ledger_of(
            recipe(batch=Batch(micro=4, seq=seq), precision="bf16").model_copy(update={"model": model})
        ).with_lower_peak()
        for seq in seqs
    }
    lengths = [seqs[length * 7 // 513] for length in draw_lengths(512, 120, seed=0)]
    longest = replay_lengths(ledgers, [512] * 3, CachingAllocator()).reserved[-1]
    plain = replay_lengths(ledgers, [*lengths, 512], CachingAllocator())
    joined = replay_lengths(ledgers, [*lengths, 512], CachingAllocator(expandable_segments=True))
    assert plain.reserved == sorted(plain.reserved), "nothing is given back"
    assert plain.reserved[-1] > 1.1 * longest, "the same length has fewer segments that fit its tensors"
    assert joined.reserved[-1] < plain.reserved[-1]
    # As much memory as steps of 448 tokens reserve: 120 of at most so many fit, a longer one does not.
    shorter = [min(length, 448) for length in lengths]
    limit = replay_lengths(ledgers, [448] * 3, CachingAllocator()).reserved[-1]
    assert replay_lengths(ledgers, [*shorter, 512], CachingAllocator(limit)).failed == 120


def wide(seq: int) -> Recipe:
    config = dict(recipe().model.config) | {"hidden_size": 512, "intermediate_size": 1536}  # pyright: ignore
    model = recipe().model.model_copy(update={"config": config | {"vocab_size": 8192}})
    return recipe(batch=Batch(micro=64, seq=seq)).model_copy(update={"model": model})


# -- what changes would save


def test_each_saving_is_the_difference_of_two_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfit.planning.savings.MOST", 4)
    one = wide(32)
    with Estimates(processes=0) as estimates:
        found = savings(one, predict(one), estimates)
    assert found.is_complete
    own = predict(one).peak_device_bytes
    assert found.peak_device_bytes == own
    changes = {one.change: one for one in found.changes}
    assert [one.saved_bytes for one in found.changes] == sorted(
        (one.saved_bytes for one in found.changes), reverse=True
    )
    for change, other in (
        ("recompute: full", one.model_copy(update={"recompute": "full"})),
        (
            "batch.micro: 32, batch.accumulate: 2",
            one.model_copy(update={"batch": Batch(micro=32, seq=32, accumulate=2)}),
        ),
    ):
        predicted = predict(other)
        assert changes[change].saved_bytes == own - predicted.peak_device_bytes > 0
        assert changes[change].peak_device_bytes == predicted.peak_device_bytes
        assert changes[change].time_ratio == pytest.approx(
            predict(one).tokens_per_s / predicted.tokens_per_s  # pyright: ignore[reportOptionalOperand]
        )


def test_the_time_for_it_is_limited() -> None:
    one = wide(32)
    with Estimates(processes=0) as estimates:
        found = savings(one, predict(one), estimates, limit_s=0.0)
    assert (found.changes, found.is_complete) == ((), False)


# -- the command


def test_the_command_adds_what_comes_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainfit.explanation.later.lengths.BUCKETS", 4)
    monkeypatch.setattr("trainfit.explanation.later.lengths.MOST_EVENTS", 200_000)
    path = tmp_path / "a.json"
    content = recipe(hardware={"gpu": "h100-sxm"}, batch=Batch(micro=2, seq=16)).content()
    path.write_text(json.dumps(content))
    words = ["explain", str(path), "--later", "--eval-batch", "32", "--longest", "24"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["later"]
    steps = found["lengths"]["num_steps"]
    assert 10 < steps < 1000, "as many as the limit on events allows"
    assert found["lengths"]["late_length"] == 24
    assert found["lengths"]["late_fits"] is True
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) == 0
    printed = capsys.readouterr().out
    out = " ".join(printed.split())
    modules = printed.partition("By module and category")[2].partition("Who holds")[0]
    assert re.search(r"^  model\.embed_tokens +[\d.]+ [KM]iB  ", modules, re.M), "no figure is cut"
    assert f"{steps} steps of varied lengths" in out
    assert "32 x 16 tokens, without gradients" in out
    assert "--changes: what each change would save" in out
    assert "By module and category" in out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["gpt2", "gpt2", "--later"], "--later: it needs a single recipe"),
        (["a.pickle", "--changes"], "--changes: it needs a single recipe"),
        (["gpt2", "--longest", "2k"], "--longest: it is part of --later"),
        (["gpt2", "--eval-batch", "2"], "--eval-batch: it is part of --later"),
    ],
)
def test_what_is_of_one_recipe_is_refused_elsewhere(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words]) == 65
    assert problem in capsys.readouterr().err
