"""The tracer: sees every operation of a step on fake tensors and writes the ledger.

Enters: operations below autograd (a TorchDispatchMode). Leaves: the ledger's operations with their module, phase and group
of layers, and, through ``LiveStorages``, what they allocate.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.ledger.ledger import MIDDLE, NO_LAYER, Ledger, Op, part_of
from trainfit.virtual.cuda.attention_kernel import attention_kernel
from trainfit.virtual.cuda.fake_impls import READS_VALUE, read, run
from trainfit.virtual.cuda.flops import count, visible_only
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS
from trainfit.virtual.cuda.scratch import GpuTraits, as_allocated, output_bytes, scratch_bytes
from trainfit.virtual.cuda.scratch.libraries import Workspaces
from trainfit.virtual.trace.dry_run import DryRun, dry_run
from trainfit.virtual.trace.gradient_accumulation import as_the_engine_does, held_by_engine_alone
from trainfit.virtual.trace.host_tensors import PlacementState, carry_values, is_host, on_host
from trainfit.virtual.trace.masks.tracker import MaskTracker
from trainfit.virtual.trace.op_entries import op_entries
from trainfit.virtual.trace.scope import Scope, ScopeTracker
from trainfit.virtual.trace.storages import LiveStorages
from trainfit.virtual.trace.tensors import tensors_of

aten = torch.ops.aten
LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""What ``torch.tensor`` ends with: its input is a real tensor whichever side the result is on."""
CONVERSIONS = {aten._to_copy.default, aten.clone.default}
DEVICE = torch.ops.prim.device.default
"""Asked of every fake tensor by most of PyTorch's Python: more than half of what comes here."""


