"""Observers of a trace: its scopes and its tracer take them at construction and call their hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from trainfit.virtual.trace.tracer import Tracer


class Observer:
    """Follows a trace; every hook does nothing here. Several observers are called in the order given."""

    tracer: Tracer

    def attach(self, tracer: Tracer) -> None:
        """Keep the observed tracer, which calls this once at the end of its construction."""
        self.tracer = tracer

    def forward_begins(self, module: nn.Module) -> None:
        """Called before an outermost module's forward, also one that recomputes in the backward."""

    def forward_ended(self) -> None:
        """Called after an outermost module's forward."""

    def allocated(self, index: int) -> None:
        """Called when an allocation is recorded, with the storage's index in the ledger."""

    def communicates(self, func: Any, args: Any) -> None:
        """Called before an operation of ``torch.distributed`` on device tensors is recorded."""

    def reads_unknown(self) -> None:
        """Called where a value is read that is not known."""

    # The tracer of user code alone calls these.

    def collective_begins(self, func: Any) -> None:
        """Called with each operation of ``torch.distributed``, also on host tensors, before it runs."""

    def record_begins(self) -> None:
        """Called before an operation on the device is recorded."""

    def recorded(self, func: Any, args: Any, kwargs: Any, out: Any, num_storages: int) -> None:
        """Called after an operation is recorded, with the number of storages in the ledger before it."""

    def compiled_called(self, inputs: Any, output: Any) -> None:
        """Called with the inputs and the output of each call of compiled code."""


class StreamPools(Observer):
    """Gives each allocation the number of its stream: every stream has its own pools of blocks.

    Args:
        current_stream: returns the running stream; the one at construction is number 0.
        category: of allocations on streams other than the first; None: as on the first.
    """

    def __init__(self, current_stream: Callable[[], Any], category: str | None = None):
        self._current, self._category = current_stream, category
        self._numbers = {current_stream(): 0}

    def allocated(self, index: int) -> None:
        number = self._numbers.setdefault(self._current(), len(self._numbers))
        if not number:
            return
        live = self.tracer.live
        live.ledger.storages[index] = live.ledger.storages[index]._replace(stream=number)
        if self._category is not None:
            live.categorise(self._category, (index,))

    def on_first_stream(self) -> bool:
        """Return whether the running stream is the first."""
        return self._numbers.get(self._current()) == 0
