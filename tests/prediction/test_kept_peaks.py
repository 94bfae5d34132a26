"""What a replay found is kept beside the ledger: equal answers, without replaying."""

from pathlib import Path

import pytest

from tiny_recipe import TINY_LLAMA
from trainfit.prediction import estimate as estimates
from trainfit.prediction import kept_peaks
from trainfit.prediction.predict import predict
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    return tmp_path


def recipe(**settings: object) -> Recipe:
    return recipe_from({"model": {"config": TINY_LLAMA}, "batch": {"micro": 2, "seq": 16}, **settings})


def no_replay(*_: object) -> None:
    raise AssertionError("replayed")


def test_a_second_prediction_is_equal_and_replays_nothing(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = predict(recipe())
    assert len(list(cache_folder.glob(f"*{kept_peaks.ENDING}"))) == 1
    monkeypatch.setattr(estimates, "replay_on", no_replay)
    assert predict(recipe()) == first
    priced = predict(recipe(hardware={"gpu": "h200", "price_per_hour": 1.5}))
    assert priced.peak_allocated_bytes == first.peak_allocated_bytes
    with pytest.raises(AssertionError, match="replayed"):
        predict(recipe(), use_cache=False)


def test_a_damaged_file_is_replayed_and_written_again(cache_folder: Path) -> None:
    first = predict(recipe())
    (path,) = cache_folder.glob(f"*{kept_peaks.ENDING}")
    whole = path.read_bytes()
    for damaged in (b"", whole[:-7], b"[]", b'{"fits": true, "peaks": []}', b'{"fits": true, "peaks": [{}]}'):
        path.write_bytes(damaged)
        assert predict(recipe()) == first
        assert path.read_bytes() == whole


def test_other_settings_of_the_allocator_and_another_ledger_are_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    predict(recipe())
    monkeypatch.setattr(estimates, "replay_on", no_replay)
    with pytest.raises(AssertionError, match="replayed"):
        predict(recipe(recompute="full"))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(AssertionError, match="replayed"):
        predict(recipe())
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    predict(recipe())
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # torch reads it first.
    with pytest.raises(AssertionError, match="replayed"):
        predict(recipe())
