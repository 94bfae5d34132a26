"""Recomputation and activation offload chosen for each decoder block.

A block's offloaded tensors are copied to the host until the next offloading block (or the last block) has run
forward, and copied back while the following block runs backward. The computation waits for the copies at
these points, so the memory in use depends on the order of blocks, not on the speed of copies.
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

BLOCK_STATE = "_trainfit_saving"  # Attribute of a block: the PerBlockSaving that runs it, and its index


def fits_share(num_bytes: int, offloaded_bytes: int, saved_bytes: int, share: float) -> bool:
    """Whether a storage can be offloaded within the share of the bytes saved so far."""
    return offloaded_bytes + num_bytes <= share * saved_bytes


class OffloadedStorage:
    """A storage that is copied to the host and back, and the saved expressions that are views of it."""

    def __init__(self, t: Tensor):
        length = t.untyped_storage().nbytes() // t.element_size()
        self.device: Tensor | None = t.detach().as_strided((length,), (1,), 0)
        self.views: list[tuple[Expression, tuple[Any, Any, int]]] = []
        """Each expression with its shape, strides and offset."""
        self.event: Any = None
        self.host: Tensor | None = None


class SavedTensors:
    """Saved tensors of one block in one forward.

    Args:
        share: share of the saved bytes to offload.
        x: the block's input, which stays on the device unless ``with_input``; so do storages that are small
            compared with it.
    """

    def __init__(self, blocks: PerBlockSaving, share: float, x: Tensor, *, with_input: bool):
        self._blocks, self.share = blocks, share
        self._input = None if with_input else address(x)
        self._small = SMALL * x.untyped_storage().nbytes()
        self._offloaded_bytes = 0
        self.held_bytes: list[int] = []  # Bytes of each saved storage, in the order in which they were saved
        self._offloaded: dict[int, OffloadedStorage | None] = {}
        """By address of the storage; None: it stays on the device."""

    def hold(self, expression: Expression, t: Tensor) -> None:
        """Start offloading a saved tensor's storage if the share allows it."""
        storage = address(t)
        if not self.share or storage == self._input or t.untyped_storage().nbytes() < self._small:
            return
        if storage not in self._offloaded:
            self._offloaded[storage] = self._offload(t)
        offloaded = self._offloaded[storage]
        if offloaded is not None and offloaded.device is not None and t.dtype == offloaded.device.dtype:
            offloaded.views.append((expression, (t.shape, t.stride(), int(t.storage_offset()))))

    def _offload(self, t: Tensor) -> OffloadedStorage | None:
        num_bytes = t.untyped_storage().nbytes()
        self.held_bytes.append(num_bytes)
        if not fits_share(num_bytes, self._offloaded_bytes, sum(self.held_bytes), self.share):
            return None
        self._offloaded_bytes += num_bytes
        offloaded = OffloadedStorage(t)
        self._blocks.start_copy_to_host(offloaded)
        return offloaded

    def free_device(self) -> None:
        """Wait for the copies to the host and free the device memory."""
        for offloaded in self._storages():
            wait(offloaded.event)
            offloaded.device = offloaded.event = None
            for expression, _ in offloaded.views:
                expression.value, expression.is_held = None, False
                expression.fetch = self._fetch

    def prefetch(self) -> None:
        """Start the copies back to the device."""
        for offloaded in self._storages():
            if offloaded.device is None:
                self._blocks.start_copy_to_device(offloaded)

    def _fetch(self) -> None:
        """Copy the storages back and give each expression with uses its view."""
        self.prefetch()
        for offloaded in self._storages():
            wait(offloaded.event)
            assert offloaded.device is not None
            self._blocks.free_host(offloaded)
            for expression, (shape, stride, offset) in offloaded.views:
                expression.fetch = None
                if expression.uses:
                    expression.value = offloaded.device.as_strided(shape, stride, offset)
        self._offloaded.clear()

    def _storages(self) -> list[OffloadedStorage]:
        return [offloaded for offloaded in self._offloaded.values() if offloaded is not None]


