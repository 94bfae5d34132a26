"""Compare two ledgers: their totals, and the operations and allocations that differ. No torch here."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from trainfit.explanation.peak import merged_path
from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.replay import replay


class Total(NamedTuple):
    """A quantity of both ledgers."""

    name: str
    first: float
    second: float


class Entry(NamedTuple):
    """Entries of equal name in one phase, in either ledger."""

    phase: str
    """Step and phase, such as ``steady.backward``."""
    module: str
    """Path of the module, with a star for the layer's number."""
    name: str
    """The operation; of an allocation also its category."""
    first: float
    """Of operations how often they run; of allocations bytes, all of the phase added up."""
    second: float


class Comparison(NamedTuple):
    """Differences of two ledgers; identical layers are counted as often as the model has them."""

    totals: list[Total]
    ops: list[Entry]
    allocations: list[Entry]


def compare(first: Ledger, second: Ledger) -> Comparison:
    """Return what two ledgers add up to, and where they differ, the largest differences first.

    Peaks are those of a replay without a memory limit.
    """
    both = (first, second)
    sums = [dict(_sums(one)) for one in both]
    return Comparison(
        [Total(name, sums[0][name], sums[1][name]) for name in sums[0]],
        _unlike(*(Counter(_ops(one)) for one in both)),
        _unlike(*(Counter(_allocations(one)) for one in both)),
    )


def _sums(ledger: Ledger) -> Iterator[tuple[str, float]]:
    played = replay(ledger, CachingAllocator(), empty_cache_after_init=True)
    yield "traced operations", len(ledger.ops)
    yield "steady operations", sum(ledger.times(op) for op in ledger.steady_ops)
    yield "collectives", sum(ledger.times(one) for one in ledger.collectives)
    yield "allocations", sum(event.kind for event in ledger.expand())
    yield "model FLOPs", ledger.steady_sum("model_flops")
    yield "hardware FLOPs", ledger.steady_sum("causal_flops")
    yield "bytes moved", ledger.steady_sum("num_bytes")
    yield "peak allocated", played.peak_allocated_bytes
    yield "peak reserved", played.peak_reserved_bytes


def _ops(ledger: Ledger) -> dict[tuple[str, str, str], int]:
    found = Counter[tuple[str, str, str]]()
    for op in ledger.ops:
        found[_phase(ledger, op.segment), merged_path(op.module), op.name] += ledger.times(op)
    return found


def _allocations(ledger: Ledger) -> dict[tuple[str, str, str], int]:
    found = Counter[tuple[str, str, str]]()
    for event in ledger.expand():
        if event.kind:
            op = ledger.storages[event.storage].op
            made_by = ledger.ops[op] if op >= 0 else None
            name = f"{event.category}: {made_by.name if made_by else 'library workspace'}"
            module = merged_path(made_by.module) if made_by else ""
            found[_phase(ledger, event.segment), module, name] += event.num_bytes
    return found


def _phase(ledger: Ledger, segment: int) -> str:
    return ".".join(dict.fromkeys(ledger.segments[segment]))


def _unlike(first: Counter[tuple[str, str, str]], second: Counter[tuple[str, str, str]]) -> list[Entry]:
    entries = [Entry(*key, first[key], second[key]) for key in {**first, **second}]
    unlike = [one for one in entries if one.first != one.second]
    return sorted(unlike, key=lambda one: (-abs(one.second - one.first), one))
