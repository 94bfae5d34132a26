"""Full recomputation of decoder blocks, with weights, inputs and optimizer state prefetched from the host.

Each block is one autograd function (Chen et al., arXiv:1604.06174). Its forward and backward are known points
in time, so host tensors are copied one block ahead:

- weights (``HostBlocks``): of the next block in the forward, of the preceding one in the backward;
- inputs: to the host while the block runs forward, back while the following block runs backward.

The number of device tensors in flight depends on this order, not on the speed of copies.

Example: three blocks with inputs x0, x1 and x2, and weights w0, w1 and w2.

    block      computes with      meanwhile              then freed on the device
    0 forward  x0, w0             x0 to host, w1 to GPU  x0, w0
    1 forward  x1, w1             x1 to host, w2 to GPU  x1, w1
    2 forward  x2, w2                                    (x2 stays: its backward is next)
    2 backward x2, w2             x1, w1 to GPU          x2, w2
    1 backward x1, w1             x0, w0 to GPU          x1, w1
    0 backward x0, w0                                    x0, w0
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

BLOCK_STATE = "_trainfit_runs"  # Attribute of a block: the BlockRecompute that runs it, and its index
Call = Callable[[Tensor], Any]


@dataclass
class _SavedInput:
    """A block's input on the device, on the host, or being copied; ``previous``: the preceding block's."""

    device: Tensor | None
    previous: _SavedInput | None
    host: Tensor | None = None
    event: Any = None


class BlockRecompute:
    """Runs and recomputes all blocks of one model; ``install`` wraps their calls.

    Args:
        weights: the blocks' weights on the host; None: on the device.
        moments: the blocks' optimizer states on the host; None: on the device.
        offload: whether the blocks' inputs are offloaded to the host.
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
        self._copy_streams, self._offload = copy_streams, offload
        self._weights, self._moments = weights, moments
        self.is_running = False
        self._last: _SavedInput | None = None  # Input of the block that ran last
        self._free: dict[tuple[Any, Any], list[Tensor]] = {}
        # Without it the backward would skip a block whose input needs no gradient (frozen embeddings).
        self._trigger = torch.empty(0, device=self.device, requires_grad=True)

    def install(self) -> None:
        """Wrap each block's forward, outside its compiled code."""
        for index, block in enumerate(self.blocks):
            compiled: Any = block._compiled_call_impl
            if compiled is not None:
                block._compiled_call_impl = partial(_call_compiled, self, index, compiled)
            else:
                setattr(block, BLOCK_STATE, (self, index))
                block.__class__ = _recomputed(type(block))

    def run(self, index: int, first: Call, again: Call, x: Tensor) -> Any:
        """Return block ``index``'s result; ``first`` computes it now, ``again`` in the backward."""
        if torch.is_grad_enabled():
            return _Run.apply(self, index, first, again, self._trigger, x)
        with self.forward(index):
            return first(x)

    @contextmanager
    def forward(self, index: int) -> Iterator[None]:
        """Hold block ``index``'s weights and prefetch the next block's."""
        if self._weights is not None:
            self._weights.ring.acquire(index, self._at(index + 1))
        with self._without_autocast_cache():
            yield
        if self._weights is not None:
            self._weights.ring.release(index, changed=False)

    @contextmanager
    def backward(self, index: int) -> Iterator[None]:
        """Hold block ``index``'s weights and moments until its update; prefetch the preceding block's."""
        if self._weights is not None:
            self._weights.ring.acquire(index, self._at(index - 1), to_write=True)
        if self._moments is not None:
            self._moments.acquire(index, self._at(index - 1))
        yield
        if self._weights is not None:
            trained = any(parameter.requires_grad for parameter in self._weights.parameters(index))
            self._weights.ring.release(index, changed=trained)
        if self._moments is not None:
            self._moments.release(index)

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Run blocks called inside without the wrapper, with autograd."""
        self.is_running = True
        try:
            with self._without_autocast_cache(), torch.enable_grad():
                yield
        finally:
            self.is_running = False

    def _at(self, index: int) -> int | None:
        return index if 0 <= index < len(self.blocks) else None

    @contextmanager
    def _without_autocast_cache(self) -> Iterator[None]:
        """Disable autocast's cache, whose copies of offloaded weights would live until the forward ends."""
        kind = self.device.type
        if self._weights is None or not torch.is_autocast_enabled(kind):
            yield
            return
        with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False):
            yield

    def save_input(self, index: int, x: Tensor) -> _SavedInput:
        """Save block ``index``'s input for its backward and start its copy to the host."""
        saved = self._last = _SavedInput(x, self._last if index else None)
        # The last block's backward follows at once.
        if self._offload and index < len(self.blocks) - 1 and x.is_contiguous():
            free = self._free.get((x.shape, x.dtype))
            saved.host = free.pop() if free else self._copy_streams.host_empty(x.shape, x.dtype)
            saved.event = self._copy_streams.to_host.copy(saved.host, x, self._copy_streams.now())
        return saved

    def free_input(self, saved: _SavedInput) -> None:
        """Wait for the copy to the host and free the device memory."""
        if saved.host is not None:
            wait(saved.event)
            saved.device = saved.event = None
        if saved is self._last and saved.device is not None:
            self._last = None  # The last block's.

    def take_input(self, saved: _SavedInput) -> Tensor:
        """Return a block's input for its backward and prefetch the preceding block's."""
        self._fetch(saved)
        wait(saved.event)
        if saved.previous is not None:
            self._fetch(saved.previous)
        x, host = saved.device, saved.host
        assert x is not None
        saved.device = saved.previous = saved.host = None
        if host is not None:
            self._free.setdefault((host.shape, host.dtype), []).append(host)
        return x

    def _fetch(self, saved: _SavedInput) -> None:
        if saved.device is None and saved.host is not None:
            saved.device = torch.empty_like(saved.host, device=self.device)
            # Kernels may still read the memory reused for it: hence `now`.
            now = self._copy_streams.now()
            saved.event = self._copy_streams.to_device.copy(saved.device, saved.host, now)


