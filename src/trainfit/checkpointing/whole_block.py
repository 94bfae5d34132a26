"""Decoder blocks that keep only their input: run without autograd, run again in backward, whatever waits on the host.

Full recomputation (Chen et al., arXiv:1604.06174) as one autograd function a block. Unlike torch's checkpoint it says
when a block begins and ends, in forward and backward, so what waits on the host comes one block ahead:

- the weights (``HostBlocks``): of the next block in forward, of the one before it in backward;
- the block's input: copied out while the next block computes, copied back while the block after it runs backward.

The number of device tensors in flight is fixed by this order, not by how fast copies are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trainfit.models.layers import ORIGINAL
from trainfit.offload.blocks import HostBlocks
from trainfit.offload.copies import CopyStreams, wait
from trainfit.offload.optimizer_state import HostMoments
from trainfit.spec.errors import InputError

OWN = "_trainfit_runs"
"""Attribute of a block that tells who runs it, and its number."""
Call = Callable[[Tensor], Any]


@dataclass
class _Kept:
    """A block's input: on the device, on the host, or on its way."""

    device: Tensor | None
    before: _Kept | None
    """The input of the block before it in the same forward, whose backward comes next."""
    host: Tensor | None = None
    event: Any = None


class BlockRuns:
    """All blocks of one model; ``install`` wraps their calls.

    Args:
        weights: where the blocks' weights are kept; None: on the device.
        moments: where what their optimizers keep is kept; None: on the device.
        offload: whether the blocks' inputs wait on the host.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        copy_streams: CopyStreams,
        *,
        weights: HostBlocks | None = None,
        moments: HostMoments | None = None,
        offload: bool,
    ):
        self.blocks, self.device = blocks, copy_streams.device
        self._copy_streams, self._weights, self._moments, self._offload = (
            copy_streams,
            weights,
            moments,
            offload,
        )
        self.is_running = False
        self._last: _Kept | None = None
        """Of the block that ran last."""
        self._free: dict[tuple[Any, Any], list[Tensor]] = {}
        # A block whose input has no gradient (frozen embeddings) would be left out of the backward without it.
        self._trigger = torch.empty(0, device=self.device, requires_grad=True)

    def install(self) -> None:
        """Each block's forward goes through here, outside what compiles it."""
        for index, block in enumerate(self.blocks):
            compiled: Any = block._compiled_call_impl
            if compiled is not None:
                block._compiled_call_impl = partial(_call_compiled, self, index, compiled)
            else:
                setattr(block, OWN, (self, index))
                block.__class__ = _run_by_itself(type(block))

    def run(self, index: int, first: Call, again: Call, x: Tensor) -> Any:
        """Block ``index``'s result; ``first`` computes it now, ``again`` in the backward."""
        if torch.is_grad_enabled():
            return _Run.apply(self, index, first, again, self._trigger, x)
        self.arrive(index)
        with self.uncached():
            out = first(x)
        self.leave(index)
        return out

    @contextmanager
    def running(self) -> Iterator[None]:
        """The blocks called inside are plain ones."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def arrive(self, index: int) -> None:
        """Block ``index`` may run forward; what the block after it needs is on its way."""
        if self._weights is not None:
            self._weights.ring.acquire(index, self._at(index + 1))

    def leave(self, index: int) -> None:
        """Block ``index`` has run forward."""
        if self._weights is not None:
            self._weights.ring.release(index, changed=False)

    def arrive_for_backward(self, index: int) -> None:
        """Block ``index`` may run forward and backward; what the block before it needs is on its way."""
        if self._weights is not None:
            self._weights.ring.acquire(index, self._at(index - 1), to_write=True)
        if self._moments is not None:
            self._moments.acquire(index, self._at(index - 1))

    def leave_after_backward(self, index: int) -> None:
        """Block ``index``'s gradients are there, and its optimizer has run if it trains."""
        if self._weights is not None:
            trained = any(parameter.requires_grad for parameter in self._weights.parameters(index))
            self._weights.ring.release(index, changed=trained)
        if self._moments is not None:
            self._moments.release(index)

    def _at(self, index: int) -> int | None:
        return index if 0 <= index < len(self.blocks) else None

    @contextmanager
    def uncached(self) -> Iterator[None]:
        """Autocast keeps its copies of weights until the whole forward ends; of weights that leave it must not."""
        if self._weights is None or not torch.is_autocast_enabled(self.device.type):
            yield
            return
        kind = self.device.type
        with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False):
            yield

    # -- inputs -----------------------------------------------------------------------------------------------

    def keep(self, index: int, x: Tensor) -> _Kept:
        """Hold block ``index``'s input for its backward; its copy to the host begins."""
        kept = self._last = _Kept(x, self._last if index else None)
        # The last block's is needed at once.
        if self._offload and index < len(self.blocks) - 1 and x.is_contiguous():
            kept.host = self._host_memory(x)
            kept.event = self._copy_streams.to_host.copy(kept.host, x, self._copy_streams.now())
        return kept

    def let_go(self, kept: _Kept) -> None:
        """The block has run: what is on the host by now is given up on the device."""
        if kept.host is not None:
            wait(kept.event)
            kept.device = kept.event = None
        if kept is self._last and kept.device is not None:
            self._last = None  # The last block's: nothing comes after it.

    def take(self, kept: _Kept) -> Tensor:
        """A block's input for its backward; that of the block before it is on its way."""
        self._fetch(kept)
        wait(kept.event)
        if kept.before is not None:
            self._fetch(kept.before)
        x, host = kept.device, kept.host
        assert x is not None
        kept.device = kept.before = kept.host = None
        if host is not None:
            self._free.setdefault((host.shape, host.dtype), []).append(host)
        return x

    def _fetch(self, kept: _Kept) -> None:
        if kept.device is None and kept.host is not None:
            # Allocated by the computation, which may still be reading what was there: hence `now`.
            kept.device = torch.empty_like(kept.host, device=self.device)
            kept.event = self._copy_streams.to_device.copy(
                kept.device, kept.host, self._copy_streams.now(), kept.event
            )

    def _host_memory(self, x: Tensor) -> Tensor:
        free = self._free.get((x.shape, x.dtype))
        return free.pop() if free else self._copy_streams.host_empty(x.shape, x.dtype)


