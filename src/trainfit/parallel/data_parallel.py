"""Data parallel training: when gradients are all-reduced, and how many travel together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from trainfit.parallel.collectives import Average, Group, broadcast

MIB = 2**20
Strategy = Literal["naive", "flat", "overlapped", "bucketed"]


class Bucket:
    """Parameters whose gradients are averaged by one all-reduce."""

    def __init__(self, names: list[str], parameters: list[nn.Parameter]):
        self.names = names
        self.parameters = parameters
        self.ready: set[Tensor] = set()
        self._average: Average | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the backward has accumulated every gradient."""
        return len(self.ready) == len(self.parameters)

    @property
    def is_begun(self) -> bool:
        """Whether the all-reduce is in progress."""
        return self._average is not None

    def named(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return the parameters with their names."""
        return zip(self.names, self.parameters, strict=True)

    def begin(self, group: Group, flatten: bool) -> None:
        """Begin to average the gradients in place.

        With ``flatten`` they are first copied into one buffer and become views of it, so that the originals
        are freed at once.
        """
        gradients = [_gradient(parameter) for parameter in self.parameters]
        if flatten or not all(gradient.is_contiguous() for gradient in gradients):
            buffer = _flatten_dense_tensors(gradients)
            for parameter, view in zip(
                self.parameters, _unflatten_dense_tensors(buffer, gradients), strict=True
            ):
                parameter.grad = view
            gradients = [buffer]
        self._average = Average(gradients, group)

    def finish(self) -> None:
        """Wait for the average."""
        assert self._average is not None
        self._average.wait()
        self._average = None
        self.ready.clear()


class DataParallel(nn.Module):
    """Replicate a module on every rank of a process group and average its gradients over the group.

    Call :meth:`wait_for_gradients` after each backward and before the optimizer.

    Args:
        module: Any module on one device, tied and frozen parameters included. At construction the
            parameters and buffers of the group's first rank are copied to all.
        strategy: ``naive``: one all-reduce a parameter, after the backward. ``flat``: one all-reduce of all
            gradients of a dtype, copied into one buffer after the backward. ``overlapped``: one a parameter,
            begun during the backward. ``bucketed``: one a bucket, begun during the backward, in place.
        bucket_mb: Size of a bucket in MiB; None: no bound. A larger gradient has a bucket of its own.
        find_unused_parameters: Allow parameters that take no part in a step. One that no rank used keeps no
            gradient; one that only some ranks used counts as zero on the others. Costs a small
            all-reduce a step.
        group: The process group; None: the default group.
        on_average: Called with a bucket's parameters when the average of their gradients has begun, which
            ``flat`` has made views of a buffer.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy = "bucketed",
        bucket_mb: float | None = 25.0,
        find_unused_parameters: bool = False,
        group: Group = None,
        on_average: Callable[[list[nn.Parameter]], None] | None = None,
    ):
        super().__init__()
        self.module = module
        self.group = group
        self._on_average = on_average
        self.find_unused_parameters = find_unused_parameters
        self.overlaps = strategy in ("overlapped", "bucketed")
        self._flattens = strategy == "flat"
        self.require_backward_grad_sync = True
        """False: gradients accumulate locally, as in :meth:`no_sync`. DDP's name for it."""
        self._num_begun = 0
        broadcast([*module.parameters(), *module.buffers()], group)
        limit = {"naive": 0.0, "overlapped": 0.0, "flat": float("inf")}.get(
            strategy, float("inf") if bucket_mb is None else bucket_mb * MIB
        )
        self.buckets = _buckets(module, limit)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(_Hook(self, bucket))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the first backward outside averages their sum."""
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = True

    def wait_for_gradients(self) -> None:
        """Average the gradients that are not yet averaged and wait for all of them.

        Raises:
            RuntimeError: A trainable parameter took no part in the backward, and
                ``find_unused_parameters`` is not set.
        """
        missing = self._fill_missing()
        while self._num_begun < len(self.buckets):
            self._begin_next()
        unused = self._unused_anywhere(missing) if self.find_unused_parameters else []
        for bucket in self.buckets:
            bucket.finish()
        self._num_begun = 0
        for parameter in unused:
            parameter.grad = None

    def _begin_next(self) -> None:
        bucket = self.buckets[self._num_begun]
        bucket.begin(self.group, self._flattens)
        if self._on_average is not None:
            self._on_average(bucket.parameters)
        self._num_begun += 1

    def _gradient_ready(self, bucket: Bucket, parameter: Tensor) -> None:
        if not self.require_backward_grad_sync:
            return
        if bucket.is_begun:
            raise RuntimeError("a second backward before wait_for_gradients(): use no_sync() to accumulate")
        bucket.ready.add(parameter)
        if not (self.overlaps and bucket.is_ready):
            return
        # Every rank must begin the collectives in the same order, whatever the order of its backward.
        while self._num_begun < len(self.buckets) and self.buckets[self._num_begun].is_ready:
            self._begin_next()

    def _fill_missing(self) -> set[nn.Parameter]:
        """Give zeros to the parameters without a gradient and return them."""
        named = [pair for bucket in self.buckets for pair in bucket.named()]
        missing = {name: parameter for name, parameter in named if parameter.grad is None}
        if missing and not self.find_unused_parameters:
            raise RuntimeError(
                f"no gradient for {', '.join(list(missing)[:3])} ({len(missing)} parameters): "
                "find_unused_parameters=True allows parameters that take no part in a step"
            )
        for parameter in missing.values():
            parameter.grad = torch.zeros_like(parameter)
        return set(missing.values())

    def _unused_anywhere(self, missing: set[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that no rank used."""
        parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        if not parameters:
            return []
        used = torch.tensor([parameter not in missing for parameter in parameters], dtype=torch.uint8)
        used = used.to(parameters[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX, self.group)
        # A rank that used all of them does not wait for the result.
        flags = used.tolist() if missing else [1] * len(parameters)
        return [parameter for parameter, flag in zip(parameters, flags, strict=True) if not flag]


class _Hook:
    """Post-accumulate-gradient hook of one bucket.

    Refers weakly to the wrapper: the garbage collector does not see a parameter's hooks, and a cycle through
    them would keep the module's memory.
    """

    def __init__(self, wrapper: DataParallel, bucket: Bucket):
        self.wrapper = weakref.ref(wrapper)
        self.bucket = weakref.ref(bucket)

    def __call__(self, parameter: Tensor) -> None:
        wrapper, bucket = self.wrapper(), self.bucket()
        if wrapper is not None and bucket is not None:
            wrapper._gradient_ready(bucket, parameter)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _buckets(module: nn.Module, max_bytes: float) -> list[Bucket]:
    """Return buckets of one dtype and device, the last parameters first: their gradients are ready first."""
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[Bucket, int]] = {}
    for name, parameter in reversed(list(module.named_parameters())):
        if not parameter.requires_grad:
            continue
        kind = (parameter.dtype, parameter.device)
        bucket, num_bytes = open_buckets.get(kind, (None, 0))
        if bucket is None or num_bytes + parameter.nbytes > max_bytes:
            bucket, num_bytes = Bucket([], []), 0
            buckets.append(bucket)
        bucket.names.append(name)
        bucket.parameters.append(parameter)
        open_buckets[kind] = (bucket, num_bytes + parameter.nbytes)
    return buckets
