"""Loaders of text: files evicted from the page cache, equal batches of every data set, shares of waiting."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainfit.bench.experiments import dataloader
from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.runner import RULES
from trainfit.bench.harness.stopwatch import CpuStopwatch
from trainfit.bench.workloads import text_batches
from trainfit.bench.workloads.text_batches import Sizes, TextFiles, check_evicted, resident_share
from trainfit.spec.errors import InputError

SIZES = Sizes(documents=24, distinct=5, batch=3, seq=32)


@pytest.fixture(scope="module")
def files() -> Iterator[TextFiles]:
    made = TextFiles(SIZES)
    yield made
    folder = made.folder
    made.close()
    assert not folder.exists()


def test_every_data_set_gives_the_same_batches_with_and_without_workers(files: TextFiles) -> None:
    first = None
    for tokenised, in_memory, workers in [
        (False, False, 0),
        (True, False, 1),
        (False, True, 1),
        (True, True, 0),
    ]:
        batches = text_batches.token_batches(
            files, tokenised=tokenised, in_memory=in_memory, workers=workers, prefetch=2, pinned=False
        )
        found = torch.stack(list(itertools.islice(batches, 4)))
        assert found.shape == (4, SIZES.batch, SIZES.seq)
        assert found.dtype == torch.int64
        first = found if first is None else first
        assert torch.equal(found, first)
    assert first is not None
    text = files.tokenizer.decode(first[0, 0].tolist())
    assert text in files.text.read_text(), "the tokens are those of the text"


def test_an_evicted_file_is_read_from_the_disk_again(files: TextFiles) -> None:
    assert len(files.starts) == SIZES.documents + 1
    assert files.text.stat().st_size == files.starts[-1]
    files.tokens.read_bytes()
    assert resident_share(files.tokens) == 1.0
    try:
        check_evicted(files.tokens)
    except InputError:
        pytest.skip("the file system of the temporary folder is in memory")
    assert resident_share(files.tokens) <= text_batches.MOST_RESIDENT
    files.tokens.read_bytes()
    assert resident_share(files.tokens) == 1.0


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory")
def test_a_file_system_in_memory_has_no_cold_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_batches.tempfile, "tempdir", "/dev/shm")
    made = TextFiles(SIZES)
    try:
        assert len(made.starts)
        with pytest.raises(InputError, match="TMPDIR .*100% of a file's pages stay in memory"):
            check_evicted(made.tokens)
    finally:
        made.close()


def test_rates_of_a_loop_that_waits_for_half_of_its_time() -> None:
    found = dataloader._rates(10, 0.25, 0.5)
    assert found == {"step_s": 0.05, "batches_per_s": 20.0, "waiting_share": 0.5, "waits": True}
    assert dataloader._rates(10, 0.5, 0.49)["waiting_share"] == 0.0
    assert dataloader._rates(10, 0.49, 0.5)["waits"] is False


def test_the_first_rows_of_the_full_form_are_of_every_kind() -> None:
    bench = Bench(torch.device("cuda"), "full", CpuStopwatch(), None, RULES["full"], ends_at=-math.inf)
    points = [row.point for row in dataloader.run(bench)]
    first_of_many_workers = next(
        index
        for index, point in enumerate(points)
        if "tokenised" in point and point["workers"] == 0 and point["read from"] != "device"
    )
    some = points[:first_of_many_workers]
    assert len(some) == 31
    assert {point["tokenised"] for point in some if "tokenised" in point} == set(dataloader.TOKENISED)
    places = {point["read from"] for point in some if "read from" in point}
    assert places == {*dataloader.READ_FROM, "device"}
    assert {(p["prefetch"], p["pinned"]) for p in some if p.get("tokenised") == "in the collator"} == {
        (1, True), (2, True), (8, True), (8, False),
    }  # fmt: skip
    computed = {(p["workers"], p["pinned"]) for p in some if p.get("data") == "loaded"}
    assert computed == {(workers, pinned) for workers in (0, 1, 2, 4, 8) for pinned in (False, True)}
    assert len(points) == len({tuple(point.items()) for point in points}) == 55
