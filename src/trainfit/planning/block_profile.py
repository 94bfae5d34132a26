"""Cut a ledger at the borders of the decoder blocks: memory and work of each block and in between."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from trainfit.ledger.ledger import ALLOCATE, Ledger, Op
from trainfit.ledger.segments import rounded
from trainfit.prediction.time.roofline import device_seconds
from trainfit.spec.hardware import Gpu

UNKNOWN_GPU = {"flops_per_s": 1e12, "bytes_per_s": 1e11}
"""Rates of a device whose own are not known (a CPU): they only rank plans."""
BEFORE, AFTER = -1, -2
"""Numbers of the stretches before the first block and after the last one."""


@dataclass
class Piece:
    """Memory of one stretch of a step, in bytes relative to its beginning."""

    peak_bytes: int = 0
    net_bytes: int = 0


@dataclass
class Work:
    """Work of a stretch of one step, all micro-batches."""

    gpu_s: float = 0.0
    num_ops: int = 0
    num_products: int = 0
    num_again: int = 0
    """FLOPs of recomputed matrix products."""


class Labels:
    """Map operations and storages to the block that they belong to; None: no block."""

    def __init__(self, ledger: Ledger, name: str):
        self._ledger = ledger
        self._pattern = re.compile(rf"(?:^|[./]){re.escape(name)}\.(\d+)\.")

    def of_op(self, op: Op) -> int | None:
        return self._in(op.module + ".")

    def of_storage(self, index: int) -> int | None:
        storage = self._ledger.storages[index]
        found = self._in(storage.path)
        if found is None and storage.op >= 0:
            found = self.of_op(self._ledger.ops[storage.op])
        return found

    def _in(self, text: str) -> int | None:
        match = self._pattern.search(text)
        return int(match.group(1)) if match else None


def _size(ledger: Ledger, index: int) -> int:
    return rounded(ledger.storages[index].num_bytes)


def alive_bytes(ledger: Ledger, label: Labels, segment: int) -> tuple[int, Counter[int | None]]:
    """Return the bytes alive when a segment begins: in total, and by block."""
    alive: set[int] = set()
    for event in ledger.events:
        if event.segment >= segment:
            break
        (alive.add if event.kind == ALLOCATE else alive.discard)(event.storage)
    by_block: Counter[int | None] = Counter()
    for index in alive:
        by_block[label.of_storage(index)] += _size(ledger, index)
    return by_block.total(), by_block


def pieces_of(ledger: Ledger, label: Labels, segment: int, order: range) -> dict[int, Piece]:
    """Return the pieces of one forward or backward: before, of each block in ``order``, and after the blocks.

    A block's piece begins with the first allocation in it. Frees belong to the allocations before them.
    """
    events = [event for event in ledger.events if event.segment == segment]
    blocks = [label.of_storage(event.storage) if event.kind == ALLOCATE else None for event in events]
    ends = max((i for i, block in enumerate(blocks) if block is not None), default=-1)
    ranks = {block: rank for rank, block in enumerate(order)}
    pieces = {BEFORE: Piece(), AFTER: Piece(), **{block: Piece() for block in order}}
    current = BEFORE
    for i, event in enumerate(events):
        block = blocks[i]
        if block is not None and (current == BEFORE or ranks[block] > ranks[current]):
            current = block
        elif event.kind == ALLOCATE and i > ends and current != BEFORE:
            current = AFTER
        piece, size = pieces[current], _size(ledger, event.storage)
        piece.net_bytes += size if event.kind == ALLOCATE else -size
        piece.peak_bytes = max(piece.peak_bytes, piece.net_bytes)
    return pieces


def late_bytes(ledger: Ledger, label: Labels, segment: int) -> Counter[int | None]:
    """Return the bytes, by block, that a forward frees after its last block's last allocation."""
    events = [event for event in ledger.events if event.segment == segment]
    ends = max(
        (i for i, e in enumerate(events) if e.kind == ALLOCATE and label.of_storage(e.storage) is not None),
        default=0,
    )
    begins = next((i for i in range(ends + 1, len(events)) if events[i].kind == ALLOCATE), len(events))
    late: Counter[int | None] = Counter()
    for event in events[begins:]:
        if event.kind != ALLOCATE:
            late[label.of_storage(event.storage)] += _size(ledger, event.storage)
    return late


def work_by_block(ledger: Ledger, label: Labels, gpu: Gpu) -> defaultdict[tuple[int | None, str], Work]:
    """Return the work of a steady step by block and phase.

    (None, "optimizer") is the update, (None, "") all other work outside the blocks.
    """
    works: defaultdict[tuple[int | None, str], Work] = defaultdict(Work)
    seconds = _device_seconds(ledger, gpu)
    for op in ledger.steady_ops:
        block, phase = label.of_op(op), ledger.segments[op.segment].phase
        if phase == "optimizer":
            block = None
        elif block is None:
            phase = ""
        work = works[block, phase]
        work.gpu_s += seconds.get(id(op), 0.0)
        work.num_ops += op.calls
        if op.causal_flops and phase == "forward":
            work.num_products += 1
        if ledger.recomputes(op):
            work.num_again += 1
    return works


def _device_seconds(ledger: Ledger, gpu: Gpu) -> dict[int, float]:
    if gpu.memory_bytes_per_s is not None and gpu.peak_flops_per_s:
        return device_seconds(ledger, gpu)
    flops_per_s, bytes_per_s = UNKNOWN_GPU["flops_per_s"], UNKNOWN_GPU["bytes_per_s"]
    return {
        id(op): max(op.causal_flops / flops_per_s, op.num_bytes / bytes_per_s) for op in ledger.steady_ops
    }
