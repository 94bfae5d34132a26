"""Reading data: the same batches with any number of workers, their end, and no byte more on the device."""

import multiprocessing
import os
import pickle
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiny_recipe import tiny_recipe
from tiny_training import Listener, options_for, stop_at, tiny
from trainfit.measurement.feed import Feed, Source, random_tokens
from trainfit.measurement.run import measure
from trainfit.prediction.predict import predict
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware, Loader
from trainfit.techniques import registry
from trainfit.training.corpus import Corpus
from trainfit.training.loop import train
from trainfit.training.order import sequence_numbers, step_sequences
from trial_start import forked

CPU = torch.device("cpu")


def feed(loader: Loader, source: Source, steps: range) -> Feed:
    recipe = tiny_recipe(loader=loader, batch=Batch(micro=2, seq=16, accumulate=3))
    return Feed(recipe, source, CPU, steps)


def corpus(folder: Path) -> Corpus:
    np.arange(1000, dtype=np.uint16).tofile(folder / "train.bin")
    return Corpus(np.memmap(folder / "train.bin", dtype=np.uint16, mode="r"), 16)


@pytest.mark.parametrize("loader", [Loader(), Loader(workers=2, prefetch=1)], ids=str)
def test_each_step_gets_its_own_sequences_whoever_reads_them(loader: Loader, tmp_path: Path):
    source = partial(step_sequences, corpus(tmp_path), 7, 6)
    with feed(loader, source, range(4, 9)) as batches:
        found = list(batches)
    assert len(found) == 5
    for step, micro_batches in zip(range(4, 9), found, strict=True):
        numbers = sequence_numbers(7, step, 6, 62)
        expected = torch.from_numpy(numbers[:, None] * 16 + np.arange(16))
        assert [len(batch["input_ids"]) for batch in micro_batches] == [2, 2, 2]
        assert torch.equal(torch.cat([batch["input_ids"] for batch in micro_batches]), expected)
        assert torch.equal(torch.cat([batch["labels"] for batch in micro_batches]), expected)


def test_torchs_own_generator_is_left_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with feed(Loader(workers=1), partial(random_tokens, 50, 6, 16, 0), range(2)) as batches:
        next(batches)
    assert torch.equal(torch.rand(3), expected)


def test_a_corpus_goes_to_another_process_by_name(tmp_path: Path):
    known = corpus(tmp_path)
    sent = pickle.dumps(known)
    assert len(sent) < 500 + len(str(tmp_path))
    assert np.array_equal(pickle.loads(sent).tokens, known.tokens)


def test_random_tokens_depend_on_seed_and_step():
    source = partial(random_tokens, 50, 6, 16, 3)
    ids = source(5)["input_ids"]
    assert torch.equal(ids, source(5)["input_ids"])
    assert not torch.equal(ids, source(6)["input_ids"])
    assert not torch.equal(ids, random_tokens(50, 6, 16, 4, 5)["input_ids"])
    assert (ids.min() >= 0, ids.max() < 50, ids.shape) == (True, True, (6, 16))
    positions = random_tokens(50, 2, 4, 3, 5, positions=True)["position_ids"]
    assert positions.tolist() == [[0, 1, 2, 3]] * 2


# -- workers end


def fails(at: int, step: int) -> dict[str, torch.Tensor]:
    if step == at:
        raise OSError(f"cannot read step {step}")
    return {"input_ids": torch.zeros(6, 16, dtype=torch.int64)}


def test_an_error_of_the_reader_or_elsewhere_ends_the_workers():
    failing = feed(Loader(workers=2), partial(fails, 2), range(9))
    with pytest.raises(OSError, match="cannot read step 2"), failing as batches:
        list(batches)
    assert multiprocessing.active_children() == []
    with pytest.raises(ZeroDivisionError), feed(Loader(workers=2), partial(fails, -1), range(9)):
        raise ZeroDivisionError
    assert multiprocessing.active_children() == []


def test_workers_outlive_the_first_signal_of_a_group():
    with feed(Loader(workers=2, prefetch=1), partial(fails, -1), range(40)) as batches:
        next(batches)
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGTERM)
        assert len(list(batches)) == 39
    assert multiprocessing.active_children() == []


def hangs(file: Path, step: int) -> torch.Tensor:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file.touch()
    time.sleep(600)
    raise AssertionError("not reached")


def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    with feed(Loader(workers=1), partial(hangs, tmp_path / "hanging"), range(3)):
        while not (tmp_path / "hanging").exists():
            time.sleep(0.01)
    assert multiprocessing.active_children() == []


# -- training


def test_training_is_the_same_to_the_last_bit_with_workers_and_after_a_signal(tmp_path: Path):
    control = train(tiny(), options_for(tmp_path / "control", 8))
    recipe = tiny("loader={workers: 2, prefetch: 3, pin_memory: false}")
    first = train(recipe, options_for(tmp_path / "broken", 8), observers=[Listener(stop_at(3))])
    assert (first.status, first.steps) == ("stopped", 3)
    second = train(recipe, options_for(tmp_path / "broken", 8, resume=True))
    assert first.losses + second.losses == control.losses
    assert multiprocessing.active_children() == []


GROUP = """
from tiny_training import options_for, tiny
from trainfit.training.loop import train

def main(folder):
    options = options_for(folder / "run", 100000, save_every=10)
    (folder / "status").write_text(train(tiny("loader.workers=2"), options).status)
    return 0
"""


def test_a_signal_to_the_whole_group_saves_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "trains_in_group.py").write_text(GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    group = forked(tmp_path, "trains_in_group")
    deadline = time.monotonic() + 600
    while not list(tmp_path.glob("run/checkpoints/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(group, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(group, 0)[1]) == 0
    assert (tmp_path / "status").read_text() == "stopped"
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


# -- what is predicted and measured


def test_no_byte_more_on_the_device():
    batch, hardware = Batch(micro=2, seq=16, accumulate=2), Hardware(gpu="cpu")
    plain = tiny_recipe(batch=batch, hardware=hardware)
    phases = predict(plain).phases
    for loader in (Loader(workers=1), Loader(pin_memory=False)):
        recipe = plain.model_copy(update={"loader": loader})
        measured = measure(recipe, steps=1, device="cpu", start=forked)
        assert measured.status == "done", measured.message
        assert predict(recipe).phases == measured.phases == phases
        assert len(set(measured.losses)) == len(measured.losses), "each step has a batch of its own"


def test_prefetch_without_workers_is_refused():
    with pytest.raises(InputError, match=r"loader.prefetch = 4.*loader.workers to 1 or more"):
        registry.check(tiny_recipe(loader=Loader(prefetch=4)))
    registry.check(tiny_recipe(loader=Loader(workers=64, prefetch=4)))


def test_id_of_a_recipe_without_a_loader_is_what_it_was():
    plain: Any = tiny_recipe()
    assert plain.id == tiny_recipe(loader=Loader()).id
    assert plain.id != tiny_recipe(loader=Loader(workers=2)).id
