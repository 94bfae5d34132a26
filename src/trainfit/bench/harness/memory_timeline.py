"""Memory through a run, storage by storage, in one form for a ledger and for a measured run.

An ``Account`` is made from a ledger, or by steps that run inside a ``Follower``: every storage with its size,
category and origin, and when it was allocated and freed. Sizes are rounded up to the allocator's 512 bytes.

Categories are those of ``MemoryBreakdown``, assigned for the whole lifetime: a gradient is one from its
allocation; of a forward's storages those alive when the backward begins are activations, the others
temporary.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainfit.ledger.ledger import ALLOCATE, Ledger
from trainfit.ledger.segments import MIN_BLOCK
from trainfit.measurement.live import LiveBytes
from trainfit.spec.bench import Curve
from trainfit.spec.result import CATEGORIES, PHASES

MODELS = Path("trainfit", "models").as_posix()
OPTIMIZERS = Path("torch", "optim").as_posix()
BEFORE = "before"  # Phase of storages that are alive when the account begins


@dataclass
class Piece:
    """One storage."""

    num_bytes: int
    category: str
    phase: str
    op: str
    where: str
    """``file:line`` of the model that allocated it, in a backward the autograd node; in a ledger the
    module."""


@dataclass
class Account:
    """Storages, and their allocations and frees in order, each with its phase."""

    pieces: list[Piece] = field(default_factory=list)
    events: list[tuple[int, bool, str]] = field(default_factory=list)
    """Index of the piece, whether it is allocated, and the phase."""

    def begins(self, piece: Piece) -> int:
        """Allocate a piece in its phase and return its index."""
        self.pieces.append(piece)
        self.events.append((len(self.pieces) - 1, True, piece.phase))
        return len(self.pieces) - 1

    def ends(self, index: int, phase: str) -> None:
        """Free a piece."""
        self.events.append((index, False, phase))

    def peaks(self) -> dict[str, int]:
        """Return the highest sum in each phase, including what was alive before."""
        found: dict[str, int] = {}
        now = 0
        for index, begins, phase in self.events:
            before = now
            now += self.pieces[index].num_bytes if begins else -self.pieces[index].num_bytes
            found[phase] = max(found.get(phase, before), now)
        return found

    def at_peak(self) -> list[Piece]:
        """Return what is alive at the peak."""
        alive: dict[int, Piece] = {}
        highest, at = -1, {}
        now = 0
        for index, begins, phase in self.events:
            if begins:
                alive[index] = self.pieces[index]
                now += self.pieces[index].num_bytes
            else:
                now -= alive.pop(index).num_bytes
            if now > highest and phase != BEFORE:
                highest, at = now, dict(alive)
        return list(at.values())

    def curve(self, num_points: int) -> Curve:
        """Return the highest moment of each of ``num_points`` equal stretches of the events."""
        alive, points = dict.fromkeys(CATEGORIES, 0), []
        for index, begins, phase in self.events:
            piece = self.pieces[index]
            alive[piece.category] += piece.num_bytes if begins else -piece.num_bytes
            if phase != BEFORE:
                points.append((phase, dict(alive)))
        size = -(-len(points) // num_points) or 1
        stretches = [points[at : at + size] for at in range(0, len(points), size)]
        highest = [max(stretch, key=lambda point: sum(point[1].values())) for stretch in stretches]
        columns = {name: tuple(alive[name] for _, alive in highest) for name in CATEGORIES}
        return Curve(
            phases=tuple(phase for phase, _ in highest),
            columns={name: column for name, column in columns.items() if any(column)},
        )


def of_ledger(ledger: Ledger, step: str) -> Account:
    """Return the account of one step (first, steady) of a ledger, with what is alive before it."""
    account, alive = Account(), {}
    for event in ledger.expand():
        segment, storage = ledger.segments[event.segment], ledger.storages[event.storage]
        runs = segment.step == step and segment.phase in PHASES
        phase = segment.phase if runs else BEFORE
        if event.kind == ALLOCATE:
            op = ledger.ops[storage.op] if storage.op >= 0 else None
            named = (op.name, op.module) if op else ("", "")
            alive[event.key] = account.begins(Piece(rounded(event.num_bytes), event.category, phase, *named))
        else:
            account.ends(alive.pop(event.key), phase)
    gone = {index for index, begins, phase in account.events if phase == BEFORE and not begins}
    account.events = [event for event in account.events if event[0] not in gone]
    return account


class Follower(LiveBytes):
    """Records the account of what runs on a device while it is active."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.account = Account()
        self.phase = BEFORE
        self._op = ""
        self._pieces: dict[int, int] = {}  # Index of the piece of each living storage, by its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._op = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def begin(self, phase: str) -> None:
        """Begin a phase; at a backward, what the forward left alive becomes activations."""
        if phase == "backward":
            for index in self._pieces.values():
                piece = self.account.pieces[index]
                if piece.phase == "forward" and piece.category == "temporary":
                    piece.category = "activations"
        self.phase, self.category = phase, "temporary"

    def close(self) -> Account:
        """Return the complete account; later frees are not part of it."""
        for held in self._held.values():
            held.ends.detach()
        return self.account

    def assign(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        known = list(tensors)
        super().assign(known, category)
        for tensor in known:
            for storage in self._storages(tensor):
                self.account.pieces[self._pieces[storage._cdata]].category = category

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        piece = Piece(rounded(storage.nbytes()), category, self.phase, self._op, _where())
        self._pieces[storage._cdata] = self.account.begins(piece)
        super()._add(storage, category)

    def _end(self, key: int) -> None:
        super()._end(key)
        self.account.ends(self._pieces.pop(key), self.phase)


def _where() -> str:
    """Return the autograd node, or the innermost line of the model or the optimizer that runs."""
    node = torch._C._current_autograd_node()
    if node is not None:
        return f"backward: {node.name()}"
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename).as_posix()
        for folder in (MODELS, OPTIMIZERS):
            if f"/{folder}/" in file:
                return f"{folder}/{file.rpartition(f'/{folder}/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def rounded(num_bytes: int) -> int:
    """Round up as the allocator does."""
    return -(-num_bytes // MIN_BLOCK) * MIN_BLOCK
