"""PyTorch's DistributedDataParallel on a virtual rank: its C++ reducer runs on fake tensors.

The second forward rebuilds the buckets. NCCL's process group may keep those of the first backward until a
later collective, which depends on the watchdog's thread. So the second step has one of two peaks: the ledger
frees the buckets when they are rebuilt, and ``held`` names the latest point at which NCCL releases them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.spec.errors import InputError
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_tensors import on_host
from trainfit.virtual.trace.tracer import Tracer

EMPTY = torch.ops.aten.empty.memory_format


class FirstBuckets:
    """The buckets of each backward, which NCCL's group may hold until the next one's first reduction."""

    def __init__(self, tracer: Tracer):
        self._live = tracer.live
        self._reduced: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        """DDP module -> storages of its buckets of the last backward."""
        self._released: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        """DDP module -> the buckets that its reducer has released since."""
        self._first_collective = 0
        """Index of the present backward's first reduction."""

    def reduce(self, of: weakref.ref[Any], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce a module's bucket and return a done future: the reducer's communication hook."""
        buffer, module = bucket.buffer(), of()
        assert module is not None
        if bucket.index() == 0:
            self._reduced[module] = []
            self._first_collective = len(self._live.ledger.collectives)
            latest = len(self._live.ledger.events)
            self._live.ledger.held += [(index, latest) for index in self._released.pop(module, ())]
        self._reduced[module].append(self._live.index_of(buffer))
        dist.all_reduce(buffer, group=module.process_group, async_op=True)
        if bucket.is_last():
            self._wait()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def _wait(self) -> None:
        """Record that the computation waits for the buckets, which are copied into the gradients next."""
        ledger = self._live.ledger
        now = len(ledger.ops) - 1
        for index in range(self._first_collective, len(ledger.collectives)):
            ledger.collectives[index] = ledger.collectives[index]._replace(waited_at=now)

    def rebuilt(self, module: Any) -> None:
        """Record that the reducer released the buckets of the last backward."""
        self._released[module] = self._reduced.get(module, [])


@contextmanager
def ddp_on_fakes(tracer: Tracer) -> Iterator[FirstBuckets]:
    """Let DistributedDataParallel run on the tracer's fake tensors, with its buckets as communication.

    Raises:
        InputError: the code registers a communication hook of its own.
    """
    buckets, live = FirstBuckets(tracer), tracer.live
    build, prepare = DistributedDataParallel._ddp_init_helper, DistributedDataParallel._pre_forward

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        start = len(live.ledger.storages)
        build(self, *args, **kwargs)
        live.categorise("communication", range(start, len(live.ledger.storages)))
        dist._register_comm_hook(self.reducer, weakref.ref(self), buckets.reduce)

    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = len(live.ledger.storages)
        was_rebuilt = self._has_rebuilt_buckets
        with _RealCounters():
            result = prepare(self, *args, **kwargs)
        if self._has_rebuilt_buckets and not was_rebuilt:
            live.categorise("communication", range(start, len(live.ledger.storages)))
            buckets.rebuilt(self)
        return result

    def refused(self: Any, state: Any, hook: Any) -> None:
        raise InputError(
            "communication hooks of DistributedDataParallel are not traced",
            "leave register_comm_hook out of the traced code",
            field="step",
            value=getattr(hook, "__qualname__", str(hook)),
        )

    with ExitStack() as stack:
        for owner, name, function in (
            (
                distributed,
                "_verify_param_shape_across_processes",
                lambda *_: None,
            ),  # C++ that reads addresses.
            (DistributedDataParallel, "_ddp_init_helper", built),
            (DistributedDataParallel, "_pre_forward", prepared),
            (DistributedDataParallel, "register_comm_hook", refused),
        ):
            stack.enter_context(replaced(owner, name, function))
        yield buckets


class _RealCounters(TorchDispatchMode):
    """Keep the reducer's int32 tensors on the host real: it writes into them by address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_counter = func is EMPTY and kwargs.get("dtype") is torch.int32
        return on_host(func, args, kwargs) if is_counter else func(*args, **kwargs)