class _Run(torch.autograd.Function):
    """One block: forward without autograd, backward by recomputation."""

    @staticmethod
    def forward(
        ctx: Any, runs: BlockRecompute, index: int, first: Call, again: Call, trigger: Tensor, x: Tensor
    ) -> Any:
        ctx.runs, ctx.index, ctx.again = runs, index, again
        ctx.state = AmbientState(runs.device)
        ctx.needs_gradient = x.requires_grad
        with runs.forward(index):
            ctx.saved_input = runs.save_input(index, x)
            out = first(x)
        runs.free_input(ctx.saved_input)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "recomputed blocks have no second derivative, which create_graph=True needs; "
                "set offload.weights and offload.activations to false"
            )
        runs: BlockRecompute = ctx.runs
        with runs.backward(ctx.index):
            x = runs.take_input(ctx.saved_input).detach().requires_grad_(ctx.needs_gradient)
            with ctx.state.restored(), runs.recomputation():
                out = ctx.again(x)
            pairs = [
                (o, g)
                for o, g in zip((out,) if isinstance(out, Tensor) else out, gradients, strict=True)
                if isinstance(o, Tensor) and o.requires_grad and g is not None
            ]
            del out
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return None, None, None, None, None, x.grad


class AmbientState:
    """The current autocast and random state, to restore for a recomputation."""

    def __init__(self, device: torch.device):
        kind = device.type
        self._autocast: dict[str, Any] = {
            "device_type": kind, "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind), "cache_enabled": torch.is_autocast_cache_enabled(),
        }  # fmt: skip
        self._host_random = torch.get_rng_state()
        self._cuda_random = {device: torch.cuda.get_rng_state(device)} if kind == "cuda" else {}

    @contextmanager
    def restored(self) -> Iterator[None]:
        with torch.random.fork_rng(list(self._cuda_random)), torch.autocast(**self._autocast):
            torch.set_rng_state(self._host_random)
            for device, state in self._cuda_random.items():
                torch.cuda.set_rng_state(state, device)
            yield


@cache
def _recomputed(block: type[nn.Module]) -> type[nn.Module]:
    """Return the block's class, its forward run by ``BlockRecompute``; equal blocks get the same class."""

    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        runs, index = getattr(self, BLOCK_STATE)
        if runs.is_running:
            return block.forward(self, x, *args, **kwargs)
        _refuse_other_gradients(args, kwargs)
        # In the backward the module itself is called, so that module hooks run.
        first, again = _with(partial(block.forward, self), args, kwargs), _with(self, args, kwargs)
        return runs.run(index, first, again, x)

    return type(f"Run{block.__name__}", (block,), {"forward": forward, ORIGINAL: block})


def _call_compiled(
    runs: BlockRecompute, index: int, compiled: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
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
            "this model's blocks pass on other tensors than hidden states that need a gradient",
            "set offload.weights and offload.activations to false",
            field="offload",
        )