class PerBlockSaving:
    """Runs a model's decoder blocks, each with its recomputation level and share to offload.

    Args:
        block_config: (level, share) of each block.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], device: torch.device, block_config: Sequence[tuple[str, float]]
    ):
        self._blocks, self._device, self._block_config = blocks, device, block_config
        self._previous: SavedTensors | None = None  # Of the preceding block
        self._copying: SavedTensors | None = None
        self.held_bytes: dict[int, list[int]] = {}
        """By block: ``SavedTensors.held_bytes`` of its last forward; only of blocks that offload."""
        self._free: dict[Any, list[Tensor]] = {}

    def install(self) -> None:
        """Replace the blocks' forwards. If no block offloads, those that save everything stay unchanged."""
        self._offloads = any(share for _, share in self._block_config)
        if self._offloads:
            self._to_host, self._to_device = CopyStream(self._device), CopyStream(self._device)
        for index, (block, (level, _)) in enumerate(zip(self._blocks, self._block_config, strict=True)):
            if level != "none" or self._offloads:
                setattr(block, BLOCK_STATE, (self, index))
                block.__class__ = _saving(type(block))

    def forward(self, index: int, forward: Callable[..., Any], x: Tensor, args: Any, kwargs: Any) -> Any:
        """Run block ``index``'s forward with autograd."""
        level, share = self._block_config[index]
        saved = SavedTensors(self, share, x, with_input=level == "full")
        if level == "full":
            forward = partial(checkpoint, forward, use_reentrant=False)
        block = self._blocks[index]
        if level == "elementwise" or share:
            passed = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            shared = [*passed, *block.parameters(), *block.buffers()]
            recompute = level == "elementwise"
            with SavedTensorMode(x, shared, recompute=recompute, on_hold=saved.hold):
                out = forward(block, x, *args, **kwargs)
        else:
            out = forward(block, x, *args, **kwargs)
        if self._offloads:
            self._after_forward(index, saved, out)
        return out

    def _after_forward(self, index: int, saved: SavedTensors, out: Any) -> None:
        """Free what earlier blocks offloaded; prefetch the preceding block's with this one's gradient."""
        self.held_bytes[index] = saved.held_bytes
        previous = self._previous if index else None
        if previous is not None and previous.share:
            first = next(t for t in tree_leaves(out) if isinstance(t, Tensor))
            if first.requires_grad:
                first.register_hook(lambda gradient: previous.prefetch())
        is_last = index == len(self._blocks) - 1
        if self._copying is not None and (saved.share or is_last):
            self._copying.free_device()
            self._copying = None
        if saved.share:
            self._copying = saved
        self._previous = None if is_last else saved

    def start_copy_to_host(self, offloaded: OffloadedStorage) -> None:
        """Copy a storage to the host, after the kernel that writes it."""
        device = offloaded.device
        assert device is not None
        free = self._free.get((device.shape, device.dtype))
        offloaded.host = free.pop() if free else host_empty(device.shape, device.dtype, like=device)
        offloaded.event = self._to_host.copy(offloaded.host, device, now(self._device))

    def start_copy_to_device(self, offloaded: OffloadedStorage) -> None:
        """Copy a storage back, after kernels that still read the memory reused for it."""
        assert offloaded.host is not None
        offloaded.device = torch.empty(offloaded.host.shape, dtype=offloaded.host.dtype, device=self._device)
        offloaded.event = self._to_device.copy(offloaded.device, offloaded.host, now(self._device))

    def free_host(self, offloaded: OffloadedStorage) -> None:
        """Return the host buffer for reuse."""
        if offloaded.host is not None:
            self._free.setdefault((offloaded.host.shape, offloaded.host.dtype), []).append(offloaded.host)
            offloaded.host = None


@cache
def _saving(block: type[nn.Module]) -> type[nn.Module]:
    """Return the block's class, its forward run by ``PerBlockSaving``; equal blocks get the same class."""

    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block.forward(self, x, *args, **kwargs)
        blocks, index = getattr(self, BLOCK_STATE)
        return blocks.forward(index, block.forward, x, args, kwargs)

    return type(f"Saving{block.__name__}", (block,), {"forward": forward, ORIGINAL: block})
