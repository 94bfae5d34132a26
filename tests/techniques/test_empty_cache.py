"""Reserved memory: the cache emptied every n steps, and expandable segments set by the environment."""

import pytest
import torch
from torch import nn

from tiny_recipe import tiny_recipe
from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.allocator_settings import allocator_settings
from trainfit.ledger.ledger import ALLOCATE, FREE, NO_LAYER, Event, Ledger, Segment, Storage
from trainfit.ledger.replay import replay
from trainfit.prediction.predict import predict
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware
from trainfit.techniques import empty_cache
from trainfit.techniques.draft import Draft
from virtual_runs import recipe_of

MIB = 1 << 20
INIT, FIRST, STEADY = Segment("init", "init"), Segment("first", "forward"), Segment("steady", "forward")


def changing(every: int | None) -> Ledger:
    """The first step needs 100 MiB at once, a steady one 60 and 60."""
    sizes = (30, 100, 60, 60)
    order = [(ALLOCATE, 0, 0), (ALLOCATE, 1, 1), (FREE, 1, 1)]
    order += [(ALLOCATE, 2, 2), (ALLOCATE, 3, 2), (FREE, 2, 2), (FREE, 3, 2)]
    return Ledger(
        segments=[INIT, FIRST, STEADY],
        storages=[Storage(size * MIB, "temporary", NO_LAYER, -1, "") for size in sizes],
        events=[Event(kind, storage, NO_LAYER, segment) for kind, storage, segment in order],
        empty_cache_every=every,
    )


@pytest.mark.parametrize(
    ("every", "reserved"), [(None, 30 + 100 + 60), (2, 30 + 100 + 60), (1, 30 + 60 + 60)]
)
def test_the_next_step_takes_new_segments(every: int | None, reserved: int):
    """Kept, 60 MiB are cut out of the 100 MiB that the first step left, and the other 60 are new."""
    replayed = replay(changing(every), CachingAllocator(), empty_cache_after_init=True)
    assert replayed.peak_reserved_bytes == reserved * MIB
    assert replayed.peak_allocated_bytes == 150 * MIB


class Noting(CachingAllocator):
    """Notes after how many steps (two allocations each, but one in the first) the cache is emptied."""

    def __init__(self) -> None:
        super().__init__()
        self.mallocs, self.emptied = 0, []

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        self.mallocs += 1
        return super().malloc(num_bytes)

    def empty_cache(self) -> None:
        self.emptied.append(self.mallocs // 2)
        super().empty_cache()


@pytest.mark.parametrize(
    ("every", "emptied", "steps"),
    [(None, [0], 3), (1, [0, 1, 2], 3), (2, [0, 2], 3), (3, [0, 3], 4), (100, [0, 3], 4)],
)
def test_steps_are_replayed_until_one_after_it_was_emptied(every: int | None, emptied: list[int], steps: int):
    """At 100 the 96 steps that change nothing are passed over."""
    allocator = Noting()
    replay(changing(every), allocator, empty_cache_after_init=True, more_steps=8)
    assert (allocator.emptied, allocator.mallocs // 2) == (emptied, steps)


def test_a_prediction_follows_the_recipe_and_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    recipe = recipe_of("gpt2", batch=Batch(micro=2, seq=256))
    before, emptied = predict(recipe), predict(recipe.model_copy(update={"empty_cache_every": 1}))
    # Blocks are cut out of other segments, some of them larger than requested.
    assert emptied.peak_allocated_bytes == pytest.approx(before.peak_allocated_bytes, rel=0.005)
    assert before.peak_reserved_bytes != emptied.peak_reserved_bytes
    assert any("take memory back" in line for line in emptied.assumptions)
    assert not any("take memory back" in line for line in before.assumptions)

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    after = predict(recipe)
    # Every block is cut to its size, where otherwise up to 1 MiB stays with it.
    assert 0.98 * before.peak_allocated_bytes < after.peak_allocated_bytes < before.peak_allocated_bytes
    assert after.peak_allocated_bytes <= after.peak_reserved_bytes < before.peak_reserved_bytes
    # Whole pages: 2 MiB of small blocks, 20 MiB of large ones.
    assert after.peak_reserved_bytes % (2 * MIB) == 0
    assert any("expandable segments" in line for line in after.assumptions)
    on_cpu = predict(recipe.model_copy(update={"hardware": Hardware(gpu="cpu")}))
    assert not any("expandable" in line for line in on_cpu.assumptions)


@pytest.mark.parametrize(("device", "calls"), [("cuda", 3), ("cpu", 0)])
def test_a_cuda_device_empties_its_cache_each_nth_time(
    device: str, calls: int, monkeypatch: pytest.MonkeyPatch
):
    called: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append(1))
    draft = Draft(nn.Linear(1, 1), torch.device(device), lambda module: None)
    empty_cache.apply(tiny_recipe(empty_cache_every=3), draft)
    for hook in draft.after_step * 10:
        hook()
    assert len(called) == calls


# -- settings of the allocator


@pytest.mark.parametrize(
    ("environment", "expandable", "words"),
    [
        ({}, False, ()),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True, ("expandable",)),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,backend:native"}, True, ("expandable",)),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False, pinned_num_register_threads:8"}, False, ()),
        # torch reads the older name first.
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
          "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
         False, ()),
        ({"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,>:4],max_split_size_mb:64"}, False,
         ("roundup_power2_divisions, max_split_size_mb, which is not modelled",)),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, False, ("backend, which is not modelled",)),
    ],
)  # fmt: skip
def test_what_the_environment_says(environment: dict[str, str], expandable: bool, words: tuple[str, ...]):
    found = allocator_settings(environment)
    assert found.expandable_segments == expandable
    assert len(found.assumptions) == len(words)
    assert all(word in line for word, line in zip(words, found.assumptions, strict=True))


def test_what_torch_refuses_is_refused():
    with pytest.raises(InputError, match=r"PYTORCH_ALLOC_CONF.*True or False"):
        allocator_settings({"PYTORCH_ALLOC_CONF": "expandable_segments:true"})
