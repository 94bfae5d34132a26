"""The replay of a ledger: what is reserved once building is over, worked out by hand from the allocator's rules."""

from trainfit.spec.units import MIB
from trainfit.virtual.allocator import CachingAllocator
from trainfit.virtual.ledger import ALLOCATE, FREE, NO_LAYER, Event, Ledger, Segment, Storage
from trainfit.virtual.replay import Tally, replay


def built_with_scratch() -> Ledger:
    """Building takes 40 MiB of weights and 64 of scratch; the step takes 24."""
    sizes = (("weights", 40), ("temporary", 64), ("activations", 24))
    storages = [Storage(size * MIB, category, NO_LAYER, -1, category) for category, size in sizes]
    events = [(ALLOCATE, 0, 0), (ALLOCATE, 1, 0), (FREE, 1, 0), (ALLOCATE, 2, 1), (FREE, 2, 1)]
    return Ledger(
        segments=[Segment("init", "init"), Segment("first", "forward")],
        storages=storages,
        events=[Event(kind, storage, NO_LAYER, segment) for kind, storage, segment in events],
    )


def test_scratch_of_building_serves_the_steps_unless_given_back() -> None:
    kept = replay(built_with_scratch(), CachingAllocator())
    settled = replay(built_with_scratch(), CachingAllocator(), settled=True)
    # Kept: 24 MiB come out of the free 64. Given back: a segment of their own, and only 40 + 24 are ever reserved.
    assert kept.peak_reserved_bytes == kept.init_reserved_bytes == 104 * MIB
    assert settled.peak_reserved_bytes == 64 * MIB
    assert settled.init_reserved_bytes == 104 * MIB
    for found in (kept, settled):
        assert found.peak_allocated_bytes == 64 * MIB
        assert found.phases.after_init == 40 * MIB


def test_where_nothing_is_cached_settling_changes_no_phase() -> None:
    found = [replay(built_with_scratch(), Tally(), settled=settled) for settled in (False, True)]
    assert found[0].phases == found[1].phases
    assert found[0].peak_allocated_bytes == found[1].peak_allocated_bytes == 64 * MIB
