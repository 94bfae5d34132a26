"""The tracer: a dispatch mode that records every operation of a step on fake tensors in a ledger."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.catalog.collectives import namespaces
from trainfit.ledger.ledger import GROUPS_PER_RUN, MIDDLE, NO_LAYER, Ledger, Op, part_of, run_of
from trainfit.virtual.cuda.attention_kernel import attention_kernel
from trainfit.virtual.cuda.fake_impls import READS_VALUE, are_equal, read, run
from trainfit.virtual.cuda.flops import count, visible_only
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS, LIBRARY_UPDATES, base_name
from trainfit.virtual.cuda.scratch import GpuTraits, as_allocated, copied_bytes, output_bytes, scratch_bytes
from trainfit.virtual.cuda.scratch.libraries import Workspaces
from trainfit.virtual.trace.counted_mode import CountedMode
from trainfit.virtual.trace.dry_run import DryRun, dry_run
from trainfit.virtual.trace.gradient_accumulation import accumulate_in_place, sole_reference_counts
from trainfit.virtual.trace.host_tensors import PlacementState, carry_values, is_host, known_value, on_host
from trainfit.virtual.trace.masks.tracker import MaskTracker
from trainfit.virtual.trace.observer import Observer
from trainfit.virtual.trace.op_entries import op_entries
from trainfit.virtual.trace.scope import Scope, ScopeTracker
from trainfit.virtual.trace.storages import LiveStorages
from trainfit.virtual.trace.tensors import tensors_of

aten = torch.ops.aten
LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""Last operations of ``torch.tensor``: their input is a real tensor, on whichever device the result is."""
CONVERSIONS = {aten._to_copy.default, aten.clone.default}
AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
DEVICE = torch.ops.prim.device.default
"""The device query, more than half of all calls."""


