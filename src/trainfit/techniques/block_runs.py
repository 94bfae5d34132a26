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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trainfit.kernels.host_copies import Lane, host_empty, now, wait
from trainfit.models.host_blocks import HostBlocks
from trainfit.spec.errors import InputError


@dataclass
class _Kept:
    """A block's input: on the device, on the host, or on its way."""

    device: Tensor | None
    host: Tensor | None = None
    event: Any = None


class BlockRuns:
    """All blocks of one model; ``install`` wraps their calls.

    Args:
        weights: where the blocks' weights are kept; None: on the device.
        offload: whether the blocks' inputs wait on the host.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], device: torch.device, *, weights: HostBlocks | None, offload: bool
    ):
        self.blocks, self.device, self._weights, self._offload = blocks, device, weights, offload
        self._in, self._out = Lane(device), Lane(device)
        self._kept: list[_Kept] = []
        """Of the blocks that wait for their backward, in the order of the forward."""
        self._leaving: _Kept | None = None
        self._free: dict[tuple[Any, Any], list[Tensor]] = {}
        # A block whose input has no gradient (frozen embeddings) would be left out of the backward without it.
        self._trigger = torch.empty(0, device=device, requires_grad=True)

    def install(self) -> None:
        """Each block's call goes through here: outside what compiles it, inside what the model does around it."""
        for index, block in enumerate(self.blocks):
            inner: Any = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = partial(self._call, index, inner)

    def _call(self, index: int, inner: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_other_gradients(args, kwargs)
        call = partial(_with_input, inner, args, kwargs)
        if torch.is_grad_enabled():
            return _Run.apply(self, index, call, self._trigger, x)
        self.arrive(index, index + 1)
        out = call(x)
        self.leave(index)
        return out

    def arrive(self, index: int, then: int) -> None:
        """Block ``index`` may compute; what block ``then`` needs is on its way."""
        if self._weights is not None:
            self._weights.arrive(index, then if 0 <= then < len(self.blocks) else None)

    def leave(self, index: int, *, updated: bool = False) -> None:
        """Block ``index`` is done with its weights; ``updated``: its optimizer may have run."""
        if self._weights is not None:
            self._weights.leave(index, changed=updated and self._trained())

    def _trained(self) -> bool:
        assert self._weights is not None
        return any(parameter.requires_grad for parameter in self._weights.parameters())

    # -- inputs -----------------------------------------------------------------------------------------------

    def keep(self, index: int, x: Tensor) -> None:
        """Hold block ``index``'s input for its backward; the copy out of the one before is over, its memory free."""
        kept = _Kept(x)
        self._let_go()
        if self._offload and index < len(self.blocks) - 1:  # The last block's is needed at once.
            kept.host = self._host_memory(x)
            kept.event = self._out.copy(kept.host, x, now(self.device))
            self._leaving = kept
        self._kept.append(kept)

    def take(self) -> Tensor:
        """The input of the last block whose backward has not run; that of the one before it is on its way."""
        kept = self._kept.pop()
        self._fetch(kept)
        wait(kept.event)
        if self._kept:
            self._fetch(self._kept[-1])
        assert kept.device is not None
        if kept.host is not None:
            self._free.setdefault((kept.host.shape, kept.host.dtype), []).append(kept.host)
        return kept.device

    def _let_go(self) -> None:
        if self._leaving is not None:
            wait(self._leaving.event)
            self._leaving.device = self._leaving.event = None
            self._leaving = None

    def _fetch(self, kept: _Kept) -> None:
        if kept.device is None and kept.host is not None:
            # Allocated by the computation, which may still be reading what was there: hence `now`.
            kept.device = torch.empty_like(kept.host, device=self.device)
            kept.event = self._in.copy(kept.device, kept.host, now(self.device))

    def _host_memory(self, x: Tensor) -> Tensor:
        free = self._free.get((x.shape, x.dtype))
        return free.pop() if free else host_empty(x.shape, x.dtype, like=x)


class _Run(torch.autograd.Function):
    """One block: its forward without autograd, its backward by running it again."""

    @staticmethod
    def forward(
        ctx: Any, runs: BlockRuns, index: int, call: Callable[[Tensor], Any], trigger: Tensor, x: Tensor
    ) -> Any:
        ctx.runs, ctx.index, ctx.call = runs, index, call
        ctx.conditions = Conditions(runs.device)
        ctx.needs_gradient = x.requires_grad
        runs.arrive(index, index + 1)
        out = call(x)
        runs.leave(index)
        runs.keep(index, x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        runs: BlockRuns = ctx.runs
        runs.arrive(ctx.index, ctx.index - 1)
        x = runs.take().detach().requires_grad_(ctx.needs_gradient)
        with ctx.conditions.restored(), torch.enable_grad():
            out = ctx.call(x)
        outputs = (out,) if isinstance(out, Tensor) else out
        owed = [
            (o, g)
            for o, g in zip(outputs, gradients, strict=True)
            if isinstance(o, Tensor) and o.requires_grad and g is not None
        ]
        del out, outputs
        torch.autograd.backward([o for o, _ in owed], [g for _, g in owed])
        runs.leave(ctx.index, updated=True)
        return None, None, None, None, x.grad


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


def _with_input(inner: Callable[..., Any], args: Any, kwargs: Any, x: Tensor) -> Any:
    return inner(x, *args, **kwargs)


def _refuse_other_gradients(args: Any, kwargs: Any) -> None:
    if torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in tree_iter((args, kwargs))
    ):
        raise InputError(
            "this model's blocks hand on more than hidden states that need a gradient",
            "set offload.weights and offload.activations to false",
            field="offload",
        )
