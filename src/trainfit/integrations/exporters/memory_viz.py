"""Export a ledger as a memory snapshot of PyTorch, which pytorch.org/memory_viz opens."""

import os
import pickle
from contextlib import suppress
from pathlib import Path

from trainfit.ledger.allocator import OutOfMemory
from trainfit.ledger.allocator_settings import allocator_settings
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.snapshot import RecordingAllocator, snapshot_of
from trainfit.spec.files import writing

PROTOCOL = 4
"""Of the pickle: what the page's reader and ``torch.cuda.memory._dump_snapshot`` have in common."""


def write_snapshot(ledger: Ledger, path: Path, capacity_bytes: int | None, *, expandable: bool) -> None:
    """Write what the allocator does in a ledger's steps as a snapshot: plain data.

    A ledger that only fits where the cache is emptied on demand is replayed within the capacity, as its
    prediction is; one that does not fit at all, without a limit.

    Args:
        capacity_bytes: the allocator's limit on the GPU; None: no limit.
        expandable: with ``expandable_segments:True``.

    Raises:
        OSError: the file cannot be written.
    """
    ledger = ledger.with_lower_peak()
    allocator = RecordingAllocator(None, expandable)
    content = snapshot_of(ledger, allocator, empty_cache_after_init=True)
    if capacity_bytes is not None and allocator.peak_reserved_bytes > capacity_bytes:
        limited = RecordingAllocator(capacity_bytes, expandable)
        with suppress(OutOfMemory):  # It does not fit: the snapshot shows how much it would take.
            content = snapshot_of(ledger, limited, empty_cache_after_init=True)
    with writing(path), path.open("wb") as file:
        pickle.dump(content, file, protocol=PROTOCOL)


def is_expandable() -> bool:
    """Return whether the environment sets ``expandable_segments:True``."""
    return allocator_settings(os.environ).expandable_segments