class Tracer(TorchDispatchMode):
    """Records operations while it is entered, inside a FakeTensorMode and a ``ScopeTracker``.

    Args:
        gpu: the GPU whose scratch and workspaces are recorded; None for a CPU, whose scratch is not recorded.
        observers: called for each recorded event; those of ``scopes`` are given to it.
    """

    def __init__(
        self,
        gpu: GpuTraits | None,
        scopes: ScopeTracker,
        placement: PlacementState,
        observers: Sequence[Observer] = (),
    ):
        super().__init__()
        self.placement = placement
        self.gpu, self.scopes = gpu, scopes
        self.live = LiveStorages(scopes, observers)
        self.observers = tuple(observers)
        self.workspaces = Workspaces(gpu) if gpu else None
        self.masks = MaskTracker(self._limit_model_flops)
        self.visible_share: Fraction | None = None
        """In compiled code: the share of query-key pairs of the running product that a mask leaves
        visible."""
        self.libraries: dict[str, Callable[[Any, Any, Any], Any]] = {}
        """Namespace of a library's operators -> the function that runs them, or returns NotImplemented."""
        self._unknown: set[str] = set()
        self._graphs = self._reads = self._wrapped = self._wrapped_tensors = self._in_mode = 0
        self._views = Counter[int]()
        """Group of the tensor that it is a view of -> views since the entry before."""
        self._host: dict[int, tuple[Any, int]] = {}
        """Pinned host memory by address: the storage (on ``meta``) and the group that first copied it."""
        sole_reference_counts()  # Cached here, outside any dispatch.
        self.begin("init", "init")
        for observer in observers:
            observer.attach(self)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile inside this mode, which sees the operations of compiled code."""
        return True

    @property
    def ledger(self) -> Ledger:
        """The ledger so far."""
        return self.live.ledger

    def begin(self, step: str, phase: str) -> None:
        """Begin a phase of a step."""
        self.live.begin(step, phase)
        self.scopes.phase = phase

    def own_host(self, memory: Tensor, scope: Scope) -> None:
        """Assign pinned host memory to a parameter's scope."""
        storage = memory.untyped_storage()
        self._host[storage._cdata] = storage, scope.group

    def finish(self) -> Ledger:
        """Return the ledger, completed with the facts that the whole run decides."""
        ledger = self.live.finish()
        ledger.ops_without_flops = tuple(sorted(self._unknown))
        ledger.pinned = tuple((storage.nbytes(), group) for storage, group in self._host.values())
        return ledger

    def launched(self, name: str, num_bytes: int, dtype: str, product: tuple[int, ...] = ()) -> None:
        """Record a kernel that is no operation of PyTorch: of compiled code, of the user or a library.

        Args:
            product: of a matrix product: batch, m, n, k.
        """
        scope, segment = self.scopes.current(), self.live.segment
        self.live.current_group = scope.group
        flops = 2 * math.prod(product) if product else 0
        needed = self.scopes.phase in ("forward", "backward") and not (scope.recomputing or scope.updating)
        op = Op(
            name, scope.module, segment, scope.group, flops, flops, flops * needed, flops * needed, num_bytes,
            dtype, is_update=scope.updating, shape=product, **self._host_calls(scope.group),
        )  # fmt: skip
        self.ledger.ops.append(op)

    def count_read(self) -> None:
        """Count a read of a value, for which the host waits."""
        self._reads += 1

    def entered_graph(self) -> None:
        """Count a call of a compiled graph."""
        self._graphs += 1

    def _host_calls(self, group: int) -> dict[str, Any]:
        """Return the fields of an entry that count the host's work since the entry before.

        Args:
            group: the entry's. A compiled graph's saved tensors and autograd's kept gradients are views, made
                for all layers before one entry outside them: these count for each layer that a traced one
                stands for.
        """
        times = self.ledger.times_of_group
        runs_once = times(group) == 1
        parts = Counter(run_of(one) for one in self._views)
        views = sum(
            count * (times(one) if runs_once and parts[run_of(one)] == GROUPS_PER_RUN else 1)
            for one, count in self._views.items()
        )
        found = views, self.scopes.num_entered, self._graphs, self._reads
        wrapped, in_mode = (self._wrapped, self._wrapped_tensors), self._in_mode
        self._views.clear()
        self.scopes.num_entered = self._graphs = self._reads = 0
        self._wrapped = self._wrapped_tensors = self._in_mode = 0
        return {"host": found, "wrapped": wrapped, "in_mode": in_mode}

    def tuned(self, scratch: Sequence[tuple[int, ...]]) -> None:
        """Record a kernel's autotuning, which belongs to no group: each tuple is freed together."""
        scope = self.scopes.current()
        if part_of(scope.group) == MIDDLE:
            return  # The first group launches the same kernels.
        for sizes in scratch:
            self.live.add_scratch(sizes, len(self.ledger.ops) - 1, scope._replace(group=NO_LAYER), "tuning")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # As FakeTensor does, but faster.
        with torch._C.DisableTorchFunction():  # HostTensorMode would take each attribute read from a tensor.
            return self._run(func, types, args, kwargs or {})

    @contextmanager
    def python_body(self) -> Iterator[None]:
        """Trace the Python code of an operator, which runs below its dispatch.

        Autograd's keys are entered again, without gradients: they decompose composite operations.
        """
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(AUTOGRAD)
        with ExitStack() as stack:
            stack.callback(torch._C._dispatch_tls_set_dispatch_key_excluded, AUTOGRAD, excluded)
            torch._C._dispatch_tls_set_dispatch_key_excluded(AUTOGRAD, False)
            stack.enter_context(torch.no_grad())
            stack.enter_context(self)
            yield

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._in_mode += CountedMode.num_entered > 0
        tensors = tensors_of((args, kwargs)) if kwargs else tensors_of(args)
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper subclass (torchao's) runs its own rule, whose operations come back here.
            self._wrapped += 1
            self._wrapped_tensors += len(tensors)
            return NotImplemented
        if self._stays_on_host(func, tensors):
            out = on_host(func, args, kwargs)
            if self.gpu is None:
                self._record(func, args, kwargs, out)  # The device of a virtual CPU is the host.
            return out
        if func.namespace in self.libraries:
            found = self.libraries[func.namespace](func, args, kwargs)
            if found is not NotImplemented:
                return found
        if func in READS_VALUE:
            self.count_read()
            if known_value(args[0]) is None:
                for observer in self.observers:
                    observer.reads_unknown()
            return read(args[0])
        if func is aten.equal.default:
            self.count_read()
            return are_equal(*args)
        func = accumulate_in_place(func, args, kwargs)
        launched = dry_run(func, args, kwargs, self.gpu) if self.gpu else None
        if launched is not None:
            self._record(func, args, kwargs, *launched)
            return launched[0]
        out = run(func, args, kwargs)
        carry_values(func, args, kwargs, tensors, out)
        self._record(func, args, kwargs, out)
        self.masks.propagate(func, args, kwargs, out, len(self.ledger.ops) - 1)
        return out

    def _stays_on_host(self, func: Any, tensors: list[Tensor]) -> bool:
        if self.placement.is_moving:
            return False
        if not tensors or func in LIFTS:
            return self.placement.on_host
        return all(is_host(t) for t in tensors)

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, dry_run: DryRun | None = None) -> None:
        if func.namespace in namespaces():
            for observer in self.observers:
                observer.communicates(func, (*args, *kwargs.values()))
        outputs = tensors_of(out)
        fresh = [(n, t) for n, t in enumerate(outputs) if self._is_fresh(t)]
        if not fresh and not func._schema.is_mutable:
            self._views[self.live.group_of(args)] += 1
            return
        scope = self.scopes.current()
        owners = self.live.owners_of(args) if scope.owned else []
        if len({owner.group for owner in owners}) == 1:
            scope = owners[0]
        self.live.current_group = scope.group
        op = self._add_ops(func, args, kwargs, out, scope, owners)
        if dry_run is not None:
            self._replay(dry_run, fresh, op, scope, str(func))
            return
        sizes = output_bytes(func, args, kwargs, out) if self.gpu else {}
        copies = list[int]()
        if self.gpu and self.workspaces:
            copied = copied_bytes(func, args, kwargs, gpu=self.gpu)
            copies = self.live.begin_scratch(copied, op, scope, str(func))
        is_listed = len(owners) > 1
        converts = self.scopes.phase == "init" and func in CONVERSIONS
        for n, t in as_allocated(func, fresh) if self.gpu else fresh:
            self.live.allocate(
                t,
                "list" if is_listed else str(n),
                op,
                owners[n] if len(owners) == len(outputs) else scope,
                num_bytes=sizes.get(n),
                is_owned=bool(owners),
                is_listed=is_listed,
                source=args[0] if converts else None,
            )
        if self.gpu and self.workspaces:
            for num_bytes in self.workspaces.first_use(func, args, kwargs, scope.in_autograd):
                self.live.add(num_bytes, -1, "workspace", NO_LAYER, "workspace")
            scratch = scratch_bytes(func, args, kwargs, out, gpu=self.gpu)
            self.live.add_scratch(scratch, op, scope, str(func))
            self.live.free_scratch(copies, scope)

    def _replay(
        self, dry_run: DryRun, fresh: list[tuple[int, Tensor]], op: int, scope: Scope, name: str
    ) -> None:
        """Record a dry run's allocations and frees in order; those that are no results are scratch."""
        results = {dry_run.number_of(t): (n, t) for n, t in fresh}
        path = f"{scope.path}/{name}/scratch"
        scratch: dict[int, int] = {}
        for number, is_free in dry_run.changes:
            if number in results:
                n, t = results[number]
                self.live.allocate(t, str(n), op, scope)
            elif is_free and number in scratch:
                self.live.free(scratch[number], scope.group)
            elif dry_run.num_bytes[number]:
                num_bytes = dry_run.num_bytes[number]
                scratch[number] = self.live.add(num_bytes, op, path, scope.group, "temporary")

    def _is_fresh(self, t: Tensor) -> bool:
        return t.device.type != "meta" and not self.live.has(t)

    def _add_ops(self, func: Any, args: Any, kwargs: Any, out: Any, scope: Scope, owners: list[Scope]) -> int:
        """Append the operation's entries and return the index of the last one."""
        capability = self.gpu.compute_capability if self.gpu else None
        attention = attention_kernel(func, args, kwargs, capability)
        counted = count(func, args, kwargs, out, attention.kernel)
        if counted is None:
            self._unknown.add(str(func))
        elif self.masks.is_of_positions(func, args):
            counted = counted._replace(model_full=0, model_causal=0)
        elif counted.model_full:
            share = self.visible_share
            share = self.masks.visible_share(func, args, kwargs) if share is None else share
            counted = counted if share is None else visible_only(counted, share)
        self.ledger.ops += op_entries(
            func, args, kwargs, out, counted=counted, scope=scope, owners=owners, phase=self.scopes.phase,
            segment=self.live.segment, attention=attention, capability=capability,
            host=self._host_calls(min((owner.group for owner in owners), default=scope.group)),
        )  # fmt: skip
        if self.ledger.ops[-1].name in COPY_DIRECTIONS or base_name(func) in LIBRARY_UPDATES:
            for t in tensors_of(args):
                if t.is_meta:
                    self._host.setdefault(t.untyped_storage()._cdata, (t.untyped_storage(), scope.group))
        return len(self.ledger.ops) - 1

    def _limit_model_flops(self, index: int, share: Fraction) -> None:
        """Limit the model FLOPs of a recorded product to the visible share of its query-key pairs."""
        op = self.ledger.ops[index]
        self.ledger.ops[index] = op._replace(
            model_flops=min(op.model_flops, int(op.model_flops_full * share))
        )