class Tracer(TorchDispatchMode):
    """Records what runs while it is entered. Enter it inside a FakeTensorMode and a ``ScopeTracker``.

    Args:
        gpu: the CUDA GPU whose kernels' scratch and workspaces count; None for a CPU, whose scratch is not seen.
    """

    def __init__(self, gpu: GpuTraits | None, scopes: ScopeTracker, placement: PlacementState):
        super().__init__()
        self.placement = placement
        self.gpu, self.scopes = gpu, scopes
        self.live = LiveStorages(scopes)
        self.workspaces = Workspaces(gpu) if gpu else None
        self.pairs = MaskTracker(self._leave_out)
        self.share: Fraction | None = None
        """Of the pairs of the product that runs now, which ones a mask leaves, where compiled code says it."""
        self._unknown: set[str] = set()
        self._host: dict[int, tuple[Any, int]] = {}
        """Host memory that is copied from or to, by address: storages on ``meta``, with the group that first did."""
        held_by_engine_alone()
        self.begin("init", "init")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile compiles inside this mode; the mode sees what the compiled code runs."""
        return True

    @property
    def ledger(self) -> Ledger:
        """What is written down so far."""
        return self.live.ledger

    # -- what the step tells ------------------------------------------------------------------------------------

    def begin(self, step: str, phase: str) -> None:
        """A phase of a step begins."""
        self.live.begin(step, phase)
        self.scopes.phase = phase

    def own_host(self, memory: Tensor, scope: Scope) -> None:
        """The host memory belongs to the parameter at this place."""
        storage = memory.untyped_storage()
        self._host[storage._cdata] = storage, scope.group

    def finish(self) -> Ledger:
        """The ledger, with what only the whole run tells."""
        ledger = self.live.finish()
        ledger.ops_without_flops = tuple(sorted(self._unknown))
        ledger.pinned = tuple((storage.nbytes(), group) for storage, group in self._host.values())
        return ledger

    def launched(self, name: str, num_bytes: int, dtype: str) -> None:
        """A kernel that is no operation of PyTorch's ran: compiled code's own."""
        scope, segment = self.scopes.current(), self.live.segment
        self.live.group_at_work = scope.group
        self.ledger.ops.append(Op(name, scope.module, segment, scope.group, 0, 0, 0, 0, num_bytes, dtype))

    def tuned(self, scratch: Sequence[tuple[int, ...]]) -> None:
        """The kernel that launches now tried its configurations first: each tuple was allocated and freed together.

        That happens once, not in each layer: it belongs to none.
        """
        scope = self.scopes.current()
        if part_of(scope.group) == MIDDLE:
            return  # Equal layers are counted as one here; the first and the last one launch the same kernels first.
        for sizes in scratch:
            self.live.add_scratch(sizes, len(self.ledger.ops) - 1, scope._replace(group=NO_LAYER), "tuning")

    # -- what PyTorch tells -------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # As FakeTensor itself answers, on a shorter way.
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper around tensors (torchao's): its own rule runs first, and what that does comes back here.
            return NotImplemented
        tensors = tensors_of((args, kwargs))
        if self._stays_on_host(func, tensors):
            out = on_host(func, args, kwargs)
            if self.gpu is None:
                self._record(func, args, kwargs, out)  # A CPU's own memory is the host's.
            return out
        if func in READS_VALUE:
            return read(args[0])
        func = as_the_engine_does(func, args, kwargs)
        launched = dry_run(func, args, kwargs, self.gpu.compute_capability) if self.gpu else None
        if launched is not None:
            self._record(func, args, kwargs, *launched)
            return launched[0]
        out = run(func, args, kwargs)
        carry_values(func, args, kwargs, out)
        self._record(func, args, kwargs, out)
        self.pairs.follow(func, args, kwargs, out, len(self.ledger.ops) - 1)
        return out

    def _stays_on_host(self, func: Any, tensors: list[Tensor]) -> bool:
        if self.placement.is_moving:
            return False
        if not tensors or func in LIFTS:
            return self.placement.on_host
        return all(is_host(t) for t in tensors)

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, dry_run: DryRun | None = None) -> None:
        outputs = tensors_of(out)
        fresh = [(n, t) for n, t in enumerate(outputs) if self._is_fresh(t)]
        if not fresh and not func._schema.is_mutable:
            return
        scope = self.scopes.current()
        owners = self.live.owners_of(args) if scope.owned else []
        if len({owner.group for owner in owners}) == 1:
            scope = owners[0]
        self.live.group_at_work = scope.group
        op = self._add_ops(func, args, kwargs, out, scope, owners)
        if dry_run is not None:
            self._replay(dry_run, fresh, op, scope, str(func))
            return
        sizes = output_bytes(func, args, kwargs, out) if self.gpu else {}
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
        for num_bytes in (
            self.workspaces.first_use(func, args, kwargs, scope.in_autograd) if self.workspaces else ()
        ):
            self.live.add(num_bytes, -1, "workspace", NO_LAYER, "workspace")
        if self.gpu:
            scratch = scratch_bytes(func, args, kwargs, out, gpu=self.gpu)
            self.live.add_scratch(scratch, op, scope, str(func))

    def _replay(
        self, dry_run: DryRun, fresh: list[tuple[int, Tensor]], op: int, scope: Scope, name: str
    ) -> None:
        """Allocations and frees in the order of the dry run; what it did not give back is scratch."""
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
        """Write the operation down; the index of its last entry."""
        attention = attention_kernel(func, args, kwargs, self.gpu.compute_capability if self.gpu else None)
        counted = count(func, args, kwargs, out, attention.kernel)
        if counted is None:
            self._unknown.add(str(func))
        elif counted.model_full:
            share = self.pairs.share(func, args, kwargs) if self.share is None else self.share
            counted = counted if share is None else visible_only(counted, share)
        self.ledger.ops += op_entries(
            func,
            args,
            kwargs,
            out,
            counted=counted,
            scope=scope,
            owners=owners,
            phase=self.scopes.phase,
            segment=self.live.segment,
            attention=attention,
        )
        if self.ledger.ops[-1].name in COPY_DIRECTIONS:
            for t in args:
                if t.is_meta:
                    self._host.setdefault(t.untyped_storage()._cdata, (t.untyped_storage(), scope.group))
        return len(self.ledger.ops) - 1

    def _leave_out(self, index: int, share: Fraction) -> None:
        """A product already written down worked on pairs of which this share is visible."""
        op = self.ledger.ops[index]
        self.ledger.ops[index] = op._replace(
            model_flops=min(op.model_flops, int(op.model_flops_full * share))
        )
