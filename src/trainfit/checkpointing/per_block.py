"""Decoder blocks that each save for their backward what they were told to, part of it on the host. No technique by itself.

What a block offloads is copied to pinned host memory while it and those after it run forward, until the next block that
offloads has run (or the last one); it is copied back while the next block runs backward. Which device memory is free when
is fixed by that order, not by how fast the copies are: the computation waits for them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from trainfit.checkpointing.expression import Expression
from trainfit.checkpointing.rematerialize import SMALL, SavedTensorMode, address
from trainfit.models.layers import ORIGINAL
from trainfit.offload.copies import CopyStream, host_empty, now, wait

OWN = "_trainfit_saving"
"""Attribute of a block that tells its number and its siblings."""


def fits_share(num_bytes: int, gone_bytes: int, held_bytes: int, share: float) -> bool:
    """Whether a storage leaves: if no more than the share of what is held so far, itself included, has left with it."""
    return gone_bytes + num_bytes <= share * held_bytes


class OffloadedStorage:
    """One storage that is copied to the host and back, and the saved expressions that are views of it."""

    def __init__(self, t: Tensor):
        whole = t.detach()
        length = t.untyped_storage().nbytes() // t.element_size()
        self.device: Tensor | None = whole.as_strided((length,), (1,), 0)
        self.shown: list[tuple[Expression, tuple[Any, Any, int]]] = []
        self.event: Any = None
        self.host: Tensor | None = None


class Run:
    """What one block saved in one forward.

    Args:
        share: how much of the bytes it holds is to wait on the host.
        x: the block's input. Its own storage, which the block before it made, stays unless ``with_input``, and so does
            what is small against it.
    """

    def __init__(self, blocks: PerBlockSaving, share: float, x: Tensor, *, with_input: bool):
        self._blocks, self.share = blocks, share
        self._stays = None if with_input else address(x)
        self._small = SMALL * x.untyped_storage().nbytes()
        self._gone_bytes = 0
        self.held_bytes: list[int] = []
        """Of each storage that it holds, in the order in which they were saved."""
        self._offloaded: dict[int, OffloadedStorage | None] = {}
        """By storage; None: it stays."""

    def hold(self, expression: Expression, t: Tensor) -> None:
        """A tensor was saved: its storage leaves, if with it no more than the share has left."""
        storage = address(t)
        if storage == self._stays or t.untyped_storage().nbytes() < self._small:
            return
        if storage not in self._offloaded:
            self._offloaded[storage] = self._leaves(t)
        offloaded = self._offloaded[storage]
        if offloaded is not None and offloaded.device is not None and t.dtype == offloaded.device.dtype:
            offloaded.shown.append((expression, (t.shape, t.stride(), int(t.storage_offset()))))

    def _leaves(self, t: Tensor) -> OffloadedStorage | None:
        num_bytes = t.untyped_storage().nbytes()
        self.held_bytes.append(num_bytes)
        if not fits_share(num_bytes, self._gone_bytes, sum(self.held_bytes), self.share):
            return None
        self._gone_bytes += num_bytes
        offloaded = OffloadedStorage(t)
        self._blocks.send(offloaded)
        return offloaded

    def let_go(self) -> None:
        """What has left is on the host; its device memory is given up."""
        for offloaded in self._gone():
            wait(offloaded.event)
            offloaded.device = offloaded.event = None
            for expression, _ in offloaded.shown:
                expression.value, expression.is_held = None, False
                expression.fetch = self._take_back

    def bring_back(self) -> None:
        """The copies back begin."""
        for offloaded in self._gone():
            if offloaded.device is None:
                self._blocks.bring(offloaded)

    def _take_back(self) -> None:
        """The backward asks: what has come back is its expressions' again, each until its last use."""
        self.bring_back()
        for offloaded in self._gone():
            wait(offloaded.event)
            assert offloaded.device is not None
            self._blocks.give_up_host(offloaded)
            for expression, (shape, stride, offset) in offloaded.shown:
                expression.fetch = None
                if expression.uses:
                    expression.value = offloaded.device.as_strided(shape, stride, offset)
        self._offloaded.clear()

    def _gone(self) -> list[OffloadedStorage]:
        return [offloaded for offloaded in self._offloaded.values() if offloaded is not None]