class _Run(torch.autograd.Function):
    """One block: its forward without autograd, its backward by running it again."""

    @staticmethod
    def forward(
        ctx: Any, runs: BlockRuns, index: int, first: Call, again: Call, trigger: Tensor, x: Tensor
    ) -> Any:
        ctx.runs, ctx.index, ctx.again = runs, index, again
        ctx.conditions = Conditions(runs.device)
        ctx.needs_gradient = x.requires_grad
        runs.arrive(index)
        ctx.kept = runs.keep(index, x)
        with runs.uncached():
            out = first(x)
        runs.leave(index)
        runs.let_go(ctx.kept)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "blocks run again in the backward have no second derivative, which create_graph=True asks for; "
                "set offload.weights and offload.activations to false"
            )
        runs: BlockRuns = ctx.runs
        runs.arrive_for_backward(ctx.index)
        x = runs.take(ctx.kept).detach().requires_grad_(ctx.needs_gradient)
        with ctx.conditions.restored(), runs.uncached(), runs.running(), torch.enable_grad():
            out = ctx.again(x)
        outputs = (out,) if isinstance(out, Tensor) else out
        owed = [
            (o, g)
            for o, g in zip(outputs, gradients, strict=True)
            if isinstance(o, Tensor) and o.requires_grad and g is not None
        ]
        del out, outputs
        torch.autograd.backward([o for o, _ in owed], [g for _, g in owed])
        runs.leave_after_backward(ctx.index)
        return None, None, None, None, None, x.grad


class Conditions:
    """Autocast and the random generators as they are now, to run a forward again under the same."""

    def __init__(self, device: torch.device):
        kind = device.type
        self._autocast = (
            kind,
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
            torch.is_autocast_cache_enabled(),
        )
        self._host_random = torch.get_rng_state()
        self._device = device if kind == "cuda" else None
        self._device_random = torch.cuda.get_rng_state(device) if kind == "cuda" else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        kind, dtype, enabled, cached = self._autocast
        devices = [] if self._device is None else [self._device]
        with (
            torch.random.fork_rng(devices, enabled=True),
            torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached),
        ):
            torch.set_rng_state(self._host_random)
            if self._device_random is not None:
                torch.cuda.set_rng_state(self._device_random, self._device)  # pyright: ignore[reportArgumentType]
            yield


@cache
def _run_by_itself(block: type[nn.Module]) -> type[nn.Module]:
    """The block's class with its forward run by ``BlockRuns``; one class for all, so equal blocks stay equal."""

    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        runs, index = getattr(self, OWN)
        if runs.is_running:
            return block.forward(self, x, *args, **kwargs)
        _refuse_other_gradients(args, kwargs)
        # In the backward the block is called as a whole: whoever hooks modules sees it run.
        first, again = partial(block.forward, self), self
        return runs.run(index, _with(first, args, kwargs), _with(again, args, kwargs), x)

    return type(f"Run{block.__name__}", (block,), {"forward": forward, ORIGINAL: block})


def _call_compiled(
    runs: BlockRuns, index: int, compiled: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    _refuse_other_gradients(args, kwargs)
    call = _with(compiled, args, kwargs)
    return runs.run(index, call, call, x)


def _with(function: Callable[..., Any], args: Any, kwargs: Any) -> Call:
    return lambda x: function(x, *args, **kwargs)


def _refuse_other_gradients(args: Any, kwargs: Any) -> None:
    if torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in tree_iter((args, kwargs))
    ):
        raise InputError(
            "this model's blocks hand on more than hidden states that need a gradient",
            "set offload.weights and offload.activations to false",
            field="offload",
        )
