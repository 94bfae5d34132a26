"""Replay steps of varied lengths through one caching allocator: how far its reserved memory grows. No torch.

Every length has a ledger of its own. The first length's initialization and first step run, then the steady
steps of the lengths in turn. What a step leaves (weights, optimizer state) is found by its path in the ledger
of the next one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainfit.ledger.allocator import CachingAllocator, OutOfMemory
from trainfit.ledger.ledger import ALLOCATE, Ledger, LiveEvent

Name = tuple[str, int]
"""Path of a storage without its segment, and the number of its copy."""


@dataclass
class VariedRun:
    """Bytes of the allocator after each step, the first one included."""

    reserved: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    """The highest of each step."""
    failed: int | None = None
    """Number of the step, from 0 on, that found no room; it is the last one."""
    num_retries: int = 0


def replay_lengths(
    ledgers: Mapping[int, Ledger],
    lengths: Sequence[int],
    allocator: CachingAllocator,
    advance: Callable[[int], None] = lambda number: None,
) -> VariedRun:
    """Run one step of each of some lengths.

    Args:
        ledgers: by length, of one recipe; the first step is the first length's.
        lengths: of the steps.
        advance: called with the number of steps that are done.
    """
    run, kept = VariedRun(), dict[Name, int]()
    steady = {length: _Step.of(ledgers[length], "steady") for length in set(lengths[1:])}
    for number, length in enumerate(lengths):
        highest = [allocator.allocated_bytes]
        try:
            if number == 0:
                _Step.of(ledgers[length], "init").run(allocator, kept, highest)
                allocator.empty_cache()
                _Step.of(ledgers[length], "first").run(allocator, kept, highest)
            else:
                steady[length].run(allocator, kept, highest)
        except OutOfMemory:
            run.failed = number
        run.allocated.append(highest[0])
        run.reserved.append(allocator.reserved_bytes)
        run.num_retries = allocator.num_retries
        if run.failed is not None:
            break
        advance(number + 1)
    return run


class _Step(NamedTuple):
    """Events of one step of a ledger, and the stream and name of each of its storages."""

    events: list[LiveEvent]
    streams: list[int]
    names: list[str]

    @classmethod
    def of(cls, ledger: Ledger, step: str) -> "_Step":
        inside = [one for one in ledger.expand() if ledger.segments[one.segment].step == step]
        streams = [storage.stream for storage in ledger.storages]
        return cls(inside, streams, [storage.path.partition("/")[2] for storage in ledger.storages])

    def run(self, allocator: CachingAllocator, kept: dict[Name, int], highest: list[int]) -> None:
        """Run the events; ``kept`` has what is alive before them, and then what they leave."""
        streams, names = self.streams, self.names
        malloc, free, most = allocator.malloc, allocator.free, highest[0]
        alive: dict[tuple[int, int], int] = {}
        for kind, key, num_bytes, _, _, storage in self.events:
            if kind == ALLOCATE:
                alive[key] = malloc(num_bytes, streams[storage])
                if allocator.allocated_bytes > most:
                    most = highest[0] = allocator.allocated_bytes
            else:
                handle = alive.pop(key, None)
                free(kept.pop((names[storage], key[1])) if handle is None else handle)
        kept |= {(names[key[0]], key[1]): handle for key, handle in alive.items()}