class PerBlockSaving:
    """All decoder blocks of a model, each with its level of recomputation and its share to offload."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device, told: Sequence[tuple[str, float]]):
        self._blocks, self._device, self._told = blocks, device, told
        self._before: Run | None = None
        """Of the block before the one that runs."""
        self._leaving: Run | None = None
        self.held_bytes: dict[int, list[int]] = {}
        """By block: what its last forward held (see ``Run``); only of blocks that are asked to offload."""
        self._free: dict[Any, list[Tensor]] = {}

    def install(self) -> None:
        """Give the blocks their forwards. Those that do nothing of the kind stay as they are, if none offloads."""
        self._offloads = any(share for _, share in self._told)
        if self._offloads:
            self._out, self._in = CopyStream(self._device), CopyStream(self._device)
        for index, (block, (level, _)) in enumerate(zip(self._blocks, self._told, strict=True)):
            if level != "none" or self._offloads:
                setattr(block, OWN, (self, index))
                block.__class__ = _saving(type(block))

    def forward(self, index: int, forward: Callable[..., Any], x: Tensor, args: Any, kwargs: Any) -> Any:
        """Block ``index``'s forward, with autograd."""
        level, share = self._told[index]
        run = Run(self, share, x, with_input=level == "full")
        if level == "full":
            forward = partial(checkpoint, forward, use_reentrant=False)
        block = self._blocks[index]
        if level == "elementwise" or share:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            shared = [*given, *block.parameters(), *block.buffers()]
            again = level == "elementwise"
            with SavedTensorMode(x, shared, again=again, on_hold=run.hold if share else _ignore):
                out = forward(block, x, *args, **kwargs)
        else:
            out = forward(block, x, *args, **kwargs)
        if self._offloads:
            self._follow(index, run, out)
        return out

    def _follow(self, index: int, run: Run, out: Any) -> None:
        """Block ``index`` has run: what left before it is given up, and is to come back when its gradient arrives."""
        self.held_bytes[index] = run.held_bytes
        before = self._before if index else None
        if before is not None and before.share:
            first = next(t for t in tree_leaves(out) if isinstance(t, Tensor))
            if first.requires_grad:
                first.register_hook(lambda gradient: before.bring_back())
        is_last = index == len(self._blocks) - 1
        if self._leaving is not None and (run.share or is_last):
            self._leaving.let_go()
            self._leaving = None
        if run.share:
            self._leaving = run
        self._before = None if is_last else run

    def send(self, offloaded: OffloadedStorage) -> None:
        """The copy to the host begins, after what makes the tensor."""
        assert offloaded.device is not None
        kind = (offloaded.device.shape, offloaded.device.dtype)
        free = self._free.get(kind)
        offloaded.host = free.pop() if free else host_empty(*kind, like=offloaded.device)
        offloaded.event = self._out.copy(offloaded.host, offloaded.device, now(self._device))

    def bring(self, offloaded: OffloadedStorage) -> None:
        """The copy back begins. The computation allocates, so the memory may be what it still reads: hence ``now``."""
        assert offloaded.host is not None
        offloaded.device = torch.empty(offloaded.host.shape, dtype=offloaded.host.dtype, device=self._device)
        offloaded.event = self._in.copy(offloaded.device, offloaded.host, now(self._device))

    def give_up_host(self, offloaded: OffloadedStorage) -> None:
        """The host's memory is free for another; the computation has waited for the copy."""
        if offloaded.host is not None:
            self._free.setdefault((offloaded.host.shape, offloaded.host.dtype), []).append(offloaded.host)
            offloaded.host = None


def _ignore(expression: Expression, t: Tensor) -> None:
    """Nothing leaves."""


@cache
def _saving(block: type[nn.Module]) -> type[nn.Module]:
    """The block's class with its forward run by ``PerBlockSaving``.

    One class for all, not a function set on each block: equal blocks stay equal.
    """

    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block.forward(self, x, *args, **kwargs)
        blocks, index = getattr(self, OWN)
        return blocks.forward(index, block.forward, x, args, kwargs)

    return type(f"Saving{block.__name__}", (block,), {"forward": forward, ORIGINAL: block})
